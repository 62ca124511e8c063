"""Recomputing activations changes what is stored and run, and no bit of a loss or gradient."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megafsdp import fully_shard_model
from megafsdp.buffer.comm.collectives import CollectiveRecord, record_collectives
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.errors import ConfigError
from megafsdp.models import (
    ActivationCheckpointing,
    LanguageModel,
    ModelConfig,
    build_model,
    presets,
    unit_classes,
)
from tests.ranks import Ranks

NUM_LAYERS = 3
NUM_TOKENS = 10
NONE = ActivationCheckpointing()
FULL = ActivationCheckpointing("full")
REENTRANT = ActivationCheckpointing("full", use_reentrant=True)
SELECTIVE = ActivationCheckpointing("selective")
CHOICES = [FULL, REENTRANT, ActivationCheckpointing("full", every=2), SELECTIVE]
ARCHITECTURES = ["gpt-toy", "qwen3-toy"]


def tiny(preset: str) -> ModelConfig:
    """Return a tiny model of a preset's architecture."""
    return dataclasses.replace(
        presets[preset],
        num_layers=NUM_LAYERS,
        hidden_size=24,
        num_attention_heads=4,
        num_query_groups=4 if preset == "gpt-toy" else 2,
        head_dim=6,
        ffn_hidden_size=40,
        vocab_size=53,
        max_sequence_length=NUM_TOKENS,
    )


