"""What any mesh and strategy saved, any other loads bit by bit, and saves again the same.

Weights and the states of FusedAdam in every form it keeps them. The model has linear attention,
experts, shared ones, query groups if it has two layers, tied embeddings of 322 rows, and a width
that three ranks cannot divide evenly; tensor and expert parallelism cut it or do not.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megafsdp import MixedPrecisionPolicy, ParallelDims, checkpoint, fully_shard_model
from megafsdp.checkpoint.format.manifest import read_manifest
from megafsdp.errors import CheckpointError
from megafsdp.models import ModelConfig, build_model, unit_classes
from megafsdp.models.config import FULL_ATTENTION, LINEAR_ATTENTION
from megafsdp.optimizer.adam.fused_adam import FusedAdam
from megafsdp.optimizer.states.formats import is_scaled
from megafsdp.parallel import end_router_step, parallelize
from tests.checkpoint.sharding import differences
from tests.pairwise import pairwise
from tests.ranks import Ranks
from tests.training.runs import stored_tensors

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
LAYER_TYPES = (LINEAR_ATTENTION, FULL_ATTENTION)
CONFIG = ModelConfig(
    architecture="qwen3_next",
    num_layers=2,
    hidden_size=20,
    num_attention_heads=2,
    num_query_groups=2,
    head_dim=10,
    vocab_size=322,
    max_sequence_length=16,
    num_experts=4,
    num_experts_per_token=2,
    moe_ffn_hidden_size=7,
    shared_expert_ffn_hidden_size=14,
    router_balance="bias",
    layer_types=LAYER_TYPES,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=3,
    linear_value_head_dim=5,
)
# Strategy, data mesh, tensor- and expert-parallel degree; two data axes are replicas (HSDP) or
# dividing ranks (HFSDP), then dividing ranks.
Place = tuple[str, tuple[int, ...], int, int]
ONE, TWO, THREE = (("optim_grads_params", (n,), 1, 1) for n in (1, 2, 3))
PLACES: list[Place] = [
    ("optim", (1,), 1, 1),
    ("optim", (2,), 2, 2),
    ("optim", (4,), 1, 4),
    ("optim_grads", (3,), 1, 1),
    ONE,
    ("optim_grads", (1,), 2, 2),
    ("optim_grads_params", (2,), 2, 1),
    TWO,
    THREE,
    ("hsdp", (2, 2), 1, 2),
    ("hfsdp", (2, 2), 1, 1),
    ("hfsdp", (2, 1), 2, 2),
]
MODES: dict[str, dict[str, object]] = {
    "fp32": {},
    "bf16": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "fp16": {"exp_avg_dtype": FP16, "exp_avg_sq_dtype": FP16},
    "fp8": {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8},
    "mixed": {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP16},
    "remainders": {"store_param_remainders": True},
}
STEP = 2
Tensors = dict[str, torch.Tensor]


def place_id(value: object) -> str:
    """Name a place ``hsdp-2x2-tp1-ep2``."""
    if not isinstance(value, tuple):
        return str(value)
    strategy, shape, tp, ep = value
    return f"{strategy}-{'x'.join(map(str, shape))}-tp{tp}-ep{ep}"


def _build(
    place: Place, mode: str, seed: int, num_layers: int, **fields: object
) -> tuple[nn.Module, FusedAdam]:
    strategy, shape, tp, ep = place
    meshes = ParallelDims(*(1, *shape)[-2:], tp=tp, ep=ep).build("cpu")
    config = replace(CONFIG, num_layers=num_layers, layer_types=LAYER_TYPES[:num_layers])
    config = replace(config, **fields)
    outer = {"hsdp": "no_shard", "hfsdp": "optim"}.get(strategy)
    remainders = MixedPrecisionPolicy(param_dtype=BF16, main_params_dtype=BF16)
    model = parallelize(build_model(config, seed=seed), meshes)
    fully_shard_model(
        model,
        unit_classes(config),
        mesh=meshes.data,
        expert_mesh=meshes.experts,
        strategy="optim_grads_params" if outer else strategy,
        mp_policy=remainders if mode == "remainders" else MixedPrecisionPolicy(),
        **({"outer_strategy": outer} if outer else {}),
    )
    return model, FusedAdam(model.parameters(), lr=0.01, eps=1e-5, **MODES[mode])


def _canonical(model: nn.Module, optimizer: FusedAdam) -> Tensors:
    """Return whole weights and states in the form of checkpoints, by name; collective."""
    found: Tensors = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        weight = optimizer.canonical_weight(parameter)
        for key, tensor in {"": weight, **optimizer.canonical_state(parameter)}.items():
            is_sharded = isinstance(tensor, DTensor)
            found[f"{name}/{key}"] = (
                (tensor.full_tensor() if is_sharded else tensor).detach().clone()
            )
    return found


def _train_and_save(place: Place, mode: str, root: Path, num_layers: int = 1) -> Tensors:
    model, optimizer = _build(place, mode, 1, num_layers)
    for step in range(STEP):
        tokens = torch.randint(322, (2, 9), generator=torch.Generator().manual_seed(step))
        model(tokens).float().square().mean().backward()
        optimizer.step()
        end_router_step(model)
        optimizer.zero_grad()
    checkpoint.save(root, step=STEP, model=model, optimizer=optimizer)
    return _canonical(model, optimizer)


def _load_and_save(
    place: Place, mode: str, roots: list[tuple[Path, Path]], num_layers: int = 1
) -> list[Tensors]:
    """Load each source into fresh objects and save it to its target."""
    found = []
    for source, target in roots:
        model, optimizer = _build(place, mode, 2, num_layers)
        checkpoint.load(source, model=model, optimizer=optimizer)
        checkpoint.save(target, step=STEP, model=model, optimizer=optimizer)
        found.append(_canonical(model, optimizer))
    return found


def _size(place: Place) -> int:
    return math.prod(place[1]) * place[2]


def _on_disk(root: Path) -> Tensors:
    stored = stored_tensors(root, STEP)
    return {key: stored[key] for key in read_manifest(root / f"iter_{STEP:07d}").tensors}


def _check(
    ranks: Ranks, folder: Path, mode: str, pairs: list[tuple[Place, Place]], num_layers: int
) -> None:
    """Save at every source; load and save again at every target, all its sources in one start."""
    # Where tp cuts rows, states with a scale for each block of a row stay in fp32, and would be
    # rounded elsewhere.
    is_rounded = any(map(is_scaled, MODES[mode].values()))
    pairs = [(s, t) for s, t in pairs if not (is_rounded and s[2] > t[2])]
    saved, files = {}, {}
    for source in dict.fromkeys(source for source, _ in pairs):
        root = folder / place_id(source)
        saved[source] = ranks(_size(source)).run(_train_and_save, source, mode, root, num_layers)[0]
        files[source] = _on_disk(root)
        assert any(t.any() for key, t in files[source].items() if key.endswith("exp_avg_sq"))
    for target in dict.fromkeys(target for _, target in pairs):
        sources = [source for source, aim in pairs if aim == target]
        roots = [
            (folder / place_id(s), folder / f"{place_id(s)}-{place_id(target)}") for s in sources
        ]
        for on_rank in ranks(_size(target)).run(_load_and_save, target, mode, roots, num_layers):
            for source, loaded in zip(sources, on_rank, strict=True):
                assert differences(saved[source], loaded) == [], (source, target)
        for source, (_, root) in zip(sources, roots, strict=True):
            assert differences(files[source], _on_disk(root)) == [], (source, target)


# What files are cut by on both sides is the number of data ranks and the degrees of tp and ep. Of
# the places alike in these, each selected pair takes others; by threes, each form of the states has
# two sources.
ALIKE: dict[tuple[int, ...], list[tuple[Place, Place]]] = {}
for _both in itertools.product(PLACES, PLACES):
    _degrees = ((math.prod(shape), tp, ep) for _, shape, tp, ep in _both)
    ALIKE.setdefault(tuple(itertools.chain(*_degrees)), []).append(_both)
PAIRWISE = [ALIKE[kind][3 * i % len(ALIKE[kind])] for i, kind in enumerate(pairwise([*ALIKE]))]
# A source is trained and saved once, so all its pairs have one form of the states.
MODE_OF = dict(zip(PLACES, [*MODES] * 2, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_round_trips_are_exact(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """Every two of data ranks, tp and ep on both sides meet; each form has two sources."""
    pairs = [(source, target) for source, target in PAIRWISE if MODE_OF[source] == mode]
    assert len({source for source, _ in pairs}) == 2
    _check(ranks, tmp_path, mode, pairs, num_layers=2 if mode == "fp32" else 1)


@pytest.mark.matrix("round-trips")
@pytest.mark.parametrize("mode", MODES)
def test_all_ordered_pairs_of_places_are_exact(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """Each of a dozen places to each other one, and to itself."""
    _check(ranks, tmp_path, mode, [(s, t) for s in PLACES for t in PLACES], num_layers=2)


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """Return a checkpoint with fp32 moments of two ranks, and what it has."""
    root = tmp_path_factory.mktemp("trained")
    return root, ranks(2).run(_train_and_save, TWO, "fp32", root)[0]


@pytest.mark.parametrize("mode", ["bf16", "fp16", "fp8", "mixed"])
def test_states_are_loaded_into_another_format(
    ranks: Ranks, trained: tuple[Path, Tensors], tmp_path: Path, mode: str
) -> None:
    """fp32 moments are rounded to the format alike on 1 and 3 ranks; what it holds fits fp32."""
    root, saved = trained
    pairs = [(root, tmp_path / mode)]
    rounded = ranks(3).run(_load_and_save, THREE, mode, pairs)[0][0]
    alone = [(root, tmp_path / "alone")]
    assert differences(rounded, ranks(1).run(_load_and_save, ONE, mode, alone)[0][0]) == []
    changed = differences(saved, rounded)
    assert changed and all(name.endswith(("exp_avg", "exp_avg_sq")) for name in changed)
    for name in changed:
        if mode == "bf16":
            assert torch.equal(rounded[name], saved[name].bfloat16().float()), name
        # Three bits of mantissa beside a scale of at most 128 elements.
        bound = saved[name].abs().max() * 2**-4
        assert (rounded[name] - saved[name]).abs().max() <= bound, name
    back = [(tmp_path / mode, tmp_path / "back")]
    assert differences(rounded, ranks(2).run(_load_and_save, TWO, "fp32", back)[0][0]) == []


def _refused(root: Path, message: str, fields: dict[str, object]) -> None:
    model, optimizer = _build(TWO, "fp32", 2, 1, **fields)
    before = _canonical(model, optimizer)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(root, model=model, optimizer=optimizer)
    assert differences(before, _canonical(model, optimizer)) == []


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (r"of another shape: .*mlp\.experts\.linear_fc1", {"num_experts": 8}),
        (r"missing in the checkpoint: .*linear_qkv", {"layer_types": (FULL_ATTENTION,)}),
        (r"in the checkpoint but not asked for: .*expert_bias", {"router_balance": "none"}),
    ],
    ids=["experts", "layer types", "balance"],
)
def test_a_checkpoint_of_another_model_is_refused(
    ranks: Ranks, trained: tuple[Path, Tensors], message: str, fields: dict[str, object]
) -> None:
    """On all ranks, by names, with nothing changed."""
    ranks(2).run(_refused, trained[0], message, fields)


def test_every_strategy_and_mesh_is_among_the_selected_pairs() -> None:
    """As what saves and as what loads."""
    for side in zip(*PAIRWISE, strict=True):
        assert [{*values} for values in zip(*side, strict=True)] == [
            {*values} for values in zip(*PLACES, strict=True)
        ]
