"""A dry run: its figures against real steps, its two outputs, its options and refusals."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megafsdp.buffer.comm.collectives import CollectiveRecord, record_collectives
from megafsdp.device.memory import ByteLedger, Category
from megafsdp.errors import ConfigError
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.mesh.parallel_dims import DP_OUTER, DP_SHARD, EDP, EP, TP
from megafsdp.training import Config, config_from_dict, train
from megafsdp.training.cli.main import main
from megafsdp.training.dry_run.dry_run import DryRunOptions, dry_run, split_options
from megafsdp.training.step.train_step import StepResult
from tests.ranks import Ranks
from tests.training.runs import MIXTURE, numbers_read_late, tiny, write_corpus
from tests.training.step.steps import train_configured

WSD = ["--dry-run", "8", "--train.global_batch_size=8", "--schedule.kind=wsd"]
MATRIX = pytest.mark.matrix("dry-run")
EIGHT_BILLION = [
    "--model.preset=qwen3-8b",
    "--precision.param_dtype=bf16",
    "--train.global_batch_size=1024",
]


def _train_steps(config: Config) -> tuple[ByteLedger, CollectiveRecord, int]:
    """Take two steps as the loop does; return what the second cost, and the states' bytes."""
    model, optimizer, record = train_configured(config)
    ledger = model._fsdp_unit().ledger
    section = config.optimizer
    dtypes = {"exp_avg": section.exp_avg_dtype, "exp_avg_sq": section.exp_avg_sq_dtype}
    flat = {"param_remainder"} | {n for n, dtype in dtypes.items() if dtype in ("fp32", "bf16")}
    states = [item for state in optimizer.state.values() for item in state.items()]
    takes_main = "bf16" if section.store_param_remainders else "fp32"
    is_ours = section.is_fused_adam and config.precision.main_params_dtype == takes_main
    own = [t for n, t in states if t is not None and t.ndim and not (is_ours and n in flat)]
    state_nbytes = sum(map(_nbytes_with_scales, own))
    return copy.deepcopy(ledger), record, state_nbytes


def _nbytes_with_scales(state: torch.Tensor) -> int:
    """Return the bytes of a rank's rows, and of an fp32 scale for each 128 elements of a row."""
    local = state.to_local()
    nbytes = local.numel() * local.element_size()
    if state.dtype in (torch.float16, torch.float8_e4m3fn):
        # A row of a stack is one of a matrix.
        columns = state.shape[-1] if state.ndim == 3 else state.shape[1:].numel()
        nbytes += 4 * (local.numel() // columns) * -(-columns // 128)
    return nbytes


FIGURES = [
    ("no_shard", 1, 3, "qwen3", "bf16"),
    ("optim", 0, 3, "llama", "fp32"),
    ("optim_grads", 2, 3, "gpt", "bf16"),
    ("optim_grads_params", 0, 6, "gpt", "fp32"),
    ("optim_grads_params", 1, 3, "qwen3", "fp32"),
    ("optim_grads_params", 2, 3, "llama", "bf16"),
]
OTHER_DTYPE = {"fp32": "bf16", "bf16": "fp32"}


@pytest.mark.parametrize(
    ("strategy", "prefetch", "micro_batch_size", "architecture", "param_dtype"),
    [
        *FIGURES,
        *(pytest.param(*case, OTHER_DTYPE[dtype], marks=MATRIX) for *case, dtype in FIGURES),
    ],
)
def test_figures_are_those_of_real_steps(
    ranks: Ranks,
    tmp_path: Path,
    strategy: str,
    prefetch: int,
    micro_batch_size: int,
    architecture: str,
    param_dtype: str,
) -> None:
    """Ledger and counters of a training step on two ranks, to the byte."""
    model: dict[str, Any] = {"architecture": architecture, "num_layers": 3}
    if architecture == "gpt":
        model["num_query_groups"] = 2
    config = tiny(
        tmp_path,
        model=model,
        parallel={"strategy": strategy, "prefetch": prefetch},
        precision={"param_dtype": param_dtype},
        train={"micro_batch_size": micro_batch_size},
        optimizer={"kind": "sgd" if architecture == "llama" else "adamw", "implementation": "loop"},
    )
    footprint = dry_run(config, 2).footprint
    states = footprint.resting[Category.OPTIMIZER_STATE]
    measured = ranks(2).run(_train_steps, config)
    for ledger, record, _ in measured:
        for category in Category:
            if category is not Category.OPTIMIZER_STATE:
                assert footprint.peak[category] == ledger.peak[category], category
                assert footprint.resting[category] == ledger.live[category], category
        assert footprint.peak_total - states == ledger.peak_total
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            items = [item for (_, k), item in footprint.traffic.items() if k == kind]
            assert sum(item.calls for item in items) == record.calls[kind], kind
            assert sum(item.nbytes for item in items) == record.nbytes[kind], kind
    assert states == max(state_nbytes for *_, state_nbytes in measured) > 0


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"reshard_after_forward": False}},
        # What gathers once a step reads is cast by the step itself, but not with scaled moments.
        {
            "parallel": {"strategy": "optim"},
            "precision": {"param_dtype": "bf16"},
            "optimizer": {"exp_avg_dtype": "fp8"},
        },
        {
            "parallel": {"strategy": "optim"},
            "precision": {"main_params_dtype": "bf16"},
            "optimizer": {"store_param_remainders": True},
        },
    ],
    ids=["kept", "scaled", "remainders"],
)
def test_memory_follows_choices_of_sharding_and_optimizer(
    ranks: Ranks, tmp_path: Path, sections: dict[str, dict[str, Any]]
) -> None:
    """Bytes between two steps and at their peak, and gathers, of real steps on two ranks."""
    config = tiny(tmp_path, **sections)
    footprint = dry_run(config, 2).footprint
    for ledger, record, _ in ranks(2).run(_train_steps, config):
        for category in Category:
            if category is not Category.OPTIMIZER_STATE:
                assert footprint.peak[category] == ledger.peak[category], category
                assert footprint.resting[category] == ledger.live[category], category
        gathered = footprint.traffic[DP_SHARD, "all_gather"]
        assert gathered.calls == record.calls["all_gather"]