def batch(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return seeded tokens and labels."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 53, (num_rows, NUM_TOKENS + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter's gradient and remove it."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Assert equal names and equal bits."""
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.equal(got[name], gradient), name


def assert_identical(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Assert equal names and equal bits, on gradients that are not zero."""
    assert_equal(got, wanted)
    assert all(gradient.abs().sum() > 0 for gradient in wanted.values())


class _ForwardCounts:
    """Counts how often each layer's forward is entered."""

    def __init__(self, model: LanguageModel) -> None:
        self.counts = [0] * NUM_LAYERS
        for index, layer in enumerate(model.decoder.layers):
            layer.input_layernorm.register_forward_pre_hook(lambda *_, i=index: self._add(i))

    def _add(self, index: int) -> None:
        self.counts[index] += 1


class _OpCounts(TorchDispatchMode):
    """Counts the operators that reach a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("preset", ARCHITECTURES)
def test_loss_and_gradients_keep_every_bit(preset: str, choice: ActivationCheckpointing) -> None:
    """Chosen layers run twice, the others once, and the numbers are those of no checkpointing."""
    model = build_model(tiny(preset), seed=0)
    wanted = model(*batch(2))
    wanted.backward()
    wanted_gradients = gradients(model)
    runs = _ForwardCounts(model)
    model.activation_checkpointing = choice
    loss = model(*batch(2))
    assert runs.counts == [1] * NUM_LAYERS
    loss.backward()
    assert torch.equal(loss, wanted)
    assert_identical(gradients(model), wanted_gradients)
    assert runs.counts == [2 if i % choice.every == 0 else 1 for i in range(NUM_LAYERS)]


def _saved_nbytes(choice: ActivationCheckpointing) -> int:
    """Return the bytes that autograd saves in forward, outside the layers that run again."""
    model = build_model(tiny("qwen3-toy"), seed=0)
    model.activation_checkpointing = choice
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*batch(2))
    return sum(sizes)


def test_fewer_activations_are_saved() -> None:
    """Every layer that is checkpointed saves little more than its input."""
    everything = _saved_nbytes(NONE)
    full = _saved_nbytes(FULL)
    input_nbytes = 4 * 2 * NUM_TOKENS * 24
    assert _saved_nbytes(ActivationCheckpointing("none", every=2)) == everything
    assert full < _saved_nbytes(ActivationCheckpointing("full", every=2)) < everything
    assert everything - full > NUM_LAYERS * 10 * input_nbytes


@pytest.mark.parametrize(
    ("preset", "activation", "num_linear_maps", "product"),
    [
        ("qwen3-toy", "silu", 4, "mm"),
        ("gpt-toy", "gelu", 4, "addmm"),
        # Both of a layer's; the weighted sum after them needs the last one's output.
        ("qwen3-moe-toy", "silu", 3, "_grouped_mm"),
    ],
)
def test_selective_repeats_cheap_operators_only(
    preset: str, activation: str, num_linear_maps: int, product: str
) -> None:
    """Products with weights and attention run as often as with none, the rest once more."""
    found = {}
    for choice in (NONE, FULL, SELECTIVE):
        model = build_model(tiny(preset), seed=0)
        model.activation_checkpointing = choice
        with _OpCounts() as made:
            model(*batch(2)).backward()
        attentions = sum(
            n
            for name, n in made.counts.items()
            if name.startswith("_scaled_dot_product") and not name.endswith("backward")
        )
        found[choice.mode] = (made.counts[activation], made.counts[product], attentions)
    activations, products, attentions = found["none"]
    assert (activations, attentions) == (NUM_LAYERS, NUM_LAYERS)
    assert found["selective"] == (2 * activations, products, attentions)
    # A layer's last map is not needed again by its own backward, so it need not run again.
    repeated = NUM_LAYERS * (num_linear_maps - 1)
    assert found["full"] == (2 * activations, products + repeated, 2 * attentions)


class _Scaled(torch.autograd.Function):
    """A square matrix by itself, in 8-bit floats by an operator of torch; no true gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, operator: str) -> torch.Tensor:
        codes, scale, whole = x.to(torch.float8_e4m3fn), torch.ones(1, 1), F.ScalingType.TensorWise
        if operator == "_scaled_mm":
            return torch._scaled_mm(codes, codes.t(), scale, scale, out_dtype=x.dtype)
        return F.scaled_mm(codes, codes.t(), scale, whole, scale, whole, output_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


@pytest.mark.parametrize("operator", ["_scaled_mm", "_scaled_mm_v2"])
def test_selective_keeps_products_of_8_bit_floats(operator: str) -> None:
    """Of both operators of torch; without values, as CPUs lack one of them before 2.13."""
    layer = nn.Linear(1, 1)
    layer.forward = lambda x: F.silu(_Scaled.apply(x, operator)).square()
    with FakeTensorMode(), _OpCounts() as made:
        x = torch.ones(32, 32, dtype=torch.bfloat16, requires_grad=True)
        SELECTIVE.run_layer(layer, 0, x).sum().backward()
    assert (made.counts["silu"], made.counts[operator]) == (2, 1)


@pytest.mark.parametrize("choice", [FULL, REENTRANT, SELECTIVE], ids=str)
def test_random_numbers_are_drawn_alike_again(choice: ActivationCheckpointing) -> None:
    """Dropout in a layer drops the same elements in the recomputation."""
    found = []
    for each in (NONE, choice):
        model = build_model(tiny("qwen3-toy"), seed=0)
        for layer in model.decoder.layers:
            layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.5))
        model.activation_checkpointing = each
        torch.manual_seed(3)
        loss = model(*batch(2))
        loss.backward()
        found.append((loss.detach(), gradients(model), torch.get_rng_state()))
    (wanted, wanted_gradients, wanted_state), (loss, got, state) = found
    assert torch.equal(loss, wanted)
    assert_identical(got, wanted_gradients)
    assert torch.equal(state, wanted_state)


