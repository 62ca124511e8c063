"""A quantized weight as a tensor: no memory, what stays quantized, what is decoded, what raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

from megafsdp import FusedAdam
from megafsdp.quantize.recipes import RECIPE_NAMES, recipe_of
from megafsdp.quantize.tensor import QuantizedTensor
from tests.quantize.weights import quantized, refill
from tests.ranks import Ranks


def _weight(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _made(recipe: str = "mxfp8", *shape: int) -> QuantizedTensor:
    made = quantized(_weight(*(shape or (64, 32))), recipe)
    assert isinstance(made, QuantizedTensor)
    return made


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_it_has_no_memory_of_its_own(recipe: str) -> None:
    """A Parameter with the shape and dtype it shows, over a storage of no bytes."""
    made = _made(recipe)
    assert isinstance(made, nn.Parameter) and made.requires_grad and made.is_leaf
    assert made.untyped_storage().nbytes() == 0 and made.data_ptr() == 0
    assert made.shape == (64, 32) and made.stride() == (32, 1) and made.dtype == torch.bfloat16
    assert recipe in repr(made) and "layer.weight" in repr(made)


def test_it_shows_what_its_buffers_are_refilled_with() -> None:
    """The object stays; what operators read follows the bytes."""
    made, other = _made(), 100 * _weight(64, 32)
    before = made.decode()
    refill(made, other)
    assert torch.equal(made + 0, quantized(other, "mxfp8").decode())
    assert (made.decode() - other).norm() < 0.05 * other.norm()
    assert not torch.equal(made.decode(), before)


_KEPT: dict[str, Callable[[QuantizedTensor], Tensor]] = {
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "alias": torch.ops.aten.alias.default,
    "view": lambda w: w.view(64, 32),
    "view with a size left open": lambda w: w.view(-1, 32),
    "view_as": lambda w: w.view_as(w),
    "Parameter": nn.Parameter,
}


@pytest.mark.parametrize("name", _KEPT)
def test_views_of_the_whole_stay_quantized(name: str) -> None:
    """They alias the buffers, so a refill is seen through all of them."""
    made = _made("fp8_delayed")
    kept = _KEPT[name](made)
    assert isinstance(kept, QuantizedTensor) and kept.shape == made.shape
    assert kept.codes is made.codes and kept.table is made.table
    assert (kept.recipe, kept.state, kept.fqn) == (made.recipe, made.state, made.fqn)


_DECODED: dict[str, Callable[[Tensor], Tensor]] = {
    "product with a number": lambda w: w * 2,
    "sum": lambda w: w.sum(),
    "transposed product": lambda w: torch.ones(3, 32, dtype=w.dtype) @ w.t(),
    "product": lambda w: torch.ones(3, 64, dtype=w.dtype) @ w,
    "concatenation": lambda w: torch.cat([w, w]),
    "another shape": lambda w: w.view(32, 64) + 0,
    "flat": lambda w: w.view(-1) + 0,
    "other strides": lambda w: w.as_strided((64, 32), (1, 64)) + 0,
    "rows": lambda w: w[3:7] + 0,
    "one row": lambda w: w[5] + 0,
    "embedding": lambda w: F.embedding(torch.tensor([1, 5]), w),
    "fp32": lambda w: w.float(),
    "clone": lambda w: w.clone(),
    "input of a linear": lambda w: F.linear(w, torch.ones(4, 32, dtype=w.dtype)),
    "weight of a linear on itself": lambda w: F.linear(w, w),
}


@pytest.mark.parametrize("name", _DECODED)
def test_other_operators_compute_with_values(name: str) -> None:
    """The result, and a dense gradient of the parameter, are those of the decoded weight."""
    made = _made()
    plain = nn.Parameter(made.decode())
    results = [_DECODED[name](weight) for weight in (made, plain)]
    assert type(results[0]) is Tensor and torch.equal(*results)
    for result in results:
        result.backward(torch.linspace(-1, 1, result.numel()).view(result.shape).to(result.dtype))
    assert type(made.grad) is Tensor and made.grad.dtype == torch.bfloat16
    assert torch.equal(made.grad, plain.grad)


_OF_STACKS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda w: w.transpose(1, 2),
    "one matrix": lambda w: w[1],
    "all matrices": lambda w: w.unbind(0)[2],
    "rows of all": lambda w: w[:, 3:7],
    "flat": lambda w: w.view(-1),
}
_OF_MATRICES: dict[str, Callable[[Tensor], Tensor]] = {
    **_KEPT,
    **_DECODED,
    "transpose": lambda w: w.t(),
    "part": lambda w: w[3:7, 2],
    "parts": lambda w: w.split(16)[1],
    "composed view": lambda w: w.narrow(0, 3, 2),
    "composed view of the whole": lambda w: w.reshape(64, 32),
    "written to another": lambda w: torch.zeros(64, 32).add_(w),
}


@pytest.mark.parametrize("name", [*_OF_MATRICES, *_OF_STACKS])
def test_inference_mode_gives_what_no_grad_does(name: str) -> None:
    """Quantized or decoded; views of a parameter count its writes, as those of a plain one do."""
    call = _OF_STACKS[name] if name in _OF_STACKS else _OF_MATRICES[name]
    made = _made("mxfp8", 3, 32, 64) if name in _OF_STACKS else _made()
    plain = nn.Parameter(made.decode())
    with torch.no_grad():
        wanted = call(made)
    with torch.inference_mode():
        found, of_plain = call(made), call(plain)
    assert type(found) is type(wanted) and found.stride() == wanted.stride()
    assert torch.equal(found.detach() + 0, wanted.detach() + 0)
    if isinstance(found, QuantizedTensor) or of_plain._is_view():
        assert not found.is_inference()


class _Noted(Tensor):
    """Memory that notes which streams use it."""

    streams: list[object]

    def record_stream(self, stream: object) -> None:
        """Note it."""
        self.streams.append(stream)


def test_streams_are_recorded_for_codes_and_scales() -> None:
    """Memory of a weight that another stream reads is not given away before."""
    weight, stream = quantized(torch.ones(64, 32), "mxfp8").detach(), torch.Stream(device="cpu")
    assert isinstance(weight, QuantizedTensor)
    for name in ("codes", "table"):
        noted = getattr(weight, name).as_subclass(_Noted)
        noted.streams = []
        setattr(weight, name, noted)
    weight.record_stream(stream)
    assert [each.streams for each in (weight.codes, weight.table)] == [[stream]] * 2  # type: ignore[attr-defined]


def _assign_data(weight: Tensor) -> None:
    weight.data = torch.zeros(64, 32, dtype=weight.dtype)


def _assign_elements(weight: Tensor) -> None:
    weight.detach()[2:4] = 1.0


def _step(make: Callable[..., torch.optim.Optimizer], **options: object) -> Callable[..., None]:
    def step(weight: Tensor) -> None:
        weight.grad = torch.ones(64, 32, dtype=weight.dtype)
        make([weight], lr=0.1, **options).step()

    return step


_REFUSED: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda w: w.detach().mul_(2),
    "zero_ through data": lambda w: w.data.zero_(),
    "copy_": lambda w: w.detach().copy_(torch.ones(64, 32)),
    "out=": lambda w: torch.add(torch.ones(64, 32), 1, out=w.detach()),
    "initialisation": nn.init.xavier_normal_,
    "resize": lambda w: w.detach().resize_(3),
    "foreach": lambda w: torch._foreach_add_([w.detach()], 1.0),
    ".data =": _assign_data,
    "elements": _assign_elements,
    "SGD": _step(torch.optim.SGD, foreach=False),
    "SGD foreach": _step(torch.optim.SGD, foreach=True),
    "SGD fused": _step(torch.optim.SGD, fused=True),
    "AdamW": _step(torch.optim.AdamW, foreach=False),
    "AdamW foreach": _step(torch.optim.AdamW, foreach=True),
    "AdamW fused": _step(torch.optim.AdamW, fused=True),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_writes_raise_and_change_nothing(name: str) -> None:
    """They would change a copy of the values, silently; the error names parameter and cure."""
    made = _made()
    codes, table = made.codes.clone(), made.table.clone()
    with pytest.raises(RuntimeError, match=r"the sharded parameter.*'layer\.weight'.*FusedAdam"):
        _REFUSED[name](made)
    assert torch.equal(made.codes, codes) and torch.equal(made.table, table)


def test_fused_adam_refuses_it_too() -> None:
    """Our own optimizer steps the sharded parameter, not the one that is made from it."""
    made = _made()
    codes = made.codes.clone()
    made.grad = torch.ones(64, 32, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="the sharded parameter"):
        FusedAdam([made], lr=0.1).step()
    assert torch.equal(made.codes, codes)


def _receive() -> None:
    made, rank = _made(), dist.get_rank()
    values = made.decode()
    other = torch.zeros_like(values)
    refused = [
        lambda: dist.all_reduce(made.detach()),
        lambda: dist.all_to_all_single(made.detach(), values),
    ]
    if rank == 1:
        refused.append(lambda: dist.broadcast(made.detach(), 0))
        refused.append(lambda: dist.recv(made.detach(), 0))
    for call in refused:
        with pytest.raises(RuntimeError, match="the sharded parameter"):
            call()
    sent = made.detach() if rank == 0 else other
    dist.broadcast(sent, 0)
    if rank == 0:
        dist.send(made.detach(), 1)
    else:
        assert torch.equal(other, values)
        dist.recv(other.zero_(), 0)
        assert torch.equal(other, values)
    # A root is counted within its group.
    alone = dist.new_group([1])
    if rank == 1:
        dist.broadcast(made.detach(), 1, group=alone)
    assert torch.equal(made.decode(), values)


def test_collectives_read_it_and_do_not_write_it(ranks: Ranks) -> None:
    """Torch does not say which arguments they write: a copy of the values would be lost."""
    ranks(2).run(_receive)


def test_writes_to_other_tensors_read_the_values() -> None:
    """An operator that writes something else may read a quantized weight."""
    made, target = _made(), torch.zeros(64, 32, dtype=torch.bfloat16)
    target.copy_(made.detach())
    assert torch.equal(target, made.decode())
    target[:] = made.detach()
    torch._foreach_add_([target], [made.detach()])
    assert torch.equal(target, 2 * made.decode())


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_matrices_of_a_stack_stay_quantized(recipe: str) -> None:
    """Each of them, transposed or not, decodes to its part of the whole; linears on one decode."""
    made = _made(recipe, 3, 32, 64)
    whole = made.decode()
    turned = made.transpose(1, 2)
    assert isinstance(turned, QuantizedTensor) and turned.stride() == (2048, 1, 64)
    assert torch.equal(turned.detach().decode(), whole.transpose(1, 2))
    back = turned.transpose(-1, -2)
    assert isinstance(back, QuantizedTensor) and torch.equal(back.detach().decode(), whole)
    for parts in (list(made), [made[i] for i in range(3)], [made[i - 3] for i in range(3)]):
        for part, values in zip(parts, whole, strict=True):
            assert isinstance(part, QuantizedTensor) and part.shape == (32, 64)
            assert torch.equal(part.detach().decode(), values)
            assert part.recipe.input is None and part.recipe.weight is made.recipe.weight
    for part, values in zip(turned, whole.transpose(1, 2), strict=True):
        assert torch.equal(part.detach().decode(), values)
    assert type(made.transpose(0, 1)) is Tensor and type(made[:2]) is Tensor
    assert type(made[1][0]) is Tensor and type(made[1].t()) is Tensor


def test_gradients_flow_through_parts_of_a_stack() -> None:
    """To the whole stack, dense, zero for matrices that were not used."""
    made = _made("nvfp4", 3, 32, 64)
    plain = nn.Parameter(made.decode())
    for weight in (made, plain):
        (weight[1] * 2).sum().backward()
        (weight.transpose(1, 2)[2] * 3).sum().backward()
    assert type(made.grad) is Tensor and torch.equal(made.grad, plain.grad)
    assert not made.grad[0].any() and made.grad[1].any()


def _dtensor_over_codes() -> None:
    mesh = init_device_mesh("cpu", (1,))
    made = _made()
    face = nn.Parameter(DTensor.from_local(made.detach(), mesh, [Replicate()], run_check=False))
    plain = nn.Parameter(made.decode())
    x = _weight(5, 32).bfloat16()
    results = [
        F.linear(DTensor.from_local(x, mesh, [Replicate()]), face).to_local(),
        F.linear(x, plain),
    ]
    assert torch.equal(*results)
    for result in results:
        result.backward(torch.ones_like(result))
    assert isinstance(face.grad, DTensor) and torch.equal(face.grad.to_local(), plain.grad)
    assert isinstance(face._local_tensor, QuantizedTensor)


def test_a_dtensor_may_be_made_of_it(ranks: Ranks) -> None:
    """As torch's parallel layers see parameters; they compute with the values."""
    ranks(1).run(_dtensor_over_codes)