def _cast_nbytes(config: Config, is_late: bool) -> int:
    """Return the bytes of compute weights between steps, which may be skipped as on a GPU."""
    with numbers_read_late(is_late):
        model, _, _ = train_configured(config)
    return model._fsdp_unit().ledger.live[Category.COMPUTE_WEIGHT]


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_steps_that_a_gpu_may_skip_leave_no_casts(
    ranks: Ranks, tmp_path: Path, strategy: str
) -> None:
    """The next gather makes them; a step of which the host has a part is not skipped so."""
    nbytes = []
    for device in ("cpu", "cuda"):
        sections = {"parallel": {"strategy": strategy}, "precision": {"param_dtype": "bf16"}}
        config = tiny(tmp_path, **sections, run={"device": device})
        nbytes.append(dry_run(config, 2).footprint.resting[Category.COMPUTE_WEIGHT])
        assert ranks(2).run(_cast_nbytes, config, device == "cuda") == [nbytes[-1]] * 2
    assert (nbytes[0] > nbytes[1]) == (strategy == "optim")
    said = []
    for device in ("cpu", "cuda"):
        sections |= {"optimizer": {"offload_fraction": 0.5}}
        footprint = dry_run(tiny(tmp_path, **sections, run={"device": device}), 2).footprint
        said.append(footprint.resting[Category.COMPUTE_WEIGHT])
    assert said[0] == said[1]


def _step_of_model_axes(config: Config) -> tuple[ByteLedger, Counter[str], Counter[str], int]:
    """Return a second step's ledger, calls and bytes by kind but over tp and ep, and sums of units.

    The sums are those of gradients of which each rank of tp has an addend.
    """
    model, _, record = train_configured(config)
    units = units_below([model])
    model_groups = {
        group.axes.model_group.group_name
        for unit in units.values()
        for group in unit.groups
        if group.axes.model_group is not None
    }
    assert model_groups
    calls, nbytes = Counter[str](), Counter[str]()
    for (kind, group_name), count in record.calls_by_group.items():
        if group_name not in model_groups:
            calls[kind] += count
            nbytes[kind] += record.nbytes_by_group[kind, group_name]
    names = {below.name for below in units.values()}
    num_sums = sum(kind == "all_reduce" and label in names for kind, label in record.events)
    return copy.deepcopy(model._fsdp_unit().ledger), calls, nbytes, num_sums


