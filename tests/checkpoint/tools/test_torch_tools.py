"""torch.distributed.checkpoint and its helpers on sharded models, without any preparation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.checkpoint.plain_torch import everything, load, logits, run_of, state_of, train
from tests.checkpoint.sharding import differences
from tests.ranks import Ranks

_MATRIX = pytest.mark.matrix("torch-tools")
Saved = tuple[dict[str, object], dict[str, object]]


def _save(directory: str, kind: str, strategy: str, way: str) -> Saved:
    run = run_of(kind, strategy)
    train(run, range(1))
    dcp.save(state_of(run, way), checkpoint_id=directory)
    saved = everything(run)
    train(run, range(1, 2))
    return saved, everything(run)


def _load(directory: str, kind: str, strategy: str, way: str) -> Saved:
    run = run_of(kind, strategy, salt=1)
    if way in ("modules", "state dicts"):
        # These show the states that there are; torch's helpers make them.
        train(run, range(7, 8))
    logits(run)
    load(run, way, directory)
    loaded = everything(run)
    train(run, range(1, 2))
    return loaded, everything(run)


@pytest.mark.parametrize(
    ("kind", "way", "saved_by", "loaded_by"),
    [
        ("adamw", "helpers", (2, "optim_grads_params"), (3, "optim_grads_params")),
        ("adamw-fused", "flat", (4, "hsdp"), (1, "no_shard")),
        ("sgd", "stateful", (3, "optim"), (2, "hfsdp")),
        ("adam", "modules", (2, "no_shard"), (3, "optim_grads")),
        ("adam-bf16", "state dicts", (2, "optim_grads"), (4, "hsdp")),
        ("adam-fp8", "flat", (1, "optim"), (4, "hfsdp")),
        ("adam-remainders", "stateful", (2, "hsdp"), (1, "no_shard")),
        ("muon", "on the cpu", (4, "hfsdp"), (2, "no_shard")),
        *(
            pytest.param(kind, "helpers", saved_by, loaded_by, marks=_MATRIX)
            for kind, saved_by, loaded_by in [
                ("adam", (4, "hfsdp"), (2, "optim")),
                ("adam-bf16", (2, "hfsdp"), (2, "optim_grads_params")),
                ("adam-fp8", (3, "optim_grads_params"), (2, "no_shard")),
                ("adam-remainders", (2, "optim_grads_params"), (3, "optim")),
                ("muon", (2, "optim_grads_params"), (3, "optim_grads_params")),
            ]
        ),
    ],
)
def test_a_loaded_run_goes_on_as_if_it_had_never_stopped(
    ranks: Ranks,
    tmp_path: Path,
    kind: str,
    way: str,
    saved_by: tuple[int, str],
    loaded_by: tuple[int, str],
) -> None:
    """State, logits right after the load and after another step are equal bit by bit."""
    _check(ranks, str(tmp_path), kind, way, saved_by, loaded_by)


def _check(
    ranks: Ranks,
    directory: str,
    kind: str,
    way: str,
    saved_by: tuple[int, str],
    loaded_by: tuple[int, str],
) -> None:
    saved, continued = ranks(saved_by[0]).run(_save, directory, kind, saved_by[1], way)[0]
    assert len(differences(saved, continued)) > 20
    for loaded, resumed in ranks(loaded_by[0]).run(_load, directory, kind, loaded_by[1], way):
        assert differences(saved, loaded) == []
        assert differences(continued, resumed) == []


_MESHES = [
    (1, "no_shard"),
    (2, "optim_grads_params"),
    (3, "optim"),
    (4, "hsdp"),
    (4, "hfsdp"),
]
_KINDS = ("adamw", "sgd", "adam", "adam-bf16", "adam-fp8", "adam-remainders", "muon")


@_MATRIX
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("saved_by", _MESHES)
@pytest.mark.parametrize("loaded_by", _MESHES)
def test_every_mesh_loads_what_every_mesh_saved(
    ranks: Ranks,
    tmp_path: Path,
    kind: str,
    saved_by: tuple[int, str],
    loaded_by: tuple[int, str],
) -> None:
    """The same for all ordered pairs of meshes and all optimizers."""
    _check(ranks, str(tmp_path), kind, "helpers", saved_by, loaded_by)
