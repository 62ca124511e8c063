"""Linears on quantized weights: every product against operands that are quantized by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megafsdp.device.torch_private import preserving_versions
from megafsdp.models.activation_checkpointing import ActivationCheckpointing
from megafsdp.parallel import GroupedLinear, Linear
from megafsdp.parallel import experts as experts_module
from megafsdp.quantize.delayed import GRAD, INPUT
from megafsdp.quantize.hadamard import transform_tokens
from megafsdp.quantize.input_formats import ALONG_FEATURES, InputFormat
from megafsdp.quantize.recipes import RECIPE_NAMES, QuantizationRecipe
from megafsdp.quantize.rounding import Noise, draw_seed
from megafsdp.quantize.tensor import QuantizedTensor
from tests.quantize.weights import quantized, refill

# The tracer asks every input for .grad, and torch warns where it is not a leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

BF16 = torch.bfloat16
BLOCK_RECIPES = ("fp8_block", "mxfp8", "nvfp4")


def _drawn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    # Columns and rows of several magnitudes: a scale that is another's shows.
    values *= torch.linspace(0.25, 4, shape[-1])
    return values.to(dtype)


def _gradients(y: Tensor, grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, inputs, grad))


def _by_features(form: InputFormat, rows: Tensor, noise: Tensor | None = None) -> Tensor:
    """Return rows as blocks along features quantize them."""
    coded = form.quantize(rows, along=ALONG_FEATURES, noise=noise)
    return coded.dequantize(rows.dtype if rows.dtype != torch.float32 else BF16)


def _by_tokens(form: InputFormat, rows: Tensor, noise: Tensor | None = None) -> Tensor:
    """Return the same along tokens: of the transpose along features, whatever lays blocks.

    Contiguous: how a product of bf16 is rounded depends on its operands' strides on some CPUs.
    """
    noise = None if noise is None else noise.t().contiguous()
    return _by_features(form, rows.t().contiguous(), noise).t().contiguous()


def _naive(
    recipe: QuantizationRecipe, x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, seed: int
) -> list[Tensor]:
    """Return output and gradients of x, weight and bias, of 2-D operands quantized one by one."""
    assert recipe.input is not None and recipe.grad is not None
    x_t, grad_t, noise, noise_t = x, grad, None, None
    if recipe.has_hadamard:
        x_t, grad_t = transform_tokens(x), transform_tokens(grad)
    if recipe.has_stochastic_rounding:
        noise = Noise(seed, 1).uniform(grad.shape, grad.device)
        noise_t = Noise(seed, 0).uniform(grad_t.shape, grad.device)
    y = F.linear(_by_features(recipe.input, x), weight, bias)
    grad_x = _by_features(recipe.grad, grad, noise).mm(weight)
    grad_weight = _by_tokens(recipe.grad, grad_t, noise_t).t().mm(_by_tokens(recipe.input, x_t))
    return [y, grad_x, grad_weight, grad.sum(0)]


@pytest.mark.parametrize("num_tokens", [1, 40, 160])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_every_product_is_that_of_quantized_operands(recipe: str, num_tokens: int) -> None:
    """Bit for bit, also where tokens are no multiple of a block; the bias's gradient is exact."""
    weight = quantized(_drawn(96, 64, seed=1), recipe)
    bias = _drawn(96, seed=2).requires_grad_()
    x, grad = _drawn(num_tokens, 64).requires_grad_(), _drawn(num_tokens, 96, seed=3)
    y = F.linear(x, weight, bias)
    torch.manual_seed(5)
    seed = draw_seed()
    torch.manual_seed(5)
    found = [y, *_gradients(y, grad, x, weight, bias)]
    wanted = _naive(weight.recipe, x.detach(), weight.decode(), bias.detach(), grad, seed)
    for name, got, want in zip(("y", "gx", "gw", "gb"), found, wanted, strict=True):
        assert got.dtype == BF16 and torch.equal(got, want), name
    # Not the plain linear's: something was quantized.
    plain = F.linear(x, weight.decode(), bias)
    assert not torch.equal(y, plain) and (y - plain).norm() < 0.2 * plain.norm()


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_weights_alone_are_decoded(recipe: str) -> None:
    """Output and gradients are those of torch's linear on the decoded weight, bit for bit."""
    weight = quantized(_drawn(96, 64, seed=1), recipe, quantize_activations=False)
    plain, bias = nn.Parameter(weight.decode()), _drawn(96, seed=2).requires_grad_()
    x, grad = _drawn(2, 20, 64).requires_grad_(), _drawn(2, 20, 96, seed=3)
    results = []
    for each in (weight, plain):
        y = F.linear(x, each, bias)
        results.append([y, *_gradients(y, grad, x, each, bias)])
    assert all(map(torch.equal, *results))
    assert not torch.equal(plain, _drawn(96, 64, seed=1))