BIASED = MIXTURE | {"router_balance": "bias"}


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ({"architecture": "qwen3"}, {"dp_outer": 2, "tp": 2}),
        ({"architecture": "gpt"}, {"tp": 2}),
        (BIASED, {"tp": 2, "ep": 2}),
        (BIASED, {"tp": 2}),
        pytest.param(BIASED, {"dp_outer": 2, "ep": 2}, marks=MATRIX),
        pytest.param(BIASED, {"dp_outer": 2, "outer_strategy": "optim", "ep": 2}, marks=MATRIX),
    ],
)
def test_figures_of_one_rank_of_model_axes(
    ranks: Ranks, tmp_path: Path, model: dict[str, Any], parallel: dict[str, Any]
) -> None:
    """Memory of four ranks that share layers or experts out, and all but the layers' collectives.

    To the byte; experts have a mesh of their own, also where tp alone makes it another one.
    """
    model = {"num_query_groups": 2} | model
    config = tiny(
        tmp_path,
        model=model,
        parallel=parallel,
        precision={"param_dtype": "bf16"},
        train={"micro_batch_size": 3},
    )
    report = dry_run(config, 4)
    plain = dry_run(tiny(tmp_path, model=model), 1)
    assert (report.num_ranks, report.num_parameters) == (4, plain.num_parameters)
    footprint = report.footprint
    calls, nbytes = Counter[str](), Counter[str]()
    for (axis, kind), item in footprint.traffic.items():
        assert set(axis.split(" x ")) <= {DP_OUTER, DP_SHARD, TP, EDP, EP}
        if axis not in (TP, EP):
            calls[kind] += item.calls
            nbytes[kind] += item.nbytes
    # Only there two ranks are left to divide experts, and are not all ranks.
    assert (parallel == {"tp": 2, "ep": 2}) == any(EDP in axis for axis, _ in footprint.traffic)
    if "tp" in parallel:
        # Every unit has norms, whose gradients are sums over the parts of a sequence.
        assert footprint.traffic[TP, "all_reduce"].calls == 3 * report.num_microbatches
    sums = [footprint.traffic.get((axis, "all_reduce")) for axis in (TP, DP_OUTER)]
    for ledger, own_calls, own_nbytes, num_sums in ranks(4).run(_step_of_model_axes, config):
        for category in Category:
            if category is not Category.OPTIMIZER_STATE:
                assert footprint.peak[category] == ledger.peak[category], category
                assert footprint.resting[category] == ledger.live[category], category
        assert (own_calls, own_nbytes) == (calls, nbytes)
        assert num_sums == sum(item.calls for item in sums if item is not None)


STATES = (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"))
STRATEGIES = ("no_shard", "optim", "optim_grads_params")


@pytest.mark.parametrize(
    ("states", "strategy", "main_dtype"),
    [
        # The gate has all pairs, except some of states and strategy: neither changes the other.
        pytest.param(states, strategy, main_dtype, marks=() if j == (i + k) % 3 else MATRIX)
        for i, states in enumerate(STATES)
        for j, strategy in enumerate(STRATEGIES)
        for k, main_dtype in enumerate(("fp32", "bf16"))
    ],
)
def test_states_in_flat_buffers_are_the_ledgers(
    ranks: Ranks, tmp_path: Path, states: tuple[str, str], strategy: str, main_dtype: str
) -> None:
    """FusedAdam's states follow their dtypes, gaps included; every category, to the byte."""
    config = tiny(
        tmp_path,
        parallel={"strategy": strategy},
        precision={"param_dtype": "bf16", "main_params_dtype": main_dtype},
        optimizer={
            "exp_avg_dtype": states[0],
            "exp_avg_sq_dtype": states[1],
            "store_param_remainders": main_dtype == "bf16",
        },
    )
    footprint = dry_run(config, 2).footprint
    for ledger, _, others_nbytes in ranks(2).run(_train_steps, config):
        assert others_nbytes == 0
        for category in Category:
            assert footprint.peak[category] == ledger.peak[category], category
            assert footprint.resting[category] == ledger.live[category], category
        assert footprint.peak_total == ledger.peak_total
    assert footprint.resting[Category.OPTIMIZER_STATE] > 0


OTHER_STATES: dict[str, dict[str, dict[str, Any]]] = {
    "scaled": {"optimizer": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}},
    "one scaled": {"optimizer": {"exp_avg_dtype": "fp8"}},
    "muon": {"optimizer": {"kind": "muon"}},
    "muon in bf16": {
        "precision": {"main_params_dtype": "bf16"},
        "optimizer": {"kind": "muon"},
    },
    "muon of one layer": {
        "optimizer": {"kind": "muon"},
        "muon": {"adamw": ["*embedding*", "*layers.1.*"]},
    },
    "torch's adam": {"optimizer": {"kind": "adam", "implementation": "loop"}},
    "adam one by one": {"precision": {"main_params_dtype": "bf16"}},
    "sgd in bf16": {"precision": {"main_params_dtype": "bf16"}, "optimizer": {"kind": "sgd"}},
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("scaled", "optim_grads_params"),
        ("one scaled", "no_shard"),
        ("muon", "no_shard"),
        ("muon in bf16", "optim_grads_params"),
        ("muon of one layer", "optim_grads_params"),
        ("torch's adam", "optim_grads_params"),
        ("adam one by one", "optim_grads_params"),
        ("sgd in bf16", "no_shard"),
        pytest.param("scaled", "no_shard", marks=MATRIX),
        pytest.param("one scaled", "optim_grads_params", marks=MATRIX),
        pytest.param("muon", "optim_grads_params", marks=MATRIX),
        pytest.param("muon in bf16", "no_shard", marks=MATRIX),
        pytest.param("torch's adam", "no_shard", marks=MATRIX),
    ],
)
def test_other_states_are_those_of_real_steps(
    ranks: Ranks, tmp_path: Path, name: str, strategy: str
) -> None:
    """Codes with their scales, Muon's momentum, and torch's moments, on the rank that has most."""
    # Rows of more than one block of scales, and of a broken one.
    model = {"ffn_hidden_size": 200, "hidden_size": 136}
    config = tiny(tmp_path, model=model, parallel={"strategy": strategy}, **OTHER_STATES[name])
    states = dry_run(config, 2).footprint.resting[Category.OPTIMIZER_STATE]
    measured = ranks(2).run(_train_steps, config)
    nbytes = [own + ledger.live[Category.OPTIMIZER_STATE] for ledger, _, own in measured]
    assert states == max(nbytes) > 0


