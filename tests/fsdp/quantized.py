"""A network whose linears a recipe quantizes, and its oracle: plain torch in one process."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from megafsdp import MixedPrecisionPolicy, full_state_dict, fully_shard_model
from megafsdp.quantize import RECIPE_NAMES, QuantizationRecipe, recipe_of
from megafsdp.quantize.delayed import DelayedState
from megafsdp.quantize.tensor import QuantizedTensor
from megafsdp.quantize.tiles import Fragment

WIDTH, INNER, CLASSES, TOKENS = 64, 160, 5, 8
NUM_BLOCKS = 2
RECIPES = RECIPE_NAMES
OPERANDS = ("weights", "all")


class Block(nn.Module):
    """A residual MLP; two ranks cut its matrices inside of tiles of all formats."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the MLP of its norm."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, a linear of odd sizes that few formats take, and a loss."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the squared logits less one."""
        for block in self.blocks:
            x = block(x)
        return (self.head(x).float() - 1).square().mean()


def recipe_for(name: str, operands: str) -> QuantizationRecipe:
    """Return a recipe that rounds nothing by chance, which ranks and one process draw apart."""
    recipe = recipe_of(name, quantize_activations=operands == "all")
    return dataclasses.replace(recipe, has_stochastic_rounding=False)


def policy_for(recipe: QuantizationRecipe | str | None, **options: Any) -> MixedPrecisionPolicy:
    """Return a policy of bf16 with a recipe."""
    return MixedPrecisionPolicy(torch.bfloat16, recipe=recipe, **options)


def shard(
    net: nn.Module, policy: MixedPrecisionPolicy, kind: type[nn.Module] = Block, **options: Any
) -> nn.Module:
    """Make each block, or module of another kind, and the net a unit."""
    return fully_shard_model(net, [kind], mp_policy=policy, **options)


def options_of(layout: str) -> dict[str, Any]:
    """Return the options of fully_shard of a name such as ``hfsdp 1x2`` or ``zero3 keep``."""
    kind, *more = layout.split()
    if kind in ("hsdp", "hfsdp"):
        outer, inner = map(int, more[0].split("x"))
        mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("outer", "inner"))
        return {"mesh": mesh, "outer_strategy": "no_shard" if kind == "hsdp" else "optim"}
    choices: dict[str, Any] = {"keep": False, "free": True, "neighbours": 2}
    reshard = choices[more[0]] if more else None
    return {"strategy": int(kind.removeprefix("zero")), "reshard_after_forward": reshard}


def batch(step: int, microbatch: int, rank: int) -> Tensor:
    """Return the inputs of one microbatch of one rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    return torch.randn(TOKENS, WIDTH, generator=generator)


def maxima_of(values: Tensor, recipe: QuantizationRecipe) -> Tensor:
    """Return the bits of the largest magnitudes of a whole weight's tiles."""
    shape = tuple(values.shape)
    maxima = torch.zeros(recipe.weight.num_maxima(shape), dtype=torch.int32)
    recipe.weight.add_maxima([Fragment(values.detach().reshape(-1), shape, 0)], [maxima])
    return maxima


