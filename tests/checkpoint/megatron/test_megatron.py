"""Checkpoints with Megatron-LM's names are read and written tensor by tensor."""

from __future__ import annotations

import copy
import functools
import os
import re
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megafsdp.checkpoint import load, save
from megafsdp.checkpoint.megatron import importer
from megafsdp.checkpoint.megatron.exporter import to_megatron
from megafsdp.checkpoint.megatron.importer import from_megatron
from megafsdp.checkpoint.tools.dcp_reader import DCPDirectory
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.checkpoint.tools.verify import verify
from megafsdp.checkpoint.tools.writer import CheckpointWriter
from megafsdp.errors import CheckpointError
from megafsdp.fsdp import fully_shard
from megafsdp.optimizer.adam.fused_adam import FusedAdam
from tests.checkpoint.megatron import megatron_toy as toy
from tests.checkpoint.sharding import full
from tests.ranks import Ranks

ARCHITECTURES = ("gpt", "qwen3", "qwen3_next")


@dataclass(frozen=True)
class _Converted:
    """A plain run, its directory as Megatron-LM writes it, and ours made of that."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    theirs: Path
    ours: Path
    path: Path


Convert = Callable[..., _Converted]


@pytest.fixture(scope="module")
def convert(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """Return a function that converts once for each choice; tests leave what it returns as is."""

    @functools.cache
    def converted(architecture: str, **options: object) -> _Converted:
        root = tmp_path_factory.mktemp(architecture)
        run = toy.make(root / "theirs", architecture, **options)
        path = from_megatron(root / "theirs", root / "ours")
        return _Converted(*run, root / "theirs", root / "ours", path)

    return converted


def _whole(root: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a checkpoint of ours, fused ones joined."""
    with CheckpointReader(root) as reader:
        return {key: reader.tensor(key) for key in reader.whole_keys()}


