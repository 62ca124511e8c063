"""docs/from-megatron-fsdp.md: its program runs, and its tables are those of the code."""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafsdp import full_state_dict, megatron
from megafsdp.megatron.refusals import ATTRIBUTES, METHODS, NAMES, NEEDLESS, ONLY
from tests.end_to_end.test_readme import python_blocks
from tests.fsdp.toy import Net
from tests.ranks import Ranks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "from-megatron-fsdp.md").read_text()
# Parameters of fully_shard_model() in Megatron-FSDP's releases 0.1 to 0.6.1.
THEIR_KEYWORDS = [
    "module",
    "device_mesh",
    "dp_shard_dim",
    "dp_outer_dim",
    "tp_dim",
    "hybrid_fsdp_group",
    "hybrid_fsdp_expt_group",
    "expt_device_mesh",
    "fsdp_group_ag",
    "expt_fsdp_group_ag",
    "fsdp_unit_modules",
    "zero_dp_strategy",
    "outer_dp_sharding_strategy",
    "device",
    "init_model_with_meta_device",
    "mixed_precision_policy",
    "grad_reduce_in_fp32",
    "preserve_fp32_weights",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "sync_model_each_microbatch",
    "preproc_state_dict_for_dcp_ckpt",
    "check_for_nan_in_grad",
    "report_nan_in_param_grad",
    "average_in_collective",
    "disable_bucketing",
    "calculate_per_token_loss",
    "keep_fp8_transpose_cache",
    "nccl_ub",
    "fsdp_double_buffer",
    "fsdp_db_use_persist_buf_on_alloc_fail",
    "disable_symmetric_registration",
    "enable_fine_grained_param_gather",
    "use_decoupled_grad",
    "cuda_graph_mode",
    "maxpool_double_buffer",
]
# A value of each keyword and field that asks for something else than what happens anyway.
OTHER_VALUES: dict[str, object] = {
    name: True if False in accepted else "other" if None in accepted and True not in accepted else 0
    for name, (accepted, _) in ONLY.items()
}
FIELDS = {field.name for field in fields(megatron.DistributedDataParallelConfig)}


def tables() -> dict[str, dict[str, list[str]]]:
    """Return the other cells of each row by the row's name, by the heading of the first column."""
    found: dict[str, dict[str, list[str]]] = {}
    for text in re.findall(r"(?:^\|.*\n)+", PAGE, flags=re.MULTILINE):
        header, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines()]
        found.setdefault(" | ".join(header), {}).update({r[0].strip("`"): r[1:] for r in rows})
    return found


def _plain(accepted: tuple[object, ...]) -> str:
    return " or ".join(f"`{value}`" for value in accepted)


def test_the_tables_have_a_row_for_every_keyword_field_method_and_name() -> None:
    """What is refused stands in the page with the accepted value and the text of the error."""
    found = tables()
    known = set(megatron.MegatronKeywords.__annotations__) | {"module", "device_mesh"}
    assert known == set(THEIR_KEYWORDS)
    refused = found["keyword | value | instead"]
    assert set(found["keyword | here"]) | set(refused) == known
    assert not set(found["keyword | here"]) & set(refused)
    assert set(refused) == set(ONLY) & known
    of_fields = found["field | value | instead"]
    assert set(of_fields) == set(ONLY) - known
    own = found["field of `DistributedDataParallelConfig` | here"]
    assert set(own) | (set(ONLY) & FIELDS) == FIELDS
    for name, (accepted, hint) in ONLY.items():
        assert (refused | of_fields)[name] == [_plain(accepted), hint]
    methods = found["method of the wrapper | instead"]
    assert methods == {name: [hint] for name, hint in METHODS.items()}
    attributes = found["attribute of the wrapper | instead"]
    assert attributes == {name: [hint] for name, hint in ATTRIBUTES.items()}
    names = found["name of the package | instead"]
    assert names == {name: [hint] for name, hint in NAMES.items()}


def test_programs_that_look_up_keywords_find_all_of_them() -> None:
    """In the signatures, with what each means that is left out."""
    for function, own in (
        (megatron.fully_shard_model, ["module", "device_mesh"]),
        (megatron.fully_shard, ["module", "optimizer", "device_mesh"]),
    ):
        parameters = inspect.signature(function).parameters
        assert [*parameters][: len(own)] == own
        assert set(parameters) == {*THEIR_KEYWORDS, *own}
        for name, (accepted, _) in ONLY.items():
            assert name not in parameters or parameters[name].default in accepted
        assert parameters["zero_dp_strategy"].default == 3


@pytest.mark.parametrize("name", [n for n in ONLY if n in THEIR_KEYWORDS])
def test_a_keyword_that_asks_for_more_is_refused_by_name(name: str) -> None:
    """The error says what to do; the values of the table are no reason for one."""
    accepted, hint = ONLY[name]
    with pytest.raises(NotImplementedError, match=re.escape(hint)) as caught:
        megatron.fully_shard_model(Net(), **{name: OTHER_VALUES[name]})
    assert str(caught.value).startswith(f"Expected {name} to be ")
    for value in accepted:
        # No process group: the call comes as far as the mesh.
        with pytest.raises(RuntimeError, match="process group"):
            megatron.fully_shard_model(Net(), **{name: value})