@pytest.mark.parametrize("quantize_activations", [False, True])
@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (2, 1, 3), (0,), (2, 0)], ids=str)
def test_inputs_have_any_dimensions_before_the_last(
    leading: tuple[int, ...], quantize_activations: bool
) -> None:
    """They are rows of one matrix; an empty batch gives an empty output and gradients of zeros."""
    weight = quantized(_drawn(96, 64), "mxfp8", quantize_activations=quantize_activations)
    bias = _drawn(96, seed=2).requires_grad_()
    x = _drawn(*leading, 64).requires_grad_()
    y = F.linear(x, weight, bias)
    grad_x, grad_weight, grad_bias = _gradients(y, torch.ones_like(y), x, weight, bias)
    assert y.shape == (*leading, 96) and grad_x.shape == x.shape
    assert (grad_weight.shape, grad_bias.shape) == ((96, 64), (96,))
    if x.numel():
        rows = F.linear(x.reshape(-1, 64), weight, bias)
        assert torch.equal(y.reshape(-1, 96), rows)
    else:
        assert not grad_weight.any() and not grad_bias.any()


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_gradients_of_views_and_expanded_tensors_are_taken(recipe: str) -> None:
    """A transposed input and the gradient of a sum give what contiguous ones give."""
    weight = quantized(_drawn(96, 64), recipe)
    wide = _drawn(64, 40)
    results = []
    for x in (wide.t(), wide.t().contiguous()):
        x = x.detach().requires_grad_()
        y = F.linear(x, weight)
        torch.manual_seed(0)
        grad = torch.ones(1, 1, dtype=BF16).expand(40, 96)
        if x.is_contiguous():
            grad = grad.contiguous()
        results.append([y, *_gradients(y, grad, x, weight)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("quantize_activations", [False, True])
@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)])
def test_only_gradients_that_are_asked_for_are_made(
    needed: tuple[bool, bool], quantize_activations: bool
) -> None:
    """Of a frozen weight, and of an input that is data; a frozen weight saves nothing."""
    weight = quantized(_drawn(96, 64), "nvfp4", quantize_activations=quantize_activations)
    bias = _drawn(96).requires_grad_()
    x = _drawn(32, 64).requires_grad_(needed[0])
    weight.requires_grad_(needed[1])
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = F.linear(x, weight, bias)
    assert bool(saved) == needed[1]
    y.backward(torch.ones_like(y))
    assert (x.grad is not None, weight.grad is not None) == needed and bias.grad is not None


def _saved_nbytes(weight: nn.Parameter, x: Tensor) -> int:
    found: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: found.append(t.nbytes) or t, lambda t: t
    ):
        F.linear(x, weight)
    return sum(found)