@pytest.mark.parametrize("choice", [FULL, SELECTIVE], ids=str)
def test_nothing_is_prepared_without_a_graph(
    choice: ActivationCheckpointing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluation runs the layers plainly."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("checkpointed without a graph")

    monkeypatch.setattr("megafsdp.models.activation_checkpointing.checkpoint", refuse)
    model = build_model(tiny("qwen3-toy"), seed=0)
    with torch.no_grad():
        wanted = model(*batch(2))
        model.activation_checkpointing = choice
        assert torch.equal(model(*batch(2)), wanted)
    with pytest.raises(AssertionError, match="without a graph"):
        model(*batch(2))


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_names_stay(choice: ActivationCheckpointing) -> None:
    """No prefix comes into the names of parameters, modules or the state dict."""
    plain, chosen = (build_model(tiny("gpt-toy"), seed=0) for _ in range(2))
    chosen.activation_checkpointing = choice
    assert list(chosen.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in chosen.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in chosen.named_modules()] == [n for n, _ in plain.named_modules()]


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"mode": "some"}, "activation_checkpointing.mode"),
        ({"mode": "full", "every": 0}, "activation_checkpointing.every"),
        ({"mode": "selective", "use_reentrant": True}, "use_reentrant false with mode selective"),
    ],
)
def test_choice_without_a_meaning_is_refused(values: dict[str, object], what: str) -> None:
    """The message names the field."""
    with pytest.raises(ConfigError, match=what):
        ActivationCheckpointing(**values)


def _sharded_pass(
    model: LanguageModel, choice: ActivationCheckpointing
) -> tuple[torch.Tensor, dict[str, torch.Tensor], CollectiveRecord]:
    model.activation_checkpointing = choice
    rank = dist.get_rank()
    tokens, labels = batch(2 * dist.get_world_size())
    rows = slice(2 * rank, 2 * rank + 2)
    with record_collectives() as record:
        loss = model(tokens[rows], labels[rows])
        loss.backward()
    # A rank's rows, cloned: what clears gradients releases their memory.
    found = {n: local_tensor(gradient).clone() for n, gradient in gradients(model).items()}
    return loss.detach(), found, record


def _sharded(preset: str, choice: ActivationCheckpointing, strategy: str) -> None:
    config = tiny(preset)
    model = build_model(config, seed=0)
    keys = list(model.state_dict())
    fully_shard_model(model, unit_classes(config), strategy=strategy)
    # The first pass records the order that the second one is prefetched in.
    _sharded_pass(model, NONE)
    wanted, wanted_gradients, wanted_record = _sharded_pass(model, NONE)
    sums = torch.stack([gradient.abs().sum() for gradient in wanted_gradients.values()])
    dist.all_reduce(sums)
    assert (sums > 0).all(), "of no parameter are all rows zero on all ranks"
    runs = _ForwardCounts(model)
    for _ in range(2):
        loss, got, record = _sharded_pass(model, choice)
        assert torch.equal(loss, wanted)
        assert_equal(got, wanted_gradients)
        calls = wanted_record.calls.copy()
        if choice.use_reentrant and strategy == "optim_grads_params":
            # Without a graph in forward the last layer cannot know that backward needs it at once.
            calls["all_gather"] += 1
        assert record.calls == calls
    assert runs.counts == [4 if i % choice.every == 0 else 2 for i in range(NUM_LAYERS)]
    assert list(model.state_dict()) == keys
    if not choice.use_reentrant:
        assert record.events == wanted_record.events
    if strategy == "optim_grads_params":
        # Root and last layer keep their parameters; the other layers are gathered twice.
        assert wanted_record.calls["all_gather"] == 2 * (NUM_LAYERS + 1) - 2


@pytest.mark.parametrize(
    ("preset", "choice"),
    [
        pytest.param(
            preset, choice, marks=() if (i + k) % 2 == 0 else pytest.mark.matrix("recomputation")
        )
        for i, preset in enumerate(ARCHITECTURES)
        for k, choice in enumerate(CHOICES)
    ],
    ids=str,
)
def test_sharded_layers_are_gathered_once_for_both(
    ranks: Ranks, preset: str, choice: ActivationCheckpointing
) -> None:
    """Sharded, too, no bit changes, and one gather serves recomputation and backward."""
    ranks(2).run(_sharded, preset, choice, "optim_grads_params")


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_every_strategy_recomputes(ranks: Ranks, strategy: str) -> None:
    """Compute weights that stay in full are read again where they are."""
    ranks(2).run(_sharded, "qwen3-toy", SELECTIVE, strategy)