def quantize(
    values: Tensor,
    recipe: QuantizationRecipe,
    state: DelayedState | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> QuantizedTensor:
    """Quantize a whole weight in one process."""
    shape, form = tuple(values.shape), recipe.weight
    maxima = maxima_of(values, recipe) if state is None else state.weight_maximum()
    table = torch.zeros(form.table_nbytes(shape), dtype=torch.uint8)
    codes = torch.zeros(values.numel() // form.codes_per_byte, dtype=torch.uint8)
    form.fill_tables([shape], [maxima], [table])
    form.encode([Fragment(values.detach().reshape(-1), shape, 0)], [maxima], [codes])
    return QuantizedTensor(codes, table, recipe=recipe, shape=shape, dtype=dtype, state=state)


class _AsCodes(torch.autograd.Function):
    """A weight as its codes; the gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, layer: QuantizingLinear) -> Tensor:
        return quantize(weight, layer.recipe, layer.state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class QuantizingLinear(nn.Linear):
    """A linear that quantizes its own whole weight in each forward."""

    recipe: QuantizationRecipe
    state: DelayedState | None

    def forward(self, x: Tensor) -> Tensor:
        """Map x by the recipe."""
        return F.linear(x, _AsCodes.apply(self.weight, self), self.bias)


def quantize_layers(net: nn.Module, recipe: QuantizationRecipe) -> nn.Module:
    """Let the linears of a net quantize their own weights, where the format takes them."""
    for layer in list(net.modules()):
        if type(layer) is nn.Linear and recipe.weight.reason_against(layer.weight.shape) is None:
            layer.__class__ = QuantizingLinear
            layer.recipe = recipe
            layer.state = DelayedState(recipe.history) if recipe.history else None
    return net


def roll_layers(net: nn.Module, weights: dict[str, Tensor]) -> None:
    """Begin a step of delayed scaling: roll each layer's histories, as all ranks together do."""
    for name, layer in net.named_modules():
        state = getattr(layer, "state", None)
        if isinstance(state, DelayedState):
            pending = state.pending().clone()
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(pending, op=dist.ReduceOp.MAX)
            values = weights[f"{name}.weight"].to(torch.bfloat16)
            state.roll(maxima_of(values, layer.recipe), pending)


def optimizer_of(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer whose steps are large enough to change codes."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5, foreach=True)


@functools.cache
def trained_alone(
    name: str, operands: str, num_steps: int, num_ranks: int, num_microbatches: int
) -> dict[str, Tensor]:
    """Return the main weights of one process that runs all ranks' microbatches.

    Weights are cast to bf16, and quantized whole. Gradients are bf16, and summed in fp32.
    """
    recipe = recipe_for(name, operands)
    net = quantize_layers(Net(), recipe)
    main = {n: nn.Parameter(p.detach().clone()) for n, p in net.named_parameters()}
    optimizer = optimizer_of(list(main.values()))
    compute = copy.deepcopy(net).bfloat16()
    for step in range(num_steps):
        with torch.no_grad():
            for n, p in compute.named_parameters():
                p.copy_(main[n])
        roll_layers(compute, main)
        sums = {n: torch.zeros_like(p) for n, p in main.items()}
        for microbatch in range(num_microbatches):
            for rank in range(num_ranks):
                compute.zero_grad()
                x = batch(step, microbatch, rank).bfloat16()
                (compute(x) / num_microbatches).backward()
                for n, p in compute.named_parameters():
                    sums[n] += p.grad.float() / num_ranks
        for n, p in main.items():
            p.grad = sums[n]
        optimizer.step()
    return {n: p.detach() for n, p in main.items()}


def train(
    net: nn.Module, num_steps: int, num_microbatches: int = 1, first_step: int = 0
) -> dict[str, Tensor]:
    """Train a sharded net on this rank's batches; return its whole main weights."""
    optimizer = optimizer_of(list(net.parameters()))
    for step in range(first_step, first_step + num_steps):
        for microbatch in range(num_microbatches):
            x = batch(step, microbatch, dist.get_rank())
            (net(x) / num_microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(net)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Assert that two states are equal, bit by bit, and no longer what they were."""
    initial = dict(Net().named_parameters())
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
        assert not torch.equal(tensor, initial[name].detach()), f"{name} was trained"


def quantized_parameters(net: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return (group, record) of each quantized parameter by FQN."""
    units = {n: m._fsdp_unit() for n, m in net.named_modules() if hasattr(m, "_fsdp_unit")}
    return {
        f"{prefix}.{record.name}".lstrip("."): (group, record)
        for prefix, unit in units.items()
        for group in unit.groups
        if group.quantization is not None
        for record in group.parameters
    }