@pytest.mark.parametrize(
    ("recipe", "codes_nbytes", "scales_nbytes"),
    [
        ("fp8_current", 64 * 160, 4),
        ("fp8_delayed", 64 * 160, 4),
        ("fp8_block", 64 * 160, 4 * 64 * 2),
        ("mxfp8", 64 * 160, 64 * 5),
        ("nvfp4", 64 * 160 // 2, 64 * 10 + 4),
    ],
)
def test_codes_of_the_input_are_all_that_is_saved(
    recipe: str, codes_nbytes: int, scales_nbytes: int
) -> None:
    """A byte an element, or half of one, and scales; of weights alone, the input in its dtype."""
    x = _drawn(160, 64).requires_grad_()
    weight = quantized(_drawn(96, 64), recipe)
    assert _saved_nbytes(weight, x) == codes_nbytes + scales_nbytes
    # Nor does the graph keep the input in another way.
    inner = x * 2
    memory = StorageWeakRef(inner.untyped_storage())
    y = F.linear(inner, weight)
    del inner
    assert memory.expired() and y.requires_grad
    alone = quantized(_drawn(96, 64), recipe, quantize_activations=False)
    assert _saved_nbytes(alone, x) == 2 * 64 * 160


@pytest.mark.parametrize("quantize_activations", [False, True])
def test_backward_reads_what_was_gathered_anew(quantize_activations: bool) -> None:
    """A gather puts the count of writes back, and is no error; what it left is what is read."""
    weight = quantized(_drawn(96, 64), "mxfp8", quantize_activations=quantize_activations)
    assert isinstance(weight, QuantizedTensor)
    x, grad = _drawn(32, 64).requires_grad_(), _drawn(32, 96, seed=3)
    before = _gradients(F.linear(x, weight), grad, x, weight)
    y = F.linear(x, weight)
    with preserving_versions(weight.codes, weight.table):
        weight.codes.fill_(0)
        weight.table.fill_(0)
        refill(weight, _drawn(96, 64))
    assert all(map(torch.equal, _gradients(y, grad, x, weight), before))
    y = F.linear(x, weight)
    with preserving_versions(weight.codes, weight.table):
        refill(weight, 2 * _drawn(96, 64))
    assert torch.equal(_gradients(y, grad, x)[0], 2 * before[0])


@pytest.mark.native
@pytest.mark.parametrize("quantize_activations", [False, True])
@pytest.mark.parametrize("shape", [(96, 64), (2, 96, 64)], ids=str)
def test_a_weight_that_changed_before_backward_is_an_error(
    shape: tuple[int, ...], quantize_activations: bool
) -> None:
    """By an encoding or a copy, of a matrix or a stack; the gradient of the weight needs no codes.

    Gradients of another weight than that of forward would be wrong, and nothing would show it.
    """
    weight = quantized(_drawn(*shape), "mxfp8", quantize_activations=quantize_activations)
    assert isinstance(weight, QuantizedTensor)
    experts, x, grad = GroupedLinear(2, 64, 96), _drawn(32, 64), _drawn(32, 96, seed=3)
    experts.weight = weight

    def product(x: Tensor) -> Tensor:
        return F.linear(x, weight) if len(shape) == 2 else experts(x, torch.tensor([20, 12]))

    def changed() -> None:
        refill(weight, 2 * _drawn(*shape))

    def copied() -> None:
        weight.codes.copy_(weight.codes.clone())

    wanted = _gradients(product(x), grad, weight)
    x.requires_grad_()
    for change in (changed, copied):
        y = product(x)
        change()
        with pytest.raises(RuntimeError, match=r"codes at version \d+, .* got .*'layer.weight'"):
            _gradients(y, grad, x)
    y = product(x.detach())
    changed()
    assert torch.equal(_gradients(y, grad, weight)[0], wanted[0])


class _Block(nn.Module):
    """Two linears, of torch and of this package, around dropout and an activation function."""

    def __init__(self, recipe: str, quantize_activations: bool, dropout: float = 0.25) -> None:
        super().__init__()
        self.dropout = dropout
        torch.manual_seed(0)
        self.up = nn.Linear(64, 96)
        self.down = Linear(96, 64, init_std=0.2)
        self.to(BF16)
        for layer in (self.up, self.down):
            made = quantized(
                layer.weight.detach(), recipe, quantize_activations=quantize_activations
            )
            layer.weight = made

    def forward(self, x: Tensor, rotary: Tensor | None = None) -> Tensor:
        """Apply them."""
        return self.down(F.dropout(F.gelu(self.up(x)), self.dropout))


def _trained(block: _Block, call: Callable[..., Tensor]) -> list[Tensor | None]:
    x = _drawn(2, 20, 64, seed=7).requires_grad_()
    torch.manual_seed(3)
    y = call(x)
    y.float().square().mean().backward()
    after = torch.rand(1)
    state = block.up.weight.state
    pending = None if state is None else state.pending()
    return [y.detach(), x.grad, *(p.grad for p in block.parameters()), after, pending]


def _alike(found: list[Any], wanted: list[Any]) -> bool:
    return all(
        want is None if got is None else torch.equal(got, want)
        for got, want in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("quantize_activations", [False, True])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_compiled_and_recomputed_blocks_have_the_same_bits(
    recipe: str, quantize_activations: bool
) -> None:
    """And leave the random state, and the maxima of delayed scaling, as the plain block does."""
    block = _Block(recipe, quantize_activations)
    wanted = _trained(block, block)
    for options in (
        {"mode": "full"},
        {"mode": "full", "use_reentrant": True},
        {"mode": "selective"},
    ):
        block = _Block(recipe, quantize_activations)
        choice = ActivationCheckpointing(**options)
        found = _trained(block, lambda x, b=block, c=choice: c.run_layer(b, 0, x, None))
        assert _alike(found, wanted), options
    # Without dropout, which compiled code draws otherwise.
    torch._dynamo.reset()
    block, compiled = (_Block(recipe, quantize_activations, 0.0) for _ in range(2))
    found = _trained(compiled, torch.compile(compiled, backend="aot_eager"))
    assert _alike(found, _trained(block, block))


@pytest.mark.parametrize("quantize_activations", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_a_compiled_graph_saves_codes(recipe: str, quantize_activations: bool) -> None:
    """Of weight and input, as an eager linear: what forward decodes is not kept for backward."""
    weight = quantized(_drawn(96, 64), recipe, quantize_activations=quantize_activations)
    x = _drawn(160, 64).requires_grad_()
    linear = torch.compile(lambda x: F.linear(x, weight), backend="aot_eager", fullgraph=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x)
    codes = [t.numel() for t in saved if t.dtype == torch.uint8]
    assert 96 * 64 in codes and (160 * 64 in codes) == quantize_activations
    inputs = [] if quantize_activations else [(160, 64)]
    assert [tuple(t.shape) for t in saved if t.dtype == BF16] == inputs


def test_weights_and_blocks_without_state_compile_to_one_graph() -> None:
    """Nothing of a linear that keeps no state from step to step ends a graph."""
    torch._dynamo.reset()
    plain, block = _Block("mxfp8", True, 0.0), _Block("mxfp8", True, 0.0)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert _alike(_trained(block, compiled), _trained(plain, plain))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_a_checkpointed_block_saves_its_input_alone(recipe: str) -> None:
    """Codes are made again in backward, from the same random state."""
    block, saved = _Block(recipe, True), []
    x = _drawn(2, 20, 64).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        checkpoint(block, x, use_reentrant=False)
    assert sum(t.nbytes for t in saved if t.dtype == torch.uint8) == 0


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_weight_may_be_what_is_differentiated_by(is_checkpointed: bool) -> None:
    """It overrides the calls that name it, within which a checkpointed linear runs again."""
    weight, unused = (quantized(_drawn(96, 64), "fp8_current") for _ in range(2))
    x = _drawn(160, 64).requires_grad_()

    def loss() -> Tensor:
        def linear(x: Tensor) -> Tensor:
            return F.linear(x, weight).square()

        y = checkpoint(linear, x, use_reentrant=False) if is_checkpointed else linear(x)
        return y.sum()

    loss().backward()
    wanted = (x.grad, weight.grad)
    weight.grad = None
    assert all(map(torch.equal, torch.autograd.grad(loss(), (x, weight)), wanted))
    for inputs in (weight, [weight]):
        loss().backward(inputs=inputs)
    assert torch.equal(weight.grad, wanted[1] * 2) and torch.equal(x.grad, wanted[0])
    both = [weight, unused]
    (got, none), (again, zero) = (
        torch.autograd.grad(loss(), both, **options)
        for options in ({"allow_unused": True}, {"materialize_grads": True})
    )
    assert torch.equal(got, wanted[1]) and torch.equal(again, wanted[1])
    assert none is None and torch.equal(zero, torch.zeros(96, 64, dtype=BF16))
    with pytest.raises(RuntimeError, match=r"appears? to not have been used"):
        torch.autograd.grad(loss(), both)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(loss(), unused.requires_grad_(False))


def test_a_matrix_of_a_stack_may_be_what_is_differentiated_by() -> None:
    """As for other tensors that are no parameters, the gradient is kept on it."""
    stack, wanted = (quantized(_drawn(3, 96, 64), "fp8_current") for _ in range(2))
    matrix, x = stack[1], _drawn(160, 64)
    F.linear(x, matrix).square().sum().backward(inputs=[matrix])
    F.linear(x, wanted[1]).square().sum().backward()
    assert stack.grad is None and torch.equal(matrix.grad, wanted.grad[1])


@pytest.mark.parametrize("quantize_activations", [False, True])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_gradients_of_gradients_are_refused(recipe: str, quantize_activations: bool) -> None:
    """Also where the gradient that enters backward has no graph; a backward without one works."""
    weight = quantized(_drawn(96, 64), recipe, quantize_activations=quantize_activations)
    x = _drawn(160, 64).requires_grad_()
    y = F.linear(x, weight).square().sum()
    for loss in (y, F.linear(x, weight).sum()):
        with pytest.raises(NotImplementedError, match="name the layer in keep_unquantized"):
            torch.autograd.grad(loss, x, create_graph=True)
    y = F.linear(x, weight).square().sum()
    assert torch.autograd.grad(y, x)[0].any()


@pytest.mark.parametrize("quantize_activations", [False, True])
def test_autocast_casts_as_for_torchs_linear(quantize_activations: bool) -> None:
    """Inputs and biases in fp32 are cast, and gradients come back in fp32."""
    weight = quantized(
        _drawn(96, 64), "mxfp8", dtype=torch.float32, quantize_activations=quantize_activations
    )
    bias = _drawn(96, dtype=torch.float32).requires_grad_()
    x = _drawn(32, 64, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=BF16):
        y = F.linear(x, weight, bias)
        # torch leaves fp64 as it is, and then has operands of two dtypes.
        with pytest.raises(RuntimeError, match="dtype"):
            F.linear(x.double(), weight)
        with pytest.raises(RuntimeError, match="dtype"):
            F.linear(x.double(), weight.decode())
    assert y.dtype == BF16
    y.backward(torch.ones_like(y))
    assert x.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32
    same = quantized(_drawn(96, 64), "mxfp8", quantize_activations=quantize_activations)
    assert torch.equal(y, F.linear(x.to(BF16), same, bias.to(BF16)))


def test_operands_of_two_dtypes_are_torchs_error() -> None:
    """Nothing is cast where torch would not."""
    weight = quantized(_drawn(96, 64), "mxfp8")
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(_drawn(4, 64, dtype=torch.float32), weight)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_values_that_are_not_finite_give_nan(recipe: str, value: float) -> None:
    """In the input, the gradient and the weight; never a finite number that stands for them."""
    weight = quantized(_drawn(96, 64), recipe)
    if weight.state is not None:
        bits = torch.tensor([3.0]).view(torch.int32)
        weight.state.roll(bits, bits.expand(2))
    x, grad = _drawn(48, 64), _drawn(48, 96, seed=3)
    bad_x, bad_grad = x.clone(), grad.clone()
    bad_x[5, 7] = bad_grad[5, 7] = value
    bad_x.requires_grad_()
    y = F.linear(bad_x, weight)
    assert y[5].isnan().all() and not (y.isinf().any() and value == value)
    assert _gradients(y, grad, weight)[0][:, 7].isnan().all()
    x.requires_grad_()
    grad_x, grad_weight = _gradients(F.linear(x, weight), bad_grad, x, weight)
    assert grad_x[5].isnan().all() and grad_weight[7].isnan().all()
    wrong = _drawn(96, 64)
    wrong[5, 7] = value
    made = quantized(wrong, recipe)
    assert F.linear(x, made)[:, 5].isnan().all()


def test_delayed_scaling_uses_histories_and_records_maxima() -> None:
    """The first step is scaled by its own maxima, later ones by what was rolled in."""
    weight = quantized(_drawn(96, 64), "fp8_delayed")
    form = weight.recipe.input
    state = weight.state
    assert state is not None and form is not None
    x, grad = _drawn(32, 64).requires_grad_(), _drawn(32, 96, seed=3)
    current = quantized(_drawn(96, 64), "fp8_current")
    y = F.linear(x, weight)
    assert torch.equal(y, F.linear(x, current))
    _gradients(y, grad, x, weight)
    y = F.linear(x / 2, weight)
    assert state.pending().view(torch.float32).tolist() == [
        x.abs().max().item(),
        grad.abs().max().item(),
    ]
    state.roll(torch.ones(1).view(torch.int32), state.pending().clone())
    small = (x / 16).detach().requires_grad_()
    largest = state.maximum_for(INPUT, torch.zeros(1, dtype=torch.int32))
    wanted = form.quantize(small, along=ALONG_FEATURES, maximum=largest)
    y = F.linear(small, weight)
    assert torch.equal(y, F.linear(wanted.dequantize(BF16), weight.decode()))
    assert not torch.equal(y, F.linear(small, current))
    # Larger values than ever are clamped.
    assert torch.equal(F.linear(16 * x, weight)[0] * 0, torch.zeros(96, dtype=BF16))
    assert state.pending()[INPUT].view(torch.float32) == 16 * x.abs().max()
    assert state.pending()[GRAD] == 0


def test_evaluation_records_nothing_and_draws_nothing() -> None:
    """What runs without gradients changes no later step."""
    for recipe in ("fp8_delayed", "nvfp4"):
        weight, x = quantized(_drawn(96, 64), recipe), _drawn(32, 64)
        wanted = F.linear(x, weight)
        before = torch.get_rng_state()
        if weight.state is not None:
            weight.state.pending().zero_()
        with torch.no_grad():
            assert torch.equal(F.linear(x, weight), wanted)
        assert torch.equal(torch.get_rng_state(), before)
        assert weight.state is None or not weight.state.pending().any()


def test_chance_follows_the_random_state() -> None:
    """Equal states round gradients alike, others differently, and forward not at all."""
    weight, x = quantized(_drawn(96, 64), "nvfp4"), _drawn(32, 64).requires_grad_()
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        y = F.linear(x, weight)
        results.append([y, *_gradients(y, _drawn(32, 96, seed=3), x, weight)])
    assert all(map(torch.equal, results[0], results[1]))
    assert [torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True)] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("num_rows", [0, 10])
def test_grouped_products_take_expanded_gradients(num_rows: int) -> None:
    """As the gradient of a sum is, also without rows, by torch's own call."""
    x = _drawn(num_rows, 64).requires_grad_()
    weight = quantized(_drawn(4, 32, 64, seed=1), "mxfp8")
    ends = torch.tensor([0, num_rows, num_rows, num_rows], dtype=torch.int32)
    y = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    wanted = _gradients(y, torch.ones_like(y), x, weight)
    y = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), (x, weight)), wanted))
    y = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    with pytest.raises(NotImplementedError, match="a backward without create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


_LOADS = ([3, 0, 5, 2], [0, 10, 0, 0], [0, 0, 0, 0])


@pytest.mark.parametrize("loads", _LOADS, ids=str)
@pytest.mark.parametrize("in_groups", [True, False])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_experts_decode_their_stack_for_each_product(
    monkeypatch: pytest.MonkeyPatch, recipe: str, in_groups: bool, loads: list[int]
) -> None:
    """Results are those of the decoded stack, which nothing saves; inputs stay as they are."""
    if not in_groups:
        monkeypatch.setattr(experts_module, "reason_for_loop", lambda weight: "a test")
        monkeypatch.setattr(experts_module, "_log_loop", lambda reason: None)
    x, grad = _drawn(sum(loads), 64).requires_grad_(), _drawn(sum(loads), 32, seed=3)
    weight = quantized(_drawn(4, 32, 64, seed=1), recipe)
    layer = GroupedLinear(4, 64, 32)
    results, saved = [], []
    for each in (weight, nn.Parameter(weight.decode())):
        layer.weight = each
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = layer(x, torch.tensor(loads))
        if each is weight:
            assert sum(t.nbytes for t in saved if t.is_floating_point()) <= x.nbytes
        results.append([y, *_gradients(y, grad, x, each)])
    assert all(map(torch.equal, *results))
    layer.weight = weight
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(layer(x, torch.tensor(loads)), results[0][0])
    assert weight.state is None or not weight.state.pending().any()