def test_rows_that_tensor_parallelism_cuts_have_wider_states(ranks: Ranks, tmp_path: Path) -> None:
    """Rows of input columns are cut, and with them blocks: such weights keep fp32 moments."""
    config = tiny(
        tmp_path,
        model={"num_query_groups": 2, "hidden_size": 136},
        parallel={"tp": 2},
        optimizer={"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"},
    )
    states = dry_run(config, 2).footprint.resting[Category.OPTIMIZER_STATE]
    assert states == max(own for *_, own in ranks(2).run(_train_steps, config)) > 0


@pytest.mark.parametrize(
    ("model", "parallel", "optimizer"),
    [
        ({"num_experts": 2, "moe_ffn_hidden_size": 30}, {"ep": 2}, {"kind": "muon"}),
        (
            {"num_experts": 6, "vocab_size": 258},
            {"ep": 2, "dp_outer": 2, "outer_strategy": "optim"},
            {"exp_avg_dtype": "fp8"},
        ),
    ],
    ids=["muon", "fp8"],
)
def test_states_of_experts_are_those_of_the_rank_with_most(
    ranks: Ranks,
    tmp_path: Path,
    model: dict[str, Any],
    parallel: dict[str, Any],
    optimizer: dict[str, Any],
) -> None:
    """A rank has one shard of experts and one of the rest; no rank has the largest of both."""
    model = MIXTURE | {"hidden_size": 34, "num_layers": 1, "num_experts_per_token": 1} | model
    config = tiny(tmp_path, model=model, parallel=parallel, optimizer=optimizer)
    states = dry_run(config, 4).footprint.resting[Category.OPTIMIZER_STATE]
    measured = ranks(4).run(_train_steps, config)
    nbytes = [own + ledger.live[Category.OPTIMIZER_STATE] for ledger, _, own in measured]
    assert states == max(nbytes) > 0


def _counts_of_a_step(config: Config) -> tuple[Counter[str], Counter[str]]:
    """Run the loop; return calls and bytes between the ends of its second and third step."""
    ends: list[tuple[Counter[str], Counter[str]]] = []
    with record_collectives() as record:

        def note(step: int, result: StepResult) -> None:
            ends.append((record.calls.copy(), record.nbytes.copy()))

        train(config, on_step=note)
    return ends[2][0] - ends[1][0], ends[2][1] - ends[1][1]