def _over(codes: int, table: int, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> None:
    QuantizedTensor(
        torch.zeros(codes, dtype=dtype),
        torch.zeros(table, dtype=torch.uint8),
        recipe=recipe_of("mxfp8"),
        shape=shape,
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize(
    ("codes", "table", "shape", "match"),
    [
        (2047, 16, (64, 32), "2048 codes in uint8, got 2047"),
        (2048, 8, (64, 32), "a table of 16 bytes in uint8, got 8"),
        (2112, 16, (66, 32), "a shape that the format takes"),
        (64, 16, (64,), "a shape that the format takes"),
    ],
)
def test_buffers_of_other_sizes_are_refused(
    codes: int, table: int, shape: tuple[int, ...], match: str
) -> None:
    """With the sizes that the format says."""
    _over(2048, 16, (64, 32))
    with pytest.raises(ValueError, match=match):
        _over(codes, table, shape)
    with pytest.raises(ValueError, match="in uint8"):
        _over(2048, 16, (64, 32), torch.int8)


def test_a_graph_reads_the_values() -> None:
    """Operators that decode are compiled whole, and weights of one kind share a graph."""
    made, other = _made(), _made()

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return (F.gelu(x) @ weight.t()).sum() + (weight * 2).sum()

    other.fqn = "another.weight"
    x = _weight(8, 32).bfloat16()
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(product, backend=backend, fullgraph=True)
        with torch.compiler.set_stance("default"):
            results = [compiled(x, made), product(x, made)]
        assert torch.equal(*results)
        grads = [torch.autograd.grad(result, made)[0] for result in results]
        assert type(grads[0]) is Tensor and torch.equal(*grads)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(compiled(x, other), results[0])