@pytest.mark.parametrize("name", [n for n in ONLY if n in FIELDS])
def test_a_field_that_asks_for_more_is_refused_by_name(name: str) -> None:
    """When the configuration is made."""
    accepted, hint = ONLY[name]
    with pytest.raises(NotImplementedError, match=re.escape(hint)) as caught:
        megatron.DistributedDataParallelConfig(**{name: OTHER_VALUES[name]})
    assert name in str(caught.value)
    for value in accepted:
        assert megatron.DistributedDataParallelConfig(**{name: value})


@pytest.mark.parametrize("name", NAMES)
def test_an_import_of_a_name_without_counterpart_is_refused(name: str) -> None:
    """With what to do, not only with the name; other names are no attributes, as anywhere."""
    with pytest.raises(ImportError, match=re.escape(NAMES[name])):
        exec(f"from megafsdp.megatron import {name}")
    assert not hasattr(megatron, "other")


def test_keywords_of_no_release_are_refused() -> None:
    """The nearest are named."""
    with pytest.raises(TypeError, match=r"'zero_strategy'.*Did you mean zero_dp_strategy"):
        megatron.fully_shard_model(Net(), zero_strategy=3)
    with pytest.raises(TypeError, match=r"'mp_policy'.*megafsdp\.fully_shard_model\(\)"):
        megatron.fully_shard_model(Net(), mp_policy=None)


def test_sums_in_another_dtype_than_their_buffer_are_refused() -> None:
    """Of the policy; the buffer's own dtype is no reason for an error."""
    megatron.MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16, grad_accum_dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"grad_accum_dtype.*as main_grads_dtype"):
        megatron.MixedPrecisionPolicy(grad_accum_dtype=torch.float32)


class _Named(nn.Linear):
    """A model that has a method of the wrapper's by itself."""

    def sync(self) -> str:
        """Return what the model's own method returns."""
        return "own"


def _methods() -> dict[str, str]:
    model = megatron.fully_shard_model(_Named(4, 4))
    # One class for all models of a class: torch compiles each anew.
    assert type(model) is type(megatron.fully_shard_model(_Named(4, 4)))
    assert model.sync() == "own"
    errors = {}
    for name in METHODS:
        if name != "sync":
            with pytest.raises(NotImplementedError) as caught:
                getattr(model, name)()
            errors[name] = str(caught.value)
    for name, hint in ATTRIBUTES.items():
        assert not hasattr(model, name)
        with pytest.raises(NotImplementedError, match=re.escape(hint)):
            setattr(model, name, 1)
    with pytest.raises(TypeError, match="Give the optimizer alone"):
        megatron.fully_shard_optimizer(model, torch.optim.Adam(model.parameters()))
    with pytest.raises(NotImplementedError) as caught:
        megatron.fully_shard_model(nn.Linear(4, 4)).sync()
    # It shows sharded parameters, which a model at rest shows anyway.
    assert getattr(model, NEEDLESS)() is None
    return errors | {"sync": str(caught.value)}


def test_methods_of_the_wrapper_say_what_to_do(ranks: Ranks) -> None:
    """Unless the model has such a method of its own."""
    (errors,) = ranks(1).run(_methods)
    for name, hint in METHODS.items():
        assert f"{name}()" in errors[name] and f"{hint}." in errors[name]


def _program(directory: str) -> dict[str, torch.Tensor]:
    os.chdir(directory)
    (block,) = python_blocks(PAGE)
    names: dict[str, Any] = {}
    before, after = block.split("optimizer.step()\n")
    exec(compile(before, "from-megatron-fsdp.md", "exec"), names)
    names["optimizer"].step()
    stepped = full_state_dict(names["model"])
    exec(compile(after, "from-megatron-fsdp.md", "exec"), names)
    loaded = full_state_dict(names["model"])
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stepped.items())
    states = names["optimizer"].state_dict()["state"]
    assert {state["step"].item() for state in states.values()} == {1.0}
    assert dist.get_world_size() == 2
    _resume(block, names)
    return stepped


def _resume(block: str, names: dict[str, Any]) -> None:
    """Load the program's checkpoint as another process does, and compare one more step of both."""
    fresh: dict[str, Any] = {}
    exec(block[: block.index("output =")].replace("manual_seed(0)", "manual_seed(1)"), fresh)
    exec("import torch.distributed.checkpoint as dcp\n" + block[block.index("state =") :], fresh)
    for each in (names, fresh):
        each["model"](names["source"], names["source"]).sum().backward()
        each["optimizer"].step()
    states, own = (each["optimizer"].state_dict()["state"] for each in (names, fresh))
    assert states.keys() == own.keys()
    assert {state["step"].item() for state in own.values()} == {2.0}
    expected = full_state_dict(names["model"])
    for name, tensor in full_state_dict(fresh["model"]).items():
        assert torch.equal(tensor, expected[name]), name


# torch says so of any Transformer whose layers it cannot pack.
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_the_program_trains_as_one_process(ranks: Ranks, tmp_path: Path) -> None:
    """With the import changed: a step of AdamW on 2 ranks, saved and loaded by torch."""
    got = ranks(2).run(_program, str(tmp_path))
    torch.manual_seed(0)
    model = nn.Transformer(
        32, nhead=4, num_encoder_layers=2, num_decoder_layers=2, batch_first=True, dropout=0.0
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)
    rows = [torch.randn(2, 4, 8, 32, generator=torch.Generator().manual_seed(r)) for r in (0, 1)]
    source, target = torch.cat(rows, dim=1)
    nn.functional.mse_loss(model(source, source), target).backward()
    optimizer.step()
    for state in got:
        for name, tensor in model.state_dict().items():
            # Two ranks add up in another order; eps keeps that noise from becoming a step.
            torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-5)