@pytest.mark.parametrize(
    ("dp_outer", "sections"),
    [
        (2, {}),
        (1, {"optimizer": {"implementation": "fused"}}),
        (1, {"precision": {"param_dtype": "fp16"}, "loss_scale": {"constant": 64.0}}),
        (
            2,
            {
                "precision": {"param_dtype": "fp16"},
                "loss_scale": {"constant": 64.0},
                "optimizer": {"kind": "sgd", "lr": 0.1},
            },
        ),
        (1, {"model": MIXTURE | {"router_balance": "aux_loss"}}),
        (1, {"model": MIXTURE | {"router_balance": "bias"}}),
    ],
    ids=["megafsdp", "torch", "fp16", "fp16 by torch", "auxiliary loss", "bias of experts"],
)
def test_the_loop_adds_no_collective_that_is_not_said(
    ranks: Ranks, tmp_path: Path, dp_outer: int, sections: dict[str, dict[str, Any]]
) -> None:
    """On one or two replicas of two ranks each, calls and bytes of every kind, to the byte."""
    write_corpus(tmp_path)
    config = tiny(
        tmp_path,
        parallel={"dp_outer": dp_outer},
        train={"micro_batch_size": 2, "global_batch_size": 8 * dp_outer, "steps": 4},
        # The last step is logged, with collectives of its own.
        logging={"interval_steps": 100},
        **{"precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"}, **sections},
    )
    num_ranks = 2 * dp_outer
    traffic = dry_run(config, num_ranks).footprint.traffic
    calls, nbytes = Counter[str](), Counter[str]()
    for (_, kind), item in traffic.items():
        calls[kind] += item.calls
        nbytes[kind] += item.nbytes
    assert ranks(num_ranks).run(_counts_of_a_step, config) == [(calls, nbytes)] * num_ranks


_DIGESTS_NBYTES = 32 * 1024  # Ranks compare digests of their units before the first forward.


