"""Ways to run the same training: ranks, meshes, strategies, recomputation, dtypes, optimizers."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megafsdp import full_state_dict, fully_shard_model
from megafsdp.errors import ConfigError
from megafsdp.models import ActivationCheckpointing, LanguageModel, build_model
from megafsdp.training import Config, sharded_model, train
from megafsdp.training.step.lr import Schedule
from tests.ranks import Ranks
from tests.training.runs import rows, stored_tensors, tiny, write_corpus

# Enough for the second moments to matter and for the loss to fall.
NUM_STEPS = 4

Row = dict[str, Any]
Straight = Callable[..., list[Row]]


@pytest.fixture(scope="module")
def straight(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Return a function for the rows of a run that tests compare with; each is trained once."""
    folder, found = tmp_path_factory.mktemp("straight"), dict[str, list[Row]]()
    write_corpus(folder)

    def rows_of(num_ranks: int, **sections: dict[str, Any]) -> list[Row]:
        key = json.dumps([num_ranks, sections], sort_keys=True)
        if key not in found:
            found[key] = _rows_of(ranks, num_ranks, folder, **sections)
        return found[key]

    return rows_of


def _losses(ranks: Ranks, num_ranks: int, folder: Path, **sections: dict[str, Any]) -> list[float]:
    """Train the tiny run in a folder of its own beside the shared corpus; return its losses."""
    directory = folder / f"run{len(list(folder.glob('run*')))}"
    run = {"directory": str(directory)} | sections.pop("run", {})
    train_section = {"steps": NUM_STEPS} | sections.pop("train", {})
    data = {"cache": str(folder / "cache"), "validation": []}
    config = tiny(folder, run=run, data=data, train=train_section, **sections)
    ranks(num_ranks).run(train, config)
    metrics = (directory / "metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, metrics) if "loss" in row]
    assert len(losses) == config.train.steps
    assert losses[-1] < losses[0] - 0.5
    return losses


def test_number_of_ranks_does_not_change_the_losses(straight: Straight) -> None:
    """One, two and three ranks begin with the same weights and read the same batches.

    The tolerance is that of fp32 sums in another order over four steps of Adam with eps 1e-5.
    """
    one, *more = [[row["loss"] for row in straight(size)] for size in (1, 2, 3)]
    for losses in more:
        assert losses == pytest.approx(one, rel=1e-5)


def _mesh_of_run(config: Config) -> tuple[tuple[int, ...], float, list[float]]:
    """Train; return the shape of the mesh, this rank's share of the model, and the losses."""
    losses: list[float] = []
    found: list[nn.Module] = []
    plain = fully_shard_model

    def watched(model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        found.append(model)
        return plain(model, *args, **options)

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("megafsdp.training.sharded_model.fully_shard_model", watched)
    try:
        train(config, on_step=lambda _, result: losses.append(result.loss))
    finally:
        monkeypatch.undo()
    assert found[0]._fsdp_unit().options.nccl_user_buffers == config.parallel.nccl_user_buffers
    parameters = [p for p in found[0].parameters() if isinstance(p, DTensor)]
    local = sum(p.detach().to_local().numel() for p in parameters)
    return parameters[0].device_mesh.shape, local / sum(p.numel() for p in parameters), losses


# Values that other cases have as well.
_more = functools.partial(pytest.param, marks=pytest.mark.matrix("ways-to-divide"))
# Ranks, options, and the part of the main weights that one rank holds.
STRATEGIES = [
    (2, {"strategy": "no_shard"}, 1),
    (2, {"strategy": "optim"}, 1 / 2),
    (2, {"strategy": "optim_grads"}, 1 / 2),
    (2, {"dp_outer": 2}, 1),
    (2, {"reshard_after_forward": False, "prefetch": 0, "nccl_user_buffers": True}, 1 / 2),
    (4, {}, 1 / 4),
    _more(4, {"dp_outer": 2}, 1 / 2),
    (4, {"dp_outer": 2, "dp_shard": 2, "reshard_after_forward": True}, 1 / 2),
    _more(4, {"dp_outer": 2, "strategy": "optim"}, 1 / 2),
    (4, {"dp_outer": 2, "strategy": "optim_grads", "prefetch": 2}, 1 / 2),
    (4, {"dp_outer": 4}, 1),
    _more(4, {"dp_outer": 2, "strategy": "no_shard"}, 1),
    _more(2, {"dp_outer": 2, "outer_strategy": "optim"}, 1 / 2),
    (4, {"dp_outer": 2, "outer_strategy": "optim"}, 1 / 4),
    _more(4, {"dp_outer": 4, "outer_strategy": "optim"}, 1 / 4),
    (4, {"reshard_after_forward": 2}, 1 / 4),
    (4, {"dp_outer": 2, "reshard_after_forward": 2}, 1 / 2),
]


@pytest.mark.parametrize(("num_ranks", "parallel", "share"), STRATEGIES)
def test_way_to_divide_does_not_change_the_losses(
    ranks: Ranks,
    tmp_path: Path,
    straight: Straight,
    num_ranks: int,
    parallel: dict[str, Any],
    share: float,
) -> None:
    """Every strategy on every mesh trains as one rank does, with the right share on each rank.

    The tolerance is that of fp32 sums in another order over four steps of Adam with eps 1e-5.
    """
    write_corpus(tmp_path)
    sections: dict[str, Any] = {"train": {"steps": NUM_STEPS}, "data": {"validation": []}}
    found = ranks(num_ranks).run(_mesh_of_run, tiny(tmp_path, parallel=parallel, **sections))
    alone = [row["loss"] for row in straight(1)]
    for _, _, losses in found:
        assert losses == pytest.approx(alone, rel=1e-5)
    outer = parallel.get("dp_outer", 1)
    shape = (num_ranks,) if outer == 1 else (outer, num_ranks // outer)
    assert [s for s, _, _ in found] == [shape] * num_ranks
    # Rows of other tensors may lie on the other side of a cut.
    assert [part for _, part, _ in found] == pytest.approx([share] * num_ranks, rel=0.2)


RECOMPUTED = [
    ({"mode": "full"}, "bf16"),
    ({"mode": "full", "every": 2}, "fp32"),
    ({"mode": "full", "use_reentrant": True}, "fp32"),
    ({"mode": "selective"}, "bf16"),
]


@pytest.mark.parametrize(
    ("choice", "param_dtype"),
    [
        *RECOMPUTED,
        *(
            pytest.param(
                choice,
                "fp32" if dtype == "bf16" else "bf16",
                marks=pytest.mark.matrix("recomputation"),
            )
            for choice, dtype in RECOMPUTED
        ),
    ],
)
def test_recomputation_does_not_change_the_losses(
    ranks: Ranks, tmp_path: Path, straight: Straight, choice: dict[str, Any], param_dtype: str
) -> None:
    """Four steps on two ranks have the same losses to the last bit."""
    write_corpus(tmp_path)
    sections = {"precision": {"param_dtype": param_dtype}}
    wanted = [row["loss"] for row in straight(2, **sections)]
    assert _losses(ranks, 2, tmp_path, activation_checkpointing=choice, **sections) == wanted


def _graphs_of_run(config: Config) -> tuple[int, list[float]]:
    """Train; return how many graphs were compiled, and the losses."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses: list[float] = []
    train(config, on_step=lambda _, result: losses.append(result.loss))
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], losses


# The tracer asks every input for .grad, and torch warns where it is not a leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_layers_do_not_change_the_losses(
    ranks: Ranks, tmp_path: Path, straight: Straight
) -> None:
    """All layers share one graph in training and one in evaluation; by default none is made.

    The tolerance is that of fp32 in another order of operators over four steps of Adam.
    """
    assert not Config().compile.layers
    write_corpus(tmp_path)
    section = {"layers": True, "backend": "eager"}
    config = tiny(tmp_path, compile=section, train={"steps": NUM_STEPS})
    ((num_graphs, losses),) = ranks(1).run(_graphs_of_run, config)
    assert num_graphs == 2
    assert losses == pytest.approx([row["loss"] for row in straight(1)], rel=1e-5)


def _choice_of_run(config: Config) -> ActivationCheckpointing:
    """Return what the trained model was told to recompute."""
    found: list[LanguageModel] = []
    plain = build_model

    def watched(*args: Any, **options: Any) -> LanguageModel:
        found.append(plain(*args, **options))
        return found[-1]

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("megafsdp.training.sharded_model.build_model", watched)
    try:
        train(config)
    finally:
        monkeypatch.undo()
    return found[0].activation_checkpointing


def test_recomputation_is_what_the_configuration_says(tmp_path: Path) -> None:
    """The section reaches the model; without it nothing is recomputed."""
    write_corpus(tmp_path)
    step: dict[str, Any] = {"train": {"steps": 1}, "data": {"validation": []}}
    assert _choice_of_run(tiny(tmp_path, **step)) == ActivationCheckpointing()
    section = {"mode": "full", "every": 2, "use_reentrant": True}
    step["run"] = {"directory": str(tmp_path / "run2")}
    config = tiny(tmp_path, activation_checkpointing=section, **step)
    assert _choice_of_run(config) == ActivationCheckpointing("full", 2, True)


@pytest.mark.parametrize(
    ("backend", "mode"), [("inductor", "selective"), ("eager", "selective"), ("inductor", "full")]
)
def test_products_that_are_not_kept_are_warned_of(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    mode: str,
) -> None:
    """Of layers that inductor compiles, selective checkpointing recomputes what it should keep."""
    write_corpus(tmp_path)
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: None)
    compiled = {"layers": True, "backend": backend}
    sections = {"compile": compiled, "activation_checkpointing": {"mode": mode}}
    train(tiny(tmp_path, train={"steps": 1}, data={"validation": []}, **sections))
    is_warned = any("recompute matrix products" in message for message in caplog.messages)
    assert is_warned == ((backend, mode) == ("inductor", "selective"))


def _dtypes_of_run(config: Config) -> set[tuple[torch.dtype, torch.dtype]]:
    """Return the dtypes of main weights and main gradients at the first step of the optimizer."""
    found: set[tuple[torch.dtype, torch.dtype]] = set()

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found.update((p.dtype, p.grad.dtype) for p in parameters if p.grad is not None)

    handle = register_optimizer_step_pre_hook(look)
    try:
        train(config)
    finally:
        handle.remove()
    return found


@pytest.mark.parametrize(
    ("precision", "weights", "gradients"),
    [
        ({}, torch.float32, torch.float32),
        ({"param_dtype": "bf16"}, torch.float32, torch.float32),
        ({"param_dtype": "bf16", "main_grads_dtype": "bf16"}, torch.float32, torch.bfloat16),
        ({"param_dtype": "bf16", "main_params_dtype": "bf16"}, torch.bfloat16, torch.bfloat16),
        (
            {"main_params_dtype": "bf16", "main_grads_dtype": "fp32"},
            torch.bfloat16,
            torch.float32,
        ),
    ],
)
def test_main_dtypes_are_what_the_configuration_says(
    ranks: Ranks,
    tmp_path: Path,
    precision: dict[str, str],
    weights: torch.dtype,
    gradients: torch.dtype,
) -> None:
    """What the optimizer sees; main gradients follow main weights unless they are named."""
    write_corpus(tmp_path)
    # torch's AdamW takes gradients of the weights' dtype only, as SGD on lists does in torch 2.11.
    optimizer = {"kind": "sgd", "implementation": "loop"}
    step: dict[str, Any] = {"train": {"steps": 1}, "data": {"validation": []}}
    config = tiny(tmp_path, precision=precision, optimizer=optimizer, **step)
    assert ranks(2).run(_dtypes_of_run, config) == [{(weights, gradients)}] * 2


def _kept_in_fp32(config: Config) -> tuple[set[str], list[float]]:
    """Return the modules whose weights were fp32 when they ran, and the losses of a run."""
    kept: set[str] = set()
    losses: list[float] = []

    def build(*arguments: Any, **options: Any) -> nn.Module:
        model = fully_shard_model(*arguments, **options)
        for name, module in model.named_modules():
            if isinstance(module._parameters.get("weight"), torch.Tensor):
                module.register_forward_pre_hook(functools.partial(look, name))
        return model

    def look(name: str, module: nn.Module, _: object) -> None:
        if module.weight.dtype == torch.float32:
            kept.add(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_model, "fully_shard_model", build)
        train(config, on_step=lambda _, report: losses.append(report.loss))
    return kept, losses


LAYERS = [f"decoder.layers.{i}" for i in (0, 1)]
KEPT = {
    "decoder.layers.0.input_layernorm": {"decoder.layers.0.input_layernorm"},
    "decoder.layers.1.input_layernorm.weight": {"decoder.layers.1.input_layernorm"},
    "mlp.linear_fc2": {f"{layer}.mlp.linear_fc2" for layer in LAYERS},
    "decoder.layers.1.mlp": {f"decoder.layers.1.mlp.linear_fc{i}" for i in (1, 2)},
    "*layernorm*": {
        *(f"{layer}.{name}_layernorm" for layer in LAYERS for name in ("input", "pre_mlp")),
        "decoder.final_layernorm",
        *(f"{layer}.self_attention.{x}_layernorm" for layer in LAYERS for x in "qk"),
    },
    "embedding": {"embedding.word_embeddings", "embedding.position_embeddings"},
    "OutputLayer": {"output_layer"},
    "output_layer": {"output_layer"},
}
TIED = {"embedding.word_embeddings", "output_layer"}


# Part 0 has each name in one case of four: both names of the output layer are tied there.
@pytest.mark.parametrize(
    "part",
    [0, *(pytest.param(part, marks=pytest.mark.matrix("kept-in-fp32")) for part in (1, 2, 3))],
)
@pytest.mark.parametrize("architecture", ["gpt", "qwen3"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_what_is_kept_in_fp32_is_what_is_named(
    tmp_path: Path, is_tied: bool, architecture: str, part: int
) -> None:
    """Weights of the named modules, and no others, and they do change the losses."""
    write_corpus(tmp_path)
    model = {"architecture": architecture, "tie_embeddings": is_tied}
    # Outputs of an embedding are rounded in any case: the first step differs in gradients alone.
    sections = {"model": model, "train": {"steps": 4}, "data": {"validation": []}}

    def run(number: int, *names: str) -> tuple[set[str], list[float]]:
        directory = {"directory": str(tmp_path / f"run{number}")}
        precision = {"param_dtype": "bf16", "keep_fp32": list(names)}
        return _kept_in_fp32(tiny(tmp_path, run=directory, precision=precision, **sections))

    none, losses = run(0)
    assert none == set()
    with torch.device("meta"):
        whole = build_model(tiny(tmp_path, model=model).model.resolve())
    modules = {name for name, _ in whole.named_modules()}
    names = list(KEPT)[(part + 2 * is_tied + (architecture == "gpt")) % 4 :: 4]
    for number, name in enumerate(names, 1):
        expected = KEPT[name]
        kept, others = run(number, name)
        wanted = expected | (TIED if is_tied and expected & TIED else set())
        assert kept == wanted & modules, name
        assert losses != others, name


def test_bf16_run_learns(straight: Straight) -> None:
    """Compute in bf16 with fp32 main weights goes down the same way."""
    losses = [row["loss"] for row in straight(2, precision={"param_dtype": "bf16"})]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_other_architectures_train(tmp_path: Path, kind: str) -> None:
    """Every architecture runs through the same loop."""
    write_corpus(tmp_path)
    sizes = {"num_query_groups": 2} if kind == "gpt" else {}
    assert train(
        tiny(tmp_path, model={"architecture": kind, **sizes}, train={"steps": 2})
    ).is_finished


def _weights_of_a_run(folder: Path) -> None:
    config = tiny(folder)
    model_config = config.model.resolve()
    before = torch.get_rng_state()
    meshes = config.parallel.dims().build("cpu")
    model = sharded_model.build_sharded(config, model_config, torch.device("cpu"), meshes)
    assert torch.equal(torch.get_rng_state(), before), "the rank's own random state is left alone"
    reference = build_model(model_config, seed=config.run.seed)
    state = full_state_dict(model)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_initial_weights_are_those_of_the_seed(ranks: Ranks, tmp_path: Path) -> None:
    """Initialising the divided model gives what building the whole one gives."""
    write_corpus(tmp_path)
    ranks(2).run(_weights_of_a_run, tmp_path)


def _rows_of(ranks: Ranks, num_ranks: int, folder: Path, **sections: Any) -> list[dict[str, Any]]:
    """Train the tiny run in a folder of its own; return its rows of steps."""
    _losses(ranks, num_ranks, folder, **sections)
    newest = max(folder.glob("run*/metrics.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    parsed = [json.loads(line) for line in newest.read_text().splitlines()]
    return [row for row in parsed if "loss" in row]


OPTIMIZERS = {
    "adam, bf16 states": {"kind": "adam", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "fp8 and fp16 states": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"},
    "sgd": {"kind": "sgd", "lr": 0.3},
    "muon": {"kind": "muon"},
    "muon, by heads": {"kind": "muon", "lr_multipliers": {"*embedding*": 0.5}},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_number_of_ranks_does_not_change_what_an_optimizer_does(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    """Losses and gradient norms of one rank and of two.

    The tolerance is that of fp32 sums in another order over six steps. Narrow states round the
    difference up to their own precision where a value lies at the edge of two codes, and the
    orthogonalisation of a matrix enlarges what is small in it.
    """
    write_corpus(tmp_path)
    # Some learn more slowly.
    sections: dict[str, Any] = {"optimizer": OPTIMIZERS[name], "train": {"steps": 6}}
    if name == "muon, by heads":
        sections["muon"] = {"split_fused": "groups", "ns_steps": 4, "nesterov": False}
    one, two = (_rows_of(ranks, size, tmp_path, **sections) for size in (1, 2))
    for alone, row in zip(one, two, strict=True):
        assert row["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


SGD_FORMS = ("null", "fused", "foreach")
SGD_WAYS = [
    ("fp32", "no_shard"),
    ("bf16", "optim"),
    ("fp32", "optim_grads_params"),
    _more("bf16", "no_shard"),
    _more("fp32", "optim"),
    _more("bf16", "optim_grads_params"),
]


def _weights_by_sgd(folder: Path, form: str, **sections: Any) -> list[dict[str, torch.Tensor]]:
    """Return the weights after each of two steps."""
    run = folder / form
    optimizer = {"kind": "sgd", "lr": 1.0, "implementation": None if form == "null" else form}
    sections |= {"optimizer": optimizer, "train": {"steps": 2}, "data": {"validation": []}}
    # The second step is as large as the first: weights move by more than they may differ.
    sections |= {"schedule": {"kind": "constant", "warmup_samples": 0}}
    sections |= {"checkpoint": {"interval_steps": 1}}
    train(tiny(folder, run={"directory": str(run)}, **sections))
    stored = [stored_tensors(run / "checkpoints", step) for step in (1, 2)]
    return [{k: v for k, v in tensors.items() if k.startswith("model")} for tensors in stored]


@pytest.mark.parametrize(("main", "strategy"), SGD_WAYS)
def test_forms_of_sgd_train_alike_or_are_refused(tmp_path: Path, main: str, strategy: str) -> None:
    """Every other form gives the weights of torch's loop, which have moved, or says why not.

    Its fused form is refused where torch has none, and where torch's does not step the weights.
    """
    write_corpus(tmp_path)
    sections = {"precision": {"main_params_dtype": main}, "parallel": {"strategy": strategy}}
    start, wanted = _weights_by_sgd(tmp_path, "loop", **sections)
    matrices = [name for name, tensor in wanted.items() if tensor.ndim == 2]
    # A fused multiply and add rounds once: a last place of these weights.
    rtol, atol = {"fp32": (1e-5, 1e-6), "bf16": (2.0**-7, 2.0**-11)}[main]
    assert matrices
    assert all((wanted[name] - start[name]).abs().max() > 4 * atol for name in matrices)
    for form in SGD_FORMS:
        if form == "fused" and (main == "bf16" or strategy == "no_shard"):
            with pytest.raises(ConfigError, match=r"optimizer\.implementation"):
                _weights_by_sgd(tmp_path, form, **sections)
            continue
        for name, weight in _weights_by_sgd(tmp_path, form, **sections)[-1].items():
            torch.testing.assert_close(weight, wanted[name], rtol=rtol, atol=atol)


def test_implementations_of_adamw_train_alike(ranks: Ranks, tmp_path: Path) -> None:
    """Ours clips within its step, torch's is given clipped gradients: the losses are the same.

    The tolerance is that of fp32 rounding over four steps of Adam with eps 1e-5.
    """
    write_corpus(tmp_path)
    clip = {"clip_norm": 0.3}
    ours = _rows_of(ranks, 2, tmp_path, optimizer=clip)
    assert all(row["grad_norm"] > 0.3 for row in ours)
    for form in ("fused", "foreach", "loop"):
        theirs = _rows_of(ranks, 2, tmp_path, optimizer={**clip, "implementation": form})
        for a, b in zip(ours, theirs, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


_DELAYED = functools.partial(pytest.param, marks=pytest.mark.matrix("offload-delays"))


@pytest.mark.parametrize(
    ("fraction", "overlap"), [(0.5, True), (1.0, False), _DELAYED(0.5, False), _DELAYED(1.0, True)]
)
def test_offload_changes_no_bit_of_a_run(
    ranks: Ranks, tmp_path: Path, straight: Straight, fraction: float, overlap: bool
) -> None:
    """Losses and norms of a run that clips, whatever the fraction; evaluation reads weights too."""
    write_corpus(tmp_path)
    options = {"precision": {"param_dtype": "bf16"}}
    wanted = straight(2, optimizer={"clip_norm": 0.3}, **options)
    section = {"clip_norm": 0.3, "offload_fraction": fraction, "offload_overlap": overlap}
    found = _rows_of(ranks, 2, tmp_path, optimizer=section, **options)
    for a, b in zip(found, wanted, strict=True):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])


@pytest.mark.parametrize("kind", [{}, {"kind": "muon"}])
def test_parameters_on_the_host_change_no_bit_of_a_run(
    ranks: Ranks, tmp_path: Path, straight: Straight, kind: dict[str, str]
) -> None:
    """Losses and norms of a run that clips and evaluates."""
    write_corpus(tmp_path)
    options = {"precision": {"param_dtype": "bf16"}, "optimizer": {"clip_norm": 0.3, **kind}}
    wanted = straight(2, **options)
    found = _rows_of(ranks, 2, tmp_path, parallel={"offload_parameters": True}, **options)
    for a, b in zip(found, wanted, strict=True):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])


def _threads_in_steps(config: Config) -> tuple[set[int], int]:
    """Return torch's threads in the steps of a run, and after it."""
    found: set[int] = set()
    train(config, on_step=lambda _, result: found.add(torch.get_num_threads()))
    return found, torch.get_num_threads()


@pytest.mark.parametrize(("is_on_host", "wanted"), [(True, 3), (False, 1)])
def test_parameters_on_the_host_are_stepped_by_its_threads(
    ranks: Ranks, tmp_path: Path, is_on_host: bool, wanted: int
) -> None:
    """In the run alone, and in no other run."""
    write_corpus(tmp_path)
    sections = {"parallel": {"offload_parameters": True}, "optimizer": {"host_threads": 3}}
    config = tiny(tmp_path, train={"steps": 1}, **(sections if is_on_host else {}))
    assert ranks(1).run(_threads_in_steps, config) == [({wanted}, 1)]


def test_a_run_is_resumed_at_another_fraction(ranks: Ranks, tmp_path: Path) -> None:
    """Saved in the background with all on the host, resumed with half of it there."""
    write_corpus(tmp_path)

    def run(name: str, fraction: float, steps: int) -> Path:
        config = tiny(
            tmp_path,
            run={"directory": str(tmp_path / name)},
            optimizer={"offload_fraction": fraction},
            precision={"param_dtype": "bf16"},
            schedule={"kind": "constant"},
            train={"steps": steps},
            checkpoint={"interval_steps": 2, "in_background": True},
        )
        ranks(2).run(train, config)
        return Path(config.checkpoint_directory)

    wanted = run("whole", 0.0, 4)
    run("parts", 1.0, 2)
    found = run("parts", 0.5, 4)
    for step in (2, 4):
        expected, stored = stored_tensors(wanted, step), stored_tensors(found, step)
        assert stored.keys() == expected.keys()
        assert any(key.endswith("exp_avg") for key in stored)
        for key, value in expected.items():
            assert torch.equal(stored[key], value), key


def test_fp16_run_learns_and_its_schedule_waits_for_skipped_steps(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The first scales overflow; the rate of a skipped step comes again until one is taken."""
    write_corpus(tmp_path)
    config = tiny(
        tmp_path,
        precision={"param_dtype": "fp16"},
        loss_scale={"initial": 2.0**24, "hysteresis": 1},
        train={"steps": 14},
    )
    ranks(2).run(train, config)
    steps = [row for row in rows(tmp_path) if "loss" in row]
    skips = [b["num_skipped"] - a["num_skipped"] for a, b in itertools.pairwise(steps)]
    skipped = [steps[0]["num_skipped"], *skips]
    assert 0 < sum(skipped) < 8
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    schedule, taken = Schedule.of(config), 0
    for row, is_skipped in zip(steps, skipped, strict=True):
        assert row["lr"] == schedule.at((taken + 1) * config.train.global_batch_size)
        taken += 1 - is_skipped
    scales = [row["loss_scale"] for row in steps]
    for before, after, is_skipped in zip(scales, scales[1:], skipped, strict=False):
        assert after == (before / 2 if is_skipped else before)
