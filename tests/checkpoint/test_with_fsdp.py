"""Checkpoints of models that the engine shards: resume, other strategies, fresh compute weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from megafsdp.buffer.dtensor.uneven import UnevenDTensor, full_tensor, local_tensor
from megafsdp.checkpoint import load, save
from megafsdp.errors import CheckpointError
from megafsdp.fsdp import MixedPrecisionPolicy, fully_shard, mark_main_weights_changed
from tests.checkpoint.sharding import differences, fill, full_state
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]

VOCABULARY = 321
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class _Block(nn.Module):
    """A stack of matrices, as experts have them, and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.stack = nn.Parameter(torch.zeros(3, width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.einsum("btd,edf->btf", self.norm(x), self.stack).tanh()


class _Language(nn.Module):
    """Tied embeddings around two blocks."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _build(salt: int, strategy: str, policy: MixedPrecisionPolicy) -> _Language:
    model = _Language()
    fill(model, salt)
    for block in model.blocks:
        fully_shard(block, strategy=strategy, mp_policy=policy)
    return fully_shard(model, strategy=strategy, mp_policy=policy)


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5, fused=kind == "adamw-fused")


def _tokens(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (2, 9), generator=generator)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = _tokens(step)
        logits = model(tokens[:, :-1]).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _run_and_save(
    root: Path, kind: str, strategy: str, policy: MixedPrecisionPolicy
) -> tuple[dict[str, object], torch.Tensor, list[float], dict[str, object]]:
    model = _build(0, strategy, policy)
    optimizer = _optimizer(kind, model)
    _train(model, optimizer, range(2))
    save(root, step=2, model=model, optimizer=optimizer)
    saved = full_state(model, optimizer)
    with torch.no_grad():
        logits = model(_tokens(9))
    losses = _train(model, optimizer, range(2, 3))
    return saved, logits, losses, full_state(model, optimizer)


def _resume(
    root: Path, kind: str, strategy: str, policy: MixedPrecisionPolicy
) -> tuple[dict[str, object], torch.Tensor, list[float], dict[str, object]]:
    model = _build(1, strategy, policy)
    optimizer = _optimizer(kind, model)
    with torch.no_grad():
        # Leaves compute weights of the fresh model wherever the engine keeps some.
        model(_tokens(9))
    load(root, model=model, optimizer=optimizer)
    loaded = full_state(model, optimizer)
    with torch.no_grad():
        logits = model(_tokens(9))
    losses = _train(model, optimizer, range(2, 3))
    return loaded, logits, losses, full_state(model, optimizer)


@pytest.mark.parametrize(
    ("kind", "strategy", "policy"),
    [
        ("adamw", "optim_grads_params", MixedPrecisionPolicy()),
        ("adamw-fused", "optim_grads_params", BF16),
        ("sgd", "no_shard", BF16),
    ],
    ids=["adamw", "fused-bf16", "sgd-no_shard-bf16"],
)
def test_a_resumed_run_equals_one_that_never_stopped(
    ranks: Ranks, tmp_path: Path, kind: str, strategy: str, policy: MixedPrecisionPolicy
) -> None:
    """State, logits right after the load, and the next step are equal bit by bit."""
    going = ranks(2).run(_run_and_save, tmp_path, kind, strategy, policy)
    resumed = ranks(2).run(_resume, tmp_path, kind, strategy, policy)
    for went, came in zip(going, resumed, strict=True):
        assert differences(went[0], came[0]) == []
        assert torch.equal(went[1], came[1])
        assert went[2] == came[2]
        assert differences(went[3], came[3]) == []
        assert differences(went[0], went[3]) != []


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(1, "optim_grads_params"), (3, "optim_grads_params"), (2, "no_shard")],
)
def test_any_world_and_strategy_loads_the_same_state(
    ranks: Ranks, tmp_path: Path, world_size: int, strategy: str
) -> None:
    """Two ZeRO-3 ranks save; other rank counts and strategies hold the same tensors, and go on."""
    saved = ranks(2).run(
        _run_and_save, tmp_path, "adamw-fused", "optim_grads_params", MixedPrecisionPolicy()
    )[0][0]
    resumed = ranks(world_size).run(
        _resume, tmp_path, "adamw-fused", strategy, MixedPrecisionPolicy()
    )
    for loaded, _, losses, _ in resumed:
        assert differences(saved, loaded) == []
        assert all(loss > 0 for loss in losses)


def _finetune(root: Path, strategy: str) -> tuple[list[float], dict[str, object], list[str]]:
    """Load the weights alone where others were gathered; also list stale compute weights."""
    model = _build(1, strategy, BF16)
    with torch.no_grad():
        model(_tokens(9))
    optimizer = _optimizer("adamw-fused", model)
    load(root, model=model)
    odd = []
    mains = {name: full_tensor(p).bfloat16() for name, p in model.named_parameters()}
    for unit in (*model.blocks, model):
        unit.unshard()
    for name, parameter in model.named_parameters():
        assert not isinstance(parameter, DTensor)
        odd += [name] if not torch.equal(parameter, mains[name]) else []
    for unit in (*model.blocks, model):
        unit.reshard()
    return _train(model, optimizer, range(2)), full_state(model, optimizer), odd


def _begin_with(weights: dict[str, torch.Tensor], strategy: str) -> tuple[list[float], object]:
    """Train a model that had these weights before it was cut."""
    model = _Language()
    model.load_state_dict(weights)
    for block in model.blocks:
        fully_shard(block, strategy=strategy, mp_policy=BF16)
    fully_shard(model, strategy=strategy, mp_policy=BF16)
    optimizer = _optimizer("adamw-fused", model)
    return _train(model, optimizer, range(2)), full_state(model, optimizer)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads", "optim", "no_shard"])
def test_weights_alone_begin_a_run_as_if_they_had_been_there(
    ranks: Ranks, tmp_path: Path, strategy: str
) -> None:
    """Right after the load compute weights are the cast main weights; two steps are equal."""
    saved = ranks(2).run(_run_and_save, tmp_path, "adamw-fused", "optim_grads_params", BF16)[0][0]
    names = _Language().state_dict().keys()
    weights = {name: saved[name] for name in names}
    loaded = ranks(2).run(_finetune, tmp_path, strategy)
    for (losses, state, odd), (wanted, state_of_start) in zip(
        loaded, ranks(2).run(_begin_with, weights, strategy), strict=True
    ):
        assert odd == []
        assert losses == wanted
        assert differences(state, state_of_start) == []


def _states_without_a_step(root: Path) -> tuple[list[str], list[bool]]:
    model = _build(0, "optim_grads_params", MixedPrecisionPolicy())
    optimizer = _optimizer("adamw-fused", model)
    steps = []
    optimizer.register_step_pre_hook(lambda *unused: steps.append("stepped"))
    identities = [id(parameter) for parameter in model.parameters()]
    load(root, model=model, optimizer=optimizer)
    assert identities == [id(parameter) for parameter in model.parameters()]
    cut_alike = [
        isinstance(parameter, UnevenDTensor) and values["exp_avg"].layout == parameter.layout
        for parameter, values in optimizer.state.items()
    ]
    return steps, cut_alike


def test_states_are_made_without_a_step_and_cut_like_their_parameters(
    ranks: Ranks, tmp_path: Path
) -> None:
    """A fresh optimizer receives uneven states; no step is taken and no parameter replaced."""
    arguments = ("adamw-fused", "optim_grads_params", MixedPrecisionPolicy())
    ranks(2).run(_run_and_save, tmp_path, *arguments)
    for steps, cut_alike in ranks(3).run(_states_without_a_step, tmp_path):
        assert steps == []
        assert len(cut_alike) == 7 and all(cut_alike)


def _save_unsharded(root: Path) -> str:
    model = _build(0, "optim_grads_params", BF16)
    with torch.no_grad():
        model(_tokens(0))
    model.blocks[0].unshard()
    with pytest.raises(CheckpointError) as caught:
        save(root, step=1, model=model)
    model.blocks[0].reshard()
    save(root, step=1, model=model)
    return str(caught.value)


def test_compute_weights_are_never_saved_for_main_weights(ranks: Ranks, tmp_path: Path) -> None:
    """A unit that shows gathered weights is refused by name."""
    for message in ranks(2).run(_save_unsharded, tmp_path):
        assert "unit 'blocks.0'" in message


def _many_tensors(root: Path) -> int:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    fill(model)
    fully_shard(model)
    save(root, step=1, model=model)
    with torch.no_grad():
        for parameter in model.parameters():
            local_tensor(parameter).zero_()
    mark_main_weights_changed(model)
    load(root, model=model)
    plain = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    fill(plain)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return sum(torch.equal(p.full_tensor(), q) for p, q in pairs)


def test_more_ranks_than_rows_round_trips(ranks: Ranks, tmp_path: Path) -> None:
    """Four ranks that share three rows a tensor save and load them all."""
    assert ranks(4).run(_many_tensors, tmp_path) == [8] * 4