class _MetaOnly(TorchDispatchMode):
    """Fail where an operator makes a tensor of some size that has memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Run, then look at the result."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type != "meta":
            assert result.nbytes <= _DIGESTS_NBYTES, f"{func} made {tuple(result.shape)}"
        return result


def test_large_layers_take_no_memory() -> None:
    """Everything of the model's size is on the meta device."""
    config = config_from_dict(
        {"model": {"preset": "qwen3-8b", "num_layers": 2}, "train": {"global_batch_size": 1024}}
    )
    with _MetaOnly():
        assert dry_run(config, 1024).num_parameters == 1_630_556_672
        with pytest.raises(AssertionError, match="made"):
            torch.zeros(_DIGESTS_NBYTES // 4 + 1)


def test_slabs_stay_allocated_between_steps() -> None:
    """With registered memory what is unsharded at the peak is there at rest."""
    content = {
        "model": {"preset": "qwen3-8b", "num_layers": 3},
        "precision": {"param_dtype": "bf16"},
        "train": {"global_batch_size": 8},
    }
    plain = dry_run(config_from_dict(content), 8).footprint
    slabs = dry_run(
        config_from_dict(content | {"parallel": {"nccl_user_buffers": True}}), 8
    ).footprint
    unsharded = plain.peak[Category.UNSHARDED]
    assert plain.resting[Category.UNSHARDED] == 0
    assert slabs.resting[Category.UNSHARDED] == slabs.peak[Category.UNSHARDED] == unsharded
    assert slabs.traffic == plain.traffic


def test_a_cpu_registers_no_memory(tmp_path: Path) -> None:
    """A run on a CPU ignores the choice with a warning, and gathers as without it."""
    said = [
        dry_run(tiny(tmp_path, parallel={"nccl_user_buffers": chosen}), 2).footprint
        for chosen in (False, True)
    ]
    assert said[0].resting == said[1].resting and said[0].peak == said[1].peak


def test_json_of_eight_billion_parameters_on_1024_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The sums of the units are the model's, and memory follows from the layouts."""
    assert main(["train", *EIGHT_BILLION, "--dry-run", "1024", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["num_parameters"] == 8_190_735_360
    assert (content["num_ranks"], content["dp_outer_size"], content["dp_shard_size"]) == (
        1024,
        1,
        1024,
    )
    assert [unit["count"] for unit in content["units"]] == [1, 36]
    groups = [(u["count"], g) for u in content["units"] for g in u["groups"]]
    shard_numel = sum(count * g["shard_numel"] for count, g in groups)
    assert sum(count * g["numel"] for count, g in groups) == content["num_parameters"]
    assert 1024 * shard_numel == content["num_parameters"] + content["padding_numel"]
    assert 0 < content["padding_numel"] < 0.001 * content["num_parameters"]
    for _, group in groups:
        assert sum(group["sub_buffer_shard_numels"]) == group["shard_numel"]
        assert (group["compute_dtype"], group["main_dtype"]) == ("bfloat16", "float32")
    memory = content["memory"]
    assert memory["main weight"] == {
        "resting_nbytes": 4 * shard_numel,
        "peak_nbytes": 4 * shard_numel,
    }
    assert memory["main grad"] == {"resting_nbytes": 0, "peak_nbytes": 4 * shard_numel}
    # The root, the kept last layer and one gathered ahead of the running one.
    root, layer = (2 * 1024 * group["shard_numel"] for _, group in groups)
    assert memory["unsharded"] == {"resting_nbytes": 0, "peak_nbytes": root + 2 * layer}
    assert 0 < memory["optimizer state"]["resting_nbytes"] <= 8 * shard_numel
    collectives = {(c["axis"], c["kind"]): c for c in content["collectives"]}
    gathered = collectives["dp_shard", "all_gather"]
    assert gathered["calls"] == 2 * 37 - 2
    assert gathered["nbytes"] == root + 71 * layer
    assert collectives["dp_shard", "reduce_scatter"]["nbytes"] == root + 36 * layer
    assert content["peak_total_nbytes"] > content["resting_total_nbytes"] > 0


_HYBRID_OF_EIGHTY_BILLION = [
    "--model.preset=qwen3-next-80b-a3b",
    "--train.global_batch_size=2048",
    "--parallel.tp=2",
    "--parallel.ep=64",
]


@pytest.mark.parametrize(
    ("words", "num_layers", "num_parameters"),
    [
        (
            ["--model.num_layers=2", "--model.layer_types=[linear_attention, full_attention]"],
            (1, 1),
            3_912_940_224,
        ),
        pytest.param([], (36, 12), 79_674_391_296, marks=MATRIX),
    ],
)
def test_experts_of_eighty_billion_parameters_on_1024_ranks(
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    num_layers: tuple[int, int],
    num_parameters: int,
) -> None:
    """512 experts a layer in stacks, eight on a rank; padding of all ranks is below half a percent.

    The layouts of all ranks have each parameter once, but for what the two ranks of tp both have:
    norms, routers and the gates of shared experts.
    """
    command = ["train", *_HYBRID_OF_EIGHTY_BILLION, *words, "--dry-run", "1024"]
    assert main([*command, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["num_parameters"] == num_parameters
    assert (content["dp_shard_size"], content["tp_size"], content["ep_size"]) == (512, 2, 64)
    assert content["cp_size"] == 1
    groups = [(u["count"], g) for u in content["units"] for g in u["groups"]]
    experts = [(count, g) for count, g in groups if g["is_expert"]]
    assert {g["num_shards"] for _, g in experts} == {16}
    assert {g["num_shards"] for _, g in groups if not g["is_expert"]} == {512}
    num_linear, num_full = num_layers
    expert_numel = 512 * (2 * 512 * 2048 + 2048 * 512)
    assert 64 * sum(count * g["numel"] for count, g in experts) == sum(num_layers) * expert_numel
    assert 0 < content["padding_numel"] < 0.005 * num_parameters
    stored = 64 * sum(count * g["num_shards"] * g["shard_numel"] for count, g in experts)
    stored += 2 * sum(
        count * g["num_shards"] * g["shard_numel"] for count, g in groups if not g["is_expert"]
    )
    of_layer = 512 * 2048 + 2048 + 2 * 2048
    in_common = sum(num_layers) * of_layer + num_linear * 128 + num_full * 2 * 256 + 2048
    assert stored == num_parameters + in_common + content["padding_numel"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "1,024 ranks (1 x 512 x 2 tensor-parallel, 64 to the experts of a layer)" in printed
    assert "all_gather over edp" in printed


def test_padding_is_that_of_all_ranks_that_share_experts(tmp_path: Path) -> None:
    """What all ranks store is the model and the padding, of each rank's experts too."""
    model = MIXTURE | {"hidden_size": 34, "moe_ffn_hidden_size": 18}
    report = dry_run(tiny(tmp_path, model=model, parallel={"ep": 2}), 4)
    groups = [group for unit in report.units for group in unit.groups * unit.count]
    assert any(group.is_expert and group.layout.padding_numel for group in groups)
    stored = sum(
        (2 if group.is_expert else 1) * group.layout.num_shards * group.layout.shard_numel
        for group in groups
    )
    assert stored == report.num_parameters + report.padding_numel


# Memory that a rank has for weights that are quantized alone.
OF_RECIPES = (Category.COMPUTE_WEIGHT, Category.SCALES)


def test_table_names_units_memory_and_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json the same is a table."""
    words = [*EIGHT_BILLION, "--model.num_layers=2", "--dry-run=1024", "--parallel.dp_outer=4"]
    assert main(["train", *words]) == 0
    printed = capsys.readouterr().out
    for part in (
        "1,630,556,672 parameters on 1,024 ranks (4 x 256)",
        "2 x decoder.layers.0",
        "sub-buffers",
        "padding of all units",
        "all_reduce over dp_outer",
        "reduce_scatter over dp_shard",
        *(category.value for category in Category if category not in OF_RECIPES),
    ):
        assert part in printed
    for category in OF_RECIPES:
        assert category.value not in printed, "casts need no memory of their own"


@pytest.mark.parametrize(
    ("sections", "num_ranks", "left_out"),
    [
        ({}, 2, "activations and buffers of the backend"),
        ({"parallel": {"cp": 2}}, 2, ", collectives of layers that ranks share out and"),
        ({"model": MIXTURE, "parallel": {"ep": 2}}, 2, ", collectives of layers that ranks"),
        ({"optimizer": {"kind": "muon"}}, 2, "activations, Muon's all-to-alls and buffers"),
    ],
)
def test_last_line_says_what_is_left_out(
    tmp_path: Path, sections: dict[str, dict[str, Any]], num_ranks: int, left_out: str
) -> None:
    """Whoever adds up the table knows what to add."""
    last = dry_run(tiny(tmp_path, **sections), num_ranks).describe().splitlines()[-1]
    assert left_out in last and last.endswith("not counted")


def test_table_counts_codes_scales_and_their_maxima(capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe adds rows of its own to the table, and says what it leaves as it is."""
    words = [*EIGHT_BILLION, "--model.num_layers=2", "--dry-run=1024", "--precision.recipe=mxfp8"]
    assert main(["train", *words]) == 0
    printed = capsys.readouterr().out
    for part in ("mxfp8: ", "unquantized, ", "all_reduce over", *(c.value for c in OF_RECIPES)):
        assert part in printed


def test_main_weights_cut_over_both_axes(tmp_path: Path) -> None:
    """outer_strategy 'optim' plans one shard a rank, and is refused but for ZeRO-3."""
    outer = {"dp_outer": 2, "outer_strategy": "optim"}
    report = dry_run(tiny(tmp_path, parallel=outer), 4)
    assert {g.layout.num_shards for unit in report.units for g in unit.groups} == {4}
    assert ("dp_outer", "all_gather") in report.footprint.traffic
    with pytest.raises(ConfigError, match="dp_outer above 1 for optim, got 1"):
        dry_run(tiny(tmp_path, parallel={**outer, "dp_outer": 1}), 4)
    with pytest.raises(ConfigError, match="optim_grads_params for optim, got optim"):
        dry_run(tiny(tmp_path, parallel={**outer, "strategy": "optim"}), 4)


def test_gradients_are_reduced_as_the_device_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the dtype of the sum on CUDA, in their own on a CPU; auto looks for a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    nbytes = {}
    for device in ("cpu", "auto", "cuda"):
        config = tiny(tmp_path, precision={"param_dtype": "bf16"}, run={"device": device})
        nbytes[device] = dry_run(config, 2).footprint.traffic[DP_SHARD, "reduce_scatter"].nbytes
    assert nbytes["auto"] == nbytes["cuda"] == 2 * nbytes["cpu"]


def test_what_only_a_run_can_refuse_is_not_refused(tmp_path: Path) -> None:
    """The schedule may be a checkpoint's; parameters on the host are a run's alone."""
    schedule = {"kind": "wsd", "decay_samples": 1000, "from_checkpoint": True}
    assert dry_run(tiny(tmp_path, schedule=schedule), 2).num_ranks == 2
    with pytest.raises(
        NotImplementedError, match=r"parameters on the device, got parallel\.offload"
    ):
        dry_run(tiny(tmp_path, parallel={"offload_parameters": True}), 2)


def test_number_of_ranks_comes_from_the_degrees_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given, configured, torchrun's, one: the first that is there."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    degrees = {"dp_outer": 2, "dp_shard": 3}
    assert dry_run(tiny(tmp_path), 4).num_ranks == 4
    assert dry_run(tiny(tmp_path, parallel=degrees)).num_ranks == 6
    assert dry_run(tiny(tmp_path)).num_ranks == 1
    assert dry_run(tiny(tmp_path, parallel={"dp_outer": 2})).num_ranks == 2
    two_groups = {"num_query_groups": 2}
    assert dry_run(tiny(tmp_path, model=two_groups, parallel={"tp": 2})).num_ranks == 2
    shared = {**degrees, "cp": 2, "tp": 2}
    assert dry_run(tiny(tmp_path, model=two_groups, parallel=shared)).num_ranks == 24
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert dry_run(tiny(tmp_path)).num_ranks == 3
    monkeypatch.setenv("WORLD_SIZE", "x")
    with pytest.raises(ConfigError, match=r"whole number.*got 'x'.*WORLD_SIZE"):
        dry_run(tiny(tmp_path))


def test_one_of_several_ranks_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher starts the command once a rank; each finds the same."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    printed = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        words = ["--model.preset=gpt-toy", "--data.sequence_length=8", "--dry-run"]
        assert main(["train", *words]) == 0
        printed.append(capsys.readouterr().out)
    assert "on 2 ranks" in printed[0] and printed[1] == ""


def test_optimizer_state_is_that_of_the_optimizer(tmp_path: Path) -> None:
    """AdamW keeps two numbers a parameter, SGD one, or none without momentum."""
    nbytes = [
        dry_run(tiny(tmp_path, optimizer=section), 2).footprint.resting[Category.OPTIMIZER_STATE]
        for section in ({}, {"kind": "sgd"}, {"kind": "sgd", "momentum": 0.0})
    ]
    assert nbytes[0] == 2 * nbytes[1] > 0 == nbytes[2]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--a.b", "1"], (None, ["--a.b", "1"])),
        (["--dry-run", "8", "--a.b=1"], (DryRunOptions(8, False), ["--a.b=1"])),
        (["--a.b", "1", "--dry-run=8", "--json"], (DryRunOptions(8, True), ["--a.b", "1"])),
        (["--dry-run", "--a.b", "1"], (DryRunOptions(None, False), ["--a.b", "1"])),
        (["--a.b", "1", "--json", "--dry-run"], (DryRunOptions(None, True), ["--a.b", "1"])),
        (["--dry-run", "4", "--dry-run=8"], (DryRunOptions(8, False), [])),
        (["--dry-run=8", "4"], (DryRunOptions(8, False), ["4"])),
    ],
)
def test_options_are_taken_out_of_the_command_line(words: list[str], expected: object) -> None:
    """The rest is the configuration's."""
    assert split_options(words) == expected


@pytest.mark.parametrize("words", [["--dry-run=0"], ["--dry-run", "many"], ["--dry-run="]])
def test_number_of_ranks_must_be_one(words: list[str]) -> None:
    """The message shows how to write it."""
    with pytest.raises(ConfigError, match=r"a number of ranks.*--dry-run 1024"):
        split_options(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dry-run", "1024"], "global_batch_size"),
        (["--dry-run", "8", "--parallel.dp_outer=3"], "world size 8"),
        (["--dry-run", "8", "--parallel.dp_outer=0"], "dp_outer"),
        (["--dry-run", "8", "--model.preset=qwen3-9b"], "qwen3-9b"),
        (["--dry-run", "8", "--parallel.prefetch=-1"], "parallel.prefetch"),
        (["--json", "--train.steps=1"], "--dry-run beside --json"),
        (["--html", "a.html"], "--dry-run beside --html"),
        (["--html=a.html"], "--dry-run beside --html"),
        (["--dry-run", "8", "--parallel.tp=4"], "divisor of model.num_query_groups, 2, got 4"),
        (
            ["--dry-run", "8", "--model.preset=qwen3-next-toy", "--parallel.cp=8"],
            "key_heads, 2, got 8",
        ),
        (["--dry-run", "8", "--parallel.ep=2"], "parallel.ep"),
        (["--dry-run", "8", "--run.directory=s3://bucket/run"], "the URL 's3://bucket/run'"),
        (["--dry-run", "8", "--train.steps=1", "--train.samples=8"], "either steps or samples"),
        (["--dry-run", "8", "--train.samples=3"], "train.samples"),
        (["--dry-run", "8", "--logging.profile={ranks: [8]}"], "ranks below the 8 of the run"),
        (["--dry-run", "8", "--logging.trackers=[no_module:X]"], "logging.trackers 'no_module:X'"),
        (["--dry-run", "8", "--data.split=a"], "data.split"),
        (["--dry-run", "8", "--data.train=[a]", "--data.weights=[1, 2]"], "data.weights"),
        (["--dry-run", "8", "--data.sequence_length=100000"], "max_sequence_length"),
        (
            [*WSD, "--train.steps=1", "--schedule.decay_samples=100"],
            "decay within the run's 8 samples",
        ),
    ],
)
def test_refusals_are_one_message(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """What a run would refuse, a dry run refuses; the code is 2."""
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
