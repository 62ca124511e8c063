"""The rank pools themselves: values, isolation, failures, hangs."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megafsdp.device.memory import ByteLedger, Category, FlatStorage
from tests.ranks import Ranks, RanksError


def _rank_plus(offset: int) -> int:
    return dist.get_rank() + offset


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("out of cheese")
    dist.barrier()


def _fail_everywhere() -> None:
    raise ValueError(f"no cheese on {dist.get_rank()}")


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def _abort_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGABRT)


def _warn() -> None:
    warnings.warn("mind the gap", UserWarning, stacklevel=1)


def _sum_over_mesh() -> tuple[bool, float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("rows",))
    total = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).sum()
    assert isinstance(total, DTensor)
    return total.device_mesh is mesh, total.full_tensor().item()


def _fresh_storage_is_poisoned() -> bool:
    storage = FlatStorage(
        8,
        torch.float32,
        device=torch.device("cpu"),
        ledger=ByteLedger(),
        category=Category.UNSHARDED,
    )
    return bool(storage.tensor.isnan().all())


def _seen_variable() -> str | None:
    return os.environ.get("MEGAFSDP_SIMD")


def _closure() -> Callable[[], None]:
    return lambda: None


def test_every_rank_returns_its_value(ranks: Ranks) -> None:
    """Values come back in rank order, from partials too."""
    assert ranks(3).run(_rank_plus, 10) == [10, 11, 12]
    assert ranks(3).run(functools.partial(_rank_plus, 20)) == [20, 21, 22]


def test_tensors_go_in_and_out(ranks: Ranks) -> None:
    """Tensors survive the pipes both ways, and collectives work."""
    assert all(torch.equal(t, torch.full((3,), 4.0)) for t in ranks(4).run(_summed, torch.ones(3)))


@hypothesis.settings(max_examples=5)
@hypothesis.given(offset=st.integers(-5, 5))
def test_hypothesis_can_call_ranks(ranks: Ranks, offset: int) -> None:
    """The fixture lives longer than one example."""
    assert ranks(2).run(_rank_plus, offset) == [offset, offset + 1]


def test_pool_keeps_its_processes_between_calls(ranks: Ranks) -> None:
    """A second call runs in the same processes as the first."""
    ranks(2).run(_rank_plus, 0)
    process_ids = ranks(2).process_ids
    ranks(2).run(_rank_plus, 0)
    assert ranks(2).process_ids == process_ids != []


def test_meshes_of_a_call_are_gone_in_the_next(ranks: Ranks) -> None:
    """DTensor, which caches specs by equality, gives no mesh of an earlier call."""
    for _ in range(2):
        assert ranks(2).run(_sum_over_mesh) == [(True, 28.0)] * 2


def test_poison_and_environment_hold_in_ranks(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's MEGAFSDP_ variables, poison among them, are the ranks' for that call."""
    assert ranks(2).run(_fresh_storage_is_poisoned) == [True, True]
    monkeypatch.setenv("MEGAFSDP_SIMD", "scalar")
    assert ranks(2).run(_seen_variable) == ["scalar", "scalar"]
    monkeypatch.delenv("MEGAFSDP_SIMD")
    assert ranks(2).run(_seen_variable) == [None, None]


def test_warning_in_a_rank_is_an_error(ranks: Ranks) -> None:
    """Warning filters of the test hold in its ranks."""
    with pytest.raises(RanksError, match="mind the gap"):
        ranks(2).run(_warn)


def test_failure_everywhere_shows_every_rank(ranks: Ranks) -> None:
    """Each rank's traceback is shown under its rank."""
    with pytest.raises(RanksError, match="_fail_everywhere") as caught:
        ranks(3).run(_fail_everywhere)
    assert sorted(caught.value.failures) == [0, 1, 2]
    assert all(f"no cheese on {rank}" in text for rank, text in caught.value.failures.items())


def test_failure_on_one_rank_comes_first_and_soon(ranks: Ranks) -> None:
    """Ranks left in a collective do not delay the report and stand behind the one that failed."""
    start_s = time.monotonic()
    with pytest.raises(RanksError, match="out of cheese") as caught:
        ranks(3).run(_fail_on, 2)
    assert time.monotonic() - start_s < 20
    assert next(iter(caught.value.failures)) == 2
    assert "barrier" in caught.value.failures[0]


def test_hang_names_function_rank_and_line(ranks: Ranks) -> None:
    """A rank that does not answer is reported with its stack; those that did answer are not."""
    with pytest.raises(RanksError, match="_hang_on") as caught:
        ranks(2).run(_hang_on, 1, timeout_s=1.0)
    assert list(caught.value.failures) == [1]
    assert "No answer in 1 s" in caught.value.failures[1]
    assert "_hang_on" in caught.value.failures[1]


def test_death_of_a_rank_is_reported(ranks: Ranks) -> None:
    """A process that aborts is named, with the stack that faulthandler wrote."""
    with pytest.raises(RanksError, match="_abort_on") as caught:
        ranks(2).run(_abort_on, 0)
    assert "process died" in caught.value.failures[0]
    assert "_abort_on" in caught.value.failures[0]


def test_pool_is_remade_after_a_failure(ranks: Ranks) -> None:
    """The old processes are gone and the next call has new ones."""
    ranks(2).run(_rank_plus, 0)
    old = ranks(2).process_ids
    with pytest.raises(RanksError):
        ranks(2).run(_hang_on, 0, timeout_s=0.5)
    for process_id in old:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
    assert ranks(2).run(_rank_plus, 0) == [0, 1]
    assert not set(old) & set(ranks(2).process_ids)


def test_closures_are_refused(ranks: Ranks) -> None:
    """Only what pickle finds by name can be called."""
    errors = (AttributeError, TypeError, pickle.PicklingError)
    with pytest.raises(errors, match=r"pickle|local object"):
        ranks(2).run(_closure())