def _wanted(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return what a checkpoint of a plain model must hold."""
    wanted = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for state, value in optimizer.state[parameter].items():
            wanted[f"optimizer.state.{name}.{state}"] = value
    return wanted


def _groups(reader: CheckpointReader) -> list[dict]:
    groups = reader.object("optimizer.param_groups")
    assert isinstance(groups, list)
    return groups


def _differences(left: dict, right: dict) -> list[str]:
    odd = sorted(set(left) ^ set(right))
    for key in sorted(set(left) & set(right)):
        a, b = left[key], right[key]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.dtype != b.dtype or not torch.equal(a, b):
                odd.append(key)
        elif repr(a) != repr(b):
            odd.append(key)
    return odd


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("gpt", {}),
        ("qwen3", {}),
        ("qwen3", {"wrappers": 2, "is_te": False, "has_step_in_group": False}),
        ("qwen3_next", {}),
        ("qwen3_next", {"wrappers": 2, "is_te": False}),
    ],
    ids=["gpt", "qwen3", "qwen3-fp32-local", "qwen3_next", "qwen3_next-fp32-local"],
)
def test_every_tensor_is_read_under_our_names(
    convert: Convert, architecture: str, options: dict
) -> None:
    """Weights, moments and steps are the written ones, whatever the form of their names."""
    converted = convert(architecture, **options)
    wanted = _wanted(converted.model, converted.optimizer)
    assert converted.path == converted.ours / "iter_0000002"
    assert _differences(_whole(converted.ours), wanted) == []
    assert len(wanted) == 4 * len(list(toy.build(architecture, 1).parameters()))


def test_groups_schedule_samples_and_random_states_are_read(convert: Convert) -> None:
    """What stands beside tensors goes where a load and a resumed run look for it."""
    converted = convert("gpt")
    with CheckpointReader(converted.ours) as reader:
        groups = _groups(reader)
        extra = reader.object("extra")
        schedule = reader.object("lr_scheduler")
        rng = [reader.object(f"rng.{rank}") for rank in range(2)]
        assert reader.manifest.world_size == 2
        assert reader.manifest.aliases == {
            "model.output_layer.weight": "model.embedding.word_embeddings.weight"
        }
        qkv = reader.manifest.tensors["model.decoder.layers.0.self_attention.linear_qkv.weight"]
    names = dict(converted.model.named_parameters())
    assert [set(g["names"]) for g in groups] == [
        {n for n, p in names.items() if p.ndim > 1},
        {n for n, p in names.items() if p.ndim == 1},
    ]
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert all(g["betas"] == (0.9, 0.95) and "step" not in g for g in groups)
    assert extra["run"] == {"step": 2, "consumed_samples": 16, "skipped_samples": 0}
    assert extra["nvidia"]["args"]["params_dtype"] is torch.bfloat16
    assert extra["nvidia"]["opt_param_scheduler"] == toy.SCHEDULE
    assert schedule["kind"] == "cosine" and schedule["decay_start"] == 4
    assert (schedule["peak"], schedule["minimum"], schedule["decay_samples"]) == (0.01, 0.001, 36)
    assert torch.equal(rng[1]["torch"], toy.rng(2)["torch_rng_state"])
    assert qkv.fused is not None and (qkv.fused.sizes, qkv.fused.num_groups) == ((8, 4, 4), 2)


def _sharded(architecture: str) -> tuple[nn.Module, FusedAdam]:
    model = toy.build(architecture, 1)
    for layer in model.decoder.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = FusedAdam(toy.groups(model), lr=0.5, betas=(0.5, 0.5), eps=1.0)
    return model, optimizer


def _load_and_step(root: Path, architecture: str) -> tuple[dict, dict]:
    model, optimizer = _sharded(architecture)
    load(root, model=model, optimizer=optimizer)
    loaded = {n: full(p) for n, p in model.named_parameters()}
    steps = [optimizer.state[p]["step"].item() for p in model.parameters()]
    assert steps == [2.0] * len(steps)
    toy.train(model, optimizer, range(2, 4))
    return loaded, {n: full(p) for n, p in model.named_parameters()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sharded_run_goes_on_as_the_plain_one_does(
    ranks: Ranks, convert: Convert, architecture: str
) -> None:
    """Two ranks load it into FusedAdam; the next steps are those of torch's AdamW in one process.

    Both ranks see the whole batch, so their gradients are the plain ones; the tolerance is for the
    order of the steps' operations, which differs between FusedAdam and AdamW.
    """
    converted = convert(architecture)
    model, optimizer = copy.deepcopy((converted.model, converted.optimizer))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    toy.train(model, optimizer, range(2, 4))
    for loaded, stepped in ranks(2).run(_load_and_step, converted.ours, architecture):
        assert _differences(loaded, before) == []
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(stepped[name], parameter.detach(), rtol=1e-5, atol=2e-6)
            assert not torch.equal(stepped[name], before[name])


def _expected_keys(model: nn.Module, architecture: str, wrappers: int, fields: set[str]) -> set:
    keys = {"args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far"}
    keys |= {f"opt_param_scheduler.{name}" for name in toy.SCHEDULE}
    for rank in range(2):
        at = f"rng_state.(0, 0).{rank}"
        keys |= {f"{at}.{name}_rng_state" for name in ("random", "np", "torch", "cuda")}
        keys.add(f"{at}.rng_tracker_states.model-parallel-rng")
    wrapped = "module." * wrappers
    for name, parameter in model.named_parameters():
        is_te = wrappers == 3
        name = toy.te_name(name, architecture) if is_te else name
        for one in toy.of_experts(name, parameter, is_te):
            keys |= {f"optimizer.param_to_group_meta.{wrapped}{one}.{field}" for field in fields}
        for part in toy.split(name, parameter, architecture, is_te):
            keys.add(f"model.module.{part}")
            states = ("exp_avg", "exp_avg_sq", "step")
            keys |= {f"optimizer.state.{wrapped}{part}.{state}" for state in states}
    return keys


@pytest.mark.parametrize(
    ("precision", "architecture"),
    [
        ("bf16", "gpt"),
        ("fp32", "qwen3"),
        ("bf16", "qwen3_next"),
        ("fp32", "qwen3_next"),
        pytest.param("bf16", "qwen3", marks=pytest.mark.matrix("round-trips")),
        pytest.param("fp32", "gpt", marks=pytest.mark.matrix("round-trips")),
    ],
)
def test_torch_dcp_alone_reads_what_is_written(
    convert: Convert, tmp_path: Path, architecture: str, precision: str
) -> None:
    """The keys are exactly Megatron-LM's, the tensors equal, the arguments a Namespace."""
    wrappers = 3 if precision == "bf16" else 2
    options = {} if wrappers == 3 else {"wrappers": wrappers, "is_te": False}
    converted = convert(architecture, **options)
    impl = "transformer_engine" if wrappers == 3 else "local"
    path = to_megatron(
        converted.ours, tmp_path / "back", precision=precision, transformer_impl=impl
    )
    fields = {*toy.FIELDS, *toy.IDENTITY, "weight_decay", "wd_mult", "max_lr", "min_lr", "step"}
    found, was = toy.read(path), toy.read(converted.theirs / "iter_0000002")
    assert set(found) == _expected_keys(converted.model, architecture, wrappers, fields)
    added = {"step", "max_lr", "min_lr"}
    kept = {k: v for k, v in found.items() if k.rpartition(".")[2] not in added}
    was = {k: v for k, v in was.items() if k.rpartition(".")[2] not in {*added, "_extra_state"}}
    args = vars(kept.pop("args"))
    assert vars(was.pop("args")).items() <= args.items() and args["iteration"] == 2
    assert _differences(kept, was) == []
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"


def _blank(value: object) -> object:
    """Return a nested structure of the same form without its contents."""
    if isinstance(value, dict):
        return {name: _blank(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_blank(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def test_a_job_loads_it_into_its_nested_state(convert: Convert, tmp_path: Path) -> None:
    """Torch DCP fills the nested dict that Megatron-LM asks for, and converts it to one file."""
    converted = convert("qwen3")
    path = to_megatron(converted.ours, tmp_path / "back")
    wanted = toy.their_state(converted.model, converted.optimizer, "qwen3")
    toy.without_extra_state(wanted)
    state = toy.load(_blank(wanted), path)
    assert vars(wanted.pop("args")).items() <= vars(state.pop("args")).items()
    assert repr(state) == repr(wanted)
    weight = "module.decoder.layers.1.mlp.linear_fc1.weight_w"
    assert torch.equal(state["model"][weight], wanted["model"][weight])
    toy.quietly(dcp_to_torch_save, path, tmp_path / "one.pt")
    whole = torch.load(tmp_path / "one.pt", weights_only=False)
    assert set(whole["rng_state"]["(0, 0)"][1]) == set(toy.rng(2))
    assert set(whole["model"]) == set(wanted["model"])


def _add_experts(state: dict) -> dict[str, torch.Tensor]:
    """Put a layer of four experts into their state; return what ours must hold of it."""
    at = "decoder.layers.0.mlp.experts.local_experts"
    wanted = {}
    for expert in range(4):
        name = f"{at}.{expert}.linear_fc1.weight"
        gate, up = torch.full((3, 2), float(expert)), torch.full((3, 2), expert + 0.5)
        for part, tensor in ((f"{name}_w", gate), (f"{name}_v", up)):
            moments = {"exp_avg": tensor + 1, "exp_avg_sq": tensor + 2}
            state["model"][f"module.{part}"] = tensor
            state["optimizer"]["state"][f"module.module.module.{part}"] = moments
        meta = state["optimizer"]["param_to_group_meta"]
        meta[f"module.module.module.{name}"] = toy.FIELDS | {"weight_decay": 0.1, "step": 2}
        wanted[f"model.{name}"] = torch.cat((gate, up))
        wanted[f"optimizer.state.{name}.exp_avg"] = torch.cat((gate, up)) + 1
    return wanted


def test_separate_experts_keep_their_index_in_the_layer(tmp_path: Path) -> None:
    """Each is a tensor of its own on both sides; our groups have one name for all."""
    state = toy.their_state(*toy.trained("qwen3"), "qwen3")
    wanted = _add_experts(state)
    toy.save(state, tmp_path / "theirs")
    from_megatron(tmp_path / "theirs", tmp_path / "ours", separate_experts=True)
    found = _whole(tmp_path / "ours")
    assert _differences({key: found[key] for key in wanted}, wanted) == []
    with CheckpointReader(tmp_path / "ours") as reader:
        names = [name for group in _groups(reader) for name in group["names"]]
    experts = "decoder.layers.0.mlp.experts.local_experts.*.linear_fc1.weight"
    assert names.count(experts) == 1 and not any(".local_experts.1." in name for name in names)
    found = toy.read(to_megatron(tmp_path / "ours", tmp_path / "back"))
    before = toy.read(tmp_path / "theirs" / "iter_0000002")
    keys = {key for key in before if ".experts." in key}
    assert len(keys) == 4 * (2 + 4 + 6) and keys <= set(found)
    assert _differences({key: found[key] for key in keys}, {key: before[key] for key in keys}) == []


def _without_an_expert(state: dict) -> None:
    name = "decoder.layers.0.mlp.experts.linear_fc2.weight1"
    del state["model"][f"module.{name}"]
    for section in ("state", "param_to_group_meta"):
        del state["optimizer"][section][f"module.module.module.{name}"]


def _with_another_shape(state: dict) -> None:
    name = "decoder.layers.0.mlp.experts.linear_fc2.weight2"
    state["model"][f"module.{name}"] = torch.ones(16, 5)
    moments = state["optimizer"]["state"][f"module.module.module.{name}"]
    moments |= {"exp_avg": torch.ones(16, 5), "exp_avg_sq": torch.ones(16, 5)}


def _of_another_dtype(state: dict) -> None:
    name = "module.decoder.layers.0.mlp.experts.linear_fc2.weight2"
    state["model"][name] = state["model"][name].double()


def _with_another_state(state: dict) -> None:
    name = "module.module.module.decoder.layers.0.mlp.experts.linear_fc2.weight2"
    state["optimizer"]["state"][name]["mode"] = "slow"


def _in_another_group(state: dict) -> None:
    name = "module.module.module.decoder.layers.0.mlp.experts.linear_fc2.weight2"
    state["optimizer"]["param_to_group_meta"][name]["lr"] = 0.5


def _in_both_forms(state: dict) -> None:
    at = "module.decoder.layers.0.mlp.experts"
    weight = state["model"][f"{at}.linear_fc2.weight2"]
    state["model"][f"{at}.local_experts.2.linear_fc2.weight"] = weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_an_expert, "missing: expert 1 of decoder.layers.0.mlp.experts.linear_fc2.weight"),
        (_with_another_shape, "than the layer's first expert: decoder.layers.0.mlp.experts"),
        (_of_another_dtype, "than the layer's first expert: decoder.layers.0.mlp.experts"),
        (_with_another_state, "than the layer's first expert: decoder.layers.0.mlp.experts"),
        (_in_another_group, "than the layer's first expert: decoder.layers.0.mlp.experts"),
        (_in_both_forms, "of an expert that another key has too"),
    ],
)
def test_experts_that_make_no_stack_are_named(
    convert: Convert, tmp_path: Path, change: Callable[[dict], object], message: str
) -> None:
    """One is missing, or differs from the others; nothing is published."""
    sound = convert("qwen3_next")
    state = toy.their_state(sound.model, sound.optimizer, "qwen3_next")
    change(state)
    toy.save(state, tmp_path / "theirs")
    with pytest.raises(CheckpointError) as caught:
        from_megatron(tmp_path / "theirs", tmp_path / "ours")
    assert message in str(caught.value)
    assert not (tmp_path / "ours").exists()


def test_the_order_of_keys_does_not_matter(convert: Convert, tmp_path: Path) -> None:
    """Experts are stacked by their numbers, of which 10 stands before 2 in other directories."""
    sound = convert("qwen3_next")
    state = toy.their_state(sound.model, sound.optimizer, "qwen3_next")
    for part in (state["model"], *state["optimizer"].values()):
        items = list(part.items())
        part.clear()
        part.update(reversed(items))
    toy.save(state, tmp_path / "theirs")
    from_megatron(tmp_path / "theirs", tmp_path / "ours")
    assert _differences(_whole(tmp_path / "ours"), _whole(sound.ours)) == []


def test_the_form_of_experts_and_norms_is_the_jobs(convert: Convert, tmp_path: Path) -> None:
    """Arguments decide over the layer's kind: numbered modules, and norms that are stored whole."""
    args = {"moe_grouped_gemm": False, "apply_layernorm_1p": False, "consumed_train_samples": 9}
    found = toy.read(to_megatron(convert("qwen3_next").ours, tmp_path / "back", args=args))
    assert args.items() <= vars(found["args"]).items()
    at = "model.module.decoder.layers"
    assert f"{at}.1.mlp.experts.local_experts.2.linear_fc1.weight_v" in found
    assert not any("linear_fc2.weight2" in key for key in found)
    norm = convert("qwen3_next").model.get_parameter(
        "decoder.layers.0.self_attention.out_norm.weight"
    )
    assert torch.equal(found[f"{at}.0.self_attention.out_norm.weight"], norm.detach())
    from_megatron(tmp_path / "back", tmp_path / "again")
    assert _differences(_whole(tmp_path / "again"), _whole(convert("qwen3_next").ours)) == []


@pytest.mark.parametrize("impl", ["transformer_engine", "local"])
def test_experts_of_a_checkpoint_without_arguments_go_by_the_layers(
    tmp_path: Path, impl: str
) -> None:
    """Transformer Engine's are grouped, local ones sequential; the arguments say so."""
    save(tmp_path / "ours", step=1, model=toy.build("qwen3_next", 0))
    found = toy.read(to_megatron(tmp_path / "ours", tmp_path / "theirs", transformer_impl=impl))
    is_grouped = impl == "transformer_engine"
    at = "model.module.decoder.layers.1.mlp.experts"
    assert (f"{at}.linear_fc1.weight2_w" in found) is is_grouped
    assert (f"{at}.local_experts.2.linear_fc1.weight_w" in found) is not is_grouped
    args = vars(found["args"])
    assert args["moe_grouped_gemm"] is is_grouped
    assert args["apply_layernorm_1p"] is args["attention_output_gate"] is True


class _Counting(DCPDirectory):
    """Counts the tensors that are alive whenever one more is read."""

    most_alive = 0
    seen: ClassVar[list[weakref.ref[torch.Tensor]]] = []

    def tensor(self, key: str) -> torch.Tensor:
        tensor = super().tensor(key)
        if key.startswith(("model.", "optimizer.")):
            type(self).seen.append(weakref.ref(tensor))
            alive = sum(reference() is not None for reference in self.seen)
            type(self).most_alive = max(self.most_alive, alive)
        return tensor


def test_two_tensors_at_most_are_in_memory(
    convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is written may live until the next one has been read."""
    theirs = convert("qwen3_next").theirs
    monkeypatch.setattr(importer, "DCPDirectory", _Counting)
    from_megatron(theirs, tmp_path / "ours")
    assert len(_Counting.seen) > 50 and _Counting.most_alive <= 2


def _save(root: Path, architecture: str) -> dict[str, torch.Tensor]:
    model, optimizer = _sharded(architecture)
    toy.train(model, optimizer, range(2))
    run = {"consumed_samples": 4, "skipped_samples": 1}
    save(root, step=7, model=model, optimizer=optimizer, extra={"run": run})
    wanted = {f"model.{n}": full(p) for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for state, value in optimizer.state[parameter].items():
            wanted[f"optimizer.state.{name}.{state}"] = full(value)
    return wanted


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ours_to_theirs_and_back_is_equal(ranks: Ranks, tmp_path: Path, architecture: str) -> None:
    """A checkpoint of two ranks comes back tensor by tensor, with groups and random states."""
    wanted = ranks(2).run(_save, tmp_path / "ours", architecture)[0]
    to_megatron(tmp_path / "ours", tmp_path / "theirs")
    from_megatron(tmp_path / "theirs", tmp_path / "back")
    assert _differences(_whole(tmp_path / "back"), wanted) == []
    with CheckpointReader(tmp_path / "ours") as ours, CheckpointReader(tmp_path / "back") as back:
        assert (
            _differences(
                {k: ours.tensor(k) for k in ours.manifest.tensors},
                {k: back.tensor(k) for k in back.manifest.tensors},
            )
            == []
        )
        before, after = map(_groups, (ours, back))
        assert [set(g["names"]) for g in after] == [set(g["names"]) for g in before]
        assert all(
            old.items() <= (new | {"names": old["names"]}).items()
            for old, new in zip(before, after, strict=True)
        )
        assert repr(ours.object("rng.1")) == repr(back.object("rng.1"))
        assert back.manifest.aliases == ours.manifest.aliases
        assert back.manifest.step == 7
        run = {"step": 7, "consumed_samples": 4, "skipped_samples": 1}
        assert back.object("extra")["run"] == run
        assert {k: e.fused for k, e in back.manifest.tensors.items()} == {
            k: e.fused for k, e in ours.manifest.tensors.items()
        }
    args = vars(toy.read(tmp_path / "theirs" / "iter_0000007")["args"])
    assert args["num_attention_heads"] == 4 and args["num_query_groups"] == 2
    assert (args["num_layers"], args["hidden_size"], args["kv_channels"]) == (2, 16, 4)
    assert args["add_position_embedding"] is (architecture == "gpt")


def _drop(state: dict, section: str, *ends: str) -> None:
    of_section = state if not section else state[section]
    for key in [k for k in of_section if k.endswith(ends)]:
        del of_section[key]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["model"].update({"lora": torch.ones(2)}) or s.update(ema=1), "1 unknown: ema"),
        (lambda s: s["model"].update({"module.note": "x"}), "1 unknown: model.module.note"),
        (lambda s: _drop(s, "model", "fc1.weight_v"), "missing: decoder.layers.0.mlp.linear_fc1"),
        (
            lambda s: _drop(s, "model", "1.mlp.linear_fc2.weight"),
            "of a parameter that has no weight",
        ),
        (
            lambda s: _drop(s, "model", "1.mlp.linear_fc2.weight"),
            "1 missing: the weight decoder.layers.1.mlp.linear_fc2.weight",
        ),
        (
            lambda s: s["optimizer"]["param_to_group_meta"].update(
                {"module.module.module.decoder.layers.0.mlp.linear_fc1.weight_w": {"lr": 0.5}}
            ),
            "of a group that is not that of the other parts",
        ),
        (
            lambda s: s["optimizer"]["state"]["module.module.module.output_layer.weight"].pop(
                "exp_avg_sq"
            ),
            "missing: the state exp_avg_sq of output_layer.weight",
        ),
        (
            lambda s: s["optimizer"]["state"].pop("module.module.module.output_layer.weight"),
            "missing: the states of output_layer.weight",
        ),
        (
            lambda s: s["optimizer"]["param_to_group_meta"].pop(
                "module.module.module.output_layer.weight"
            ),
            "missing: the parameter group of output_layer.weight",
        ),
        (lambda s: _drop(s, "", "iteration"), "1 missing: iteration"),
        (lambda s: _drop(s, "", "checkpoint_version"), "1 missing: checkpoint_version"),
        (lambda s: s.update(checkpoint_version=2.0), "got 2 and 2.0"),
        (lambda s: s.update(iteration=-1), "got -1 and 3.0"),
        (lambda s: s.update(iteration="two"), "got 'two' and 3.0"),
        (
            lambda s: s["model"].update(
                {"module.decoder.layers.0.input_layernorm.weight": torch.ones(16)}
            ),
            "of a name that another key has too",
        ),
        (
            lambda s: s["optimizer"]["state"]["module.module.module.output_layer.weight"].update(
                exp_avg=torch.ones(3)
            ),
            "of another shape",
        ),
        (
            lambda s: s["optimizer"]["state"]["module.module.module.output_layer.weight"].update(
                exp_avg="none"
            ),
            "output_layer.weight.exp_avg no tensor",
        ),
    ],
    ids=[
        "unknown",
        "word for a weight",
        "part",
        "weight",
        "group of no weight",
        "group of a part",
        "moment",
        "states",
        "group",
        "iteration",
        "no version",
        "version",
        "iteration below 0",
        "iteration in words",
        "twice",
        "shape",
        "word",
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_published(
    convert: Convert, tmp_path: Path, change: Callable[[dict], object], message: str
) -> None:
    """Unknown keys, missing ones and odd shapes are errors with the key in them."""
    sound = convert("qwen3")
    state = toy.their_state(sound.model, sound.optimizer, "qwen3")
    change(state)
    toy.save(state, tmp_path / "theirs")
    with pytest.raises(CheckpointError) as caught:
        from_megatron(tmp_path / "theirs", tmp_path / "ours")
    assert message in str(caught.value)
    assert not (tmp_path / "ours").exists()


def _zero_a_record(directory: Path, key: str) -> None:
    """Overwrite one tensor's record, found as torch's reader finds it."""
    place = next(
        place
        for index, place in FileSystemReader(directory).read_metadata().storage_data.items()
        if index.fqn == key
    )
    with (directory / place.relative_path).open("r+b") as stream:
        stream.seek(place.offset)
        stream.write(bytes(place.length))


def test_a_damaged_record_on_either_side_leaves_nothing_behind(
    convert: Convert, tmp_path: Path
) -> None:
    """The error names the key; the root that was written to is empty."""
    sound = convert("gpt")
    shutil.copytree(sound.theirs, tmp_path / "theirs")
    shutil.copytree(sound.ours, tmp_path / "ours")
    theirs, ours = (tmp_path / name / "iter_0000002" for name in ("theirs", "ours"))
    _zero_a_record(theirs, "model.module.decoder.final_layernorm.bias")
    with pytest.raises(CheckpointError, match=r"model\.module\.decoder\.final_layernorm\.bias"):
        from_megatron(tmp_path / "theirs", tmp_path / "other")
    _zero_a_record(ours, "model.decoder.final_layernorm.bias")
    with pytest.raises(CheckpointError, match=r"model\.decoder\.final_layernorm\.bias"):
        to_megatron(tmp_path / "ours", tmp_path / "back")
    assert [*(tmp_path / "other").iterdir(), *(tmp_path / "back").iterdir()] == []


def test_tools_for_our_checkpoints_name_the_conversion(convert: Convert) -> None:
    """A sound directory of theirs is not called damaged alone."""
    theirs = convert("qwen3").theirs
    cure = r"of torch or Megatron-LM.*megafsdp ckpt convert --to megafsdp"
    with pytest.raises(CheckpointError, match=cure):
        CheckpointReader(theirs)
    (problem,) = verify(theirs).findings
    assert re.search(cure, str(problem))


def test_unknown_keys_can_be_left_out(tmp_path: Path) -> None:
    """Patterns of keys to ignore are the way round an unknown key."""
    state = toy.their_state(*toy.trained("qwen3"), "qwen3") | {"ema": 1}
    toy.save(state, tmp_path / "theirs")
    from_megatron(tmp_path / "theirs", tmp_path / "ours", ignore=["ema", "rng_state.*"])
    with CheckpointReader(tmp_path / "ours") as reader:
        assert not any(key.startswith("rng.") for key in reader.manifest.objects)


def _converted(state: dict, *, has_map: bool) -> dict:
    """Return a job's state as NVIDIA's converter from torch_dist leaves it."""
    meta = state["optimizer"].pop("param_to_group_meta")
    groups = [
        toy.FIELDS | {"weight_decay": decay, "step": toy.STEP, "params": [3, 1]}
        for decay in (0.1, 0.0)
    ]
    for number, group in enumerate(groups):
        state |= {f"optimizer.param_groups.{number}.{k}": v for k, v in group.items()}
        state |= {f"optimizer.param_groups.{number}.params.{i}": i for i in range(2)}
    if has_map:
        state["optimizer"]["param_to_group_meta"] = {
            "module.module.module.." + name.removeprefix("module.module.module."): groups[
                fields["weight_decay"] == 0
            ]
            for name, fields in meta.items()
        }
    return state


def test_what_the_converter_from_torch_dist_writes_is_read(
    convert: Convert, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a map of parameters to groups the groups too; without one, what they have in common."""
    sound = convert("qwen3")
    for has_map in (True, False):
        state = toy.their_state(sound.model, sound.optimizer, "qwen3")
        root = tmp_path / f"ours-{has_map}"
        toy.save(_converted(state, has_map=has_map), tmp_path / f"theirs-{has_map}")
        from_megatron(tmp_path / f"theirs-{has_map}", root)
        with CheckpointReader(sound.ours) as wanted, CheckpointReader(root) as found:
            assert found.manifest.tensors.keys() == wanted.manifest.tensors.keys()
            for key in wanted.whole_keys():
                assert torch.equal(found.tensor(key), wanted.tensor(key)), key
            groups = _groups(found)
            names = [{*group["names"]} for group in _groups(wanted)]
        if has_map:
            assert [{*group["names"]} for group in groups] == names
            assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        else:
            (group,) = groups
            assert {*group.pop("names")} == set().union(*names)
            assert group == toy.FIELDS
        assert ("differs between groups: weight_decay" in caplog.text) is not has_map


def test_foreign_values_in_args_are_kept_as_text_and_run_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pickled call in the arguments is described instead of made; torch's own reader makes it."""
    state = toy.their_state(*toy.trained("qwen3"), "qwen3")
    trap = tmp_path / "sprung"
    state["args"] = toy.arguments(backend=toy.Backend.FLASH, hook=print, trap=[toy.Bomb(trap)])
    for fields in state["optimizer"]["param_to_group_meta"].values():
        fields["backend"] = toy.Backend.FLASH
    toy.save(state, tmp_path / "theirs")
    from_megatron(tmp_path / "theirs", tmp_path / "ours")
    assert not trap.exists()
    with CheckpointReader(tmp_path / "ours") as reader:
        nvidia = reader.object("extra")["nvidia"]
        assert not any("backend" in group for group in _groups(reader))
    assert nvidia["foreign_args"] == ["backend", "hook", "trap"]
    backend = "tests.checkpoint.megatron.megatron_toy.Backend"
    # The first releases of Python 3.11 pickle a member by its name.
    spelt = (f"<{backend}(1)>", f"<builtins.getattr(<{backend}>, 'FLASH')>")
    assert nvidia["args"]["backend"] in spelt
    assert nvidia["args"]["hook"] == "<builtins.print>"
    assert "3 of args" in caplog.text and "backend" in caplog.text
    path = to_megatron(tmp_path / "ours", tmp_path / "back")
    assert "backend" not in vars(toy.read(path)["args"])
    toy.read(tmp_path / "theirs" / "iter_0000002")
    assert trap.exists(), "the trap works where it is unpickled"


def test_states_that_are_no_tensors_go_both_ways(tmp_path: Path) -> None:
    """A word beside a weight, a plain count of steps on their side, and a rate in a tensor."""
    state = toy.their_state(*toy.trained("qwen3"), "qwen3", has_step_in_group=False)
    moments = state["optimizer"]["state"]["module.module.module.embedding.word_embeddings.weight"]
    moments |= {"mode": "slow", "step": 2}
    for fields in state["optimizer"]["param_to_group_meta"].values():
        fields["lr"] = torch.tensor(0.5)
    toy.save(state, tmp_path / "theirs")
    from_megatron(tmp_path / "theirs", tmp_path / "ours")
    at = "optimizer.state.embedding.word_embeddings.weight"
    with CheckpointReader(tmp_path / "ours") as reader:
        assert reader.object(f"{at}.mode") == "slow"
        assert [group["lr"] for group in _groups(reader)] == [torch.tensor(0.5)] * 2
        assert torch.equal(reader.tensor(f"{at}.step"), torch.tensor(2.0))
    found = toy.read(to_megatron(tmp_path / "ours", tmp_path / "back"))
    wrapped = at.replace("state.", "state.module.module.module.")
    assert found[f"{wrapped}.mode"] == "slow"


def test_everything_is_on_the_disk_when_the_directory_appears(
    convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records and what describes them, and the names of both."""
    flushed: list[int] = []
    flush = os.fsync

    def recording(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_ino)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    path = to_megatron(convert("gpt").ours, tmp_path / "back")
    assert {place.stat().st_ino for place in (path, *path.iterdir(), path.parent)} <= {*flushed}
    assert {place.name for place in path.iterdir()} == {".metadata", "__0_0.distcp"}


def test_a_matrix_with_the_name_of_a_stack_is_one_tensor(tmp_path: Path) -> None:
    """Only three dimensions hold the weights of several experts."""
    key = "model.decoder.layers.0.mlp.experts.linear_fc2.weight"
    with CheckpointWriter(tmp_path / "ours", 1) as writer:
        writer.add_tensor(key, torch.ones(3, 2))
        writer.publish()
    found = toy.read(to_megatron(tmp_path / "ours", tmp_path / "theirs"))
    assert torch.equal(found[key.replace("model.", "model.module.")], torch.ones(3, 2))


def test_a_parameter_that_has_taken_no_step_has_no_states(tmp_path: Path) -> None:
    """Nor has a fused one; on either side."""
    state = toy.their_state(*toy.trained("qwen3"), "qwen3")
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    for part in ("_w", "_v"):
        del state["optimizer"]["state"][f"module.module.module.{name}{part}"]
    state["optimizer"]["param_to_group_meta"][f"module.module.module.{name}"]["step"] = 0
    toy.save(state, tmp_path / "theirs")
    from_megatron(tmp_path / "theirs", tmp_path / "ours")
    assert [key for key in _whole(tmp_path / "ours") if name in key] == [f"model.{name}"]
    found = toy.read(to_megatron(tmp_path / "ours", tmp_path / "back"))
    assert not any(key.startswith("optimizer.state.") and name in key for key in found)


def test_two_names_that_would_be_one_are_refused(tmp_path: Path) -> None:
    """A model with both names of the inner layer of multi-token prediction."""
    with CheckpointWriter(tmp_path / "ours", 1) as writer:
        for inner in ("mtp_model_layer", "transformer_layer"):
            writer.add_tensor(f"model.mtp.layers.0.{inner}.mlp.weight", torch.ones(2))
        writer.publish()
    with pytest.raises(CheckpointError, match=r"transformer_layer\.mlp\.weight' again"):
        to_megatron(tmp_path / "ours", tmp_path / "theirs")
    assert list((tmp_path / "theirs").iterdir()) == []


def test_choices_are_checked(convert: Convert, tmp_path: Path) -> None:
    """An unknown precision or layer form is refused by name."""
    ours = convert("gpt").ours
    with pytest.raises(ValueError, match="precision"):
        to_megatron(ours, tmp_path / "back", precision="fp8")
    with pytest.raises(ValueError, match="transformer_impl"):
        to_megatron(ours, tmp_path / "back", transformer_impl="te")
