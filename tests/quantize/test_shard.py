"""A quantized parameter as a tensor: what stays quantized, what is decoded, copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import megafsdp
from megafsdp.fsdp.runtime.torch_fsdp import encode_main_weights, shard_of
from megafsdp.quantize import shard as shard_file
from megafsdp.quantize.main_weight import MainWeight
from megafsdp.quantize.recipes import RECIPE_NAMES, recipe_of
from megafsdp.quantize.shard import QuantizedShard, rebuild_quantized

GOLDEN = Path(__file__).parents[1] / "golden" / "quantized_parameters.pt"
ROWS, COLS = 256, 256
# What to do in place of a write: not what the engine's compute weights say.
_CURE = r"requantize_\(model, values\) on all ranks, build FusedAdam"


def made(recipe: str, seed: int = 0) -> QuantizedShard:
    """Return a quantized parameter of a plain linear; scales differ by row and by seed."""
    torch.manual_seed(seed)
    linear = nn.Linear(COLS, ROWS, bias=False).bfloat16()
    with torch.no_grad():
        linear.weight.mul_(torch.linspace(1, 4 + 60 * seed, ROWS)[:, None])
    model = megafsdp.quantize_(linear, recipe)
    weight = model.weight
    assert isinstance(weight, QuantizedShard)
    return weight


def _same_bytes(a: QuantizedShard, b: QuantizedShard) -> bool:
    return torch.equal(a.codes, b.codes) and torch.equal(a.table, b.table)


_ALIASES: dict[str, Callable[[QuantizedShard], Tensor]] = {
    "detach": lambda w: w.detach(),
    "view": lambda w: w.view(ROWS, COLS),
    "as_strided": lambda w: w.as_strided((ROWS, COLS), (COLS, 1), 0),
    "flat and back": lambda w: w.view(-1).view(ROWS, COLS),
    "cpu": lambda w: w.cpu(),
    "to": lambda w: w.to("cpu"),
    "all rows": lambda w: w[:],
    "narrow": lambda w: w.narrow(0, 0, ROWS),
}
_COPIES: dict[str, Callable[[QuantizedShard], Tensor]] = {
    "clone": lambda w: w.clone(),
    "deepcopy of what state dicts have": lambda w: copy.deepcopy(w.detach()),
    "pickle of that": lambda w: pickle.loads(pickle.dumps(w.detach())),
    "deepcopy": copy.deepcopy,
    "to a copy": lambda w: w.detach().to("cpu", copy=True),
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
}


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_what_keeps_the_buffers(recipe: str) -> None:
    """Aliases of codes and scales, which have no memory of their own."""
    weight = made(recipe)
    for name, call in _ALIASES.items():
        found = call(weight).detach()
        assert isinstance(found, QuantizedShard), name
        assert found.codes.data_ptr() == weight.codes.data_ptr(), name
        assert found.table.data_ptr() == weight.table.data_ptr(), name
        assert found.untyped_storage().nbytes() == 0 and found.data_ptr() == 0
        assert found.untyped_storage().device == weight.device
    flat = weight.view(-1)
    assert isinstance(flat, QuantizedShard) and flat.shape == (ROWS * COLS,)
    assert torch.equal(flat.detach().decode(), weight.detach().decode().view(-1))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_what_copies_the_buffers(recipe: str) -> None:
    """Byte for byte, with scales and histories, and with main weight where it is a parameter."""
    weight = made(recipe)
    for name, call in _COPIES.items():
        found = call(weight)
        assert isinstance(found, QuantizedShard) and _same_bytes(found, weight), name
        assert found.codes.data_ptr() != weight.codes.data_ptr(), name
        assert found.recipe == weight.recipe and found.fqn == "weight"
        if not isinstance(found, nn.Parameter):
            assert found.main is None
        else:
            assert found.main is not None and weight.main is not None
            assert torch.equal(found.main.values, weight.main.values)
            assert found.main.values.data_ptr() != weight.main.values.data_ptr()
        assert (found.state is None) == (recipe != "fp8_delayed")
        if found.state is not None and weight.state is not None:
            assert found.state is not weight.state
            assert all(map(torch.equal, found.state.histories(), weight.state.histories()))
    assert isinstance(copy.deepcopy(weight), nn.Parameter)


def test_copies_are_as_frozen_as_shared_and_have_gradients() -> None:
    """As those of plain parameters: a frozen copy of a model stays frozen, and ties stay ties."""
    weight = made("mxfp8")
    weight.grad = torch.ones(ROWS, COLS, dtype=weight.dtype)
    first, second = copy.deepcopy([weight, weight])
    assert first is second and torch.equal(first.grad, weight.grad)
    assert first.grad.data_ptr() != weight.grad.data_ptr()
    weight.requires_grad_(False)
    for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert isinstance(copied, nn.Parameter) and not copied.requires_grad


_CUTS: dict[str, Callable[[QuantizedShard], Tensor]] = {
    "rows": lambda w: w[128:],
    "narrow": lambda w: w.narrow(0, 0, 128),
    "columns": lambda w: w.narrow(1, 0, 128),
    "split": lambda w: w.split(128)[1],
    "chunk": lambda w: w.chunk(2)[1],
    "reshape": lambda w: w.reshape(-1),
    "decoded view": lambda w: w.t(),
}


@pytest.mark.parametrize("name", [*_ALIASES, *_COPIES, *_CUTS])
def test_inference_mode_gives_what_no_grad_does(name: str) -> None:
    """What torch makes of others there too, and copies have main weights that can be trained."""
    call = {**_ALIASES, **_COPIES, **_CUTS}[name]
    weight = made("mxfp8")
    with torch.no_grad():
        wanted = call(weight)
    with torch.inference_mode():
        found = call(weight)
    assert type(found) is type(wanted) and not found.is_inference()
    assert torch.equal(found.detach() + 0, wanted.detach() + 0)
    if isinstance(found, QuantizedShard) and isinstance(wanted, QuantizedShard):
        assert (found.main is None) == (wanted.main is None)
        assert found.main is None or not found.main.values.is_inference()


def test_a_load_in_inference_mode_writes_to_what_it_narrows() -> None:
    """As elsewhere: a decoded copy would be written in vain."""
    weight, other = made("mxfp8"), made("mxfp8", seed=1)
    with torch.inference_mode():
        weight.narrow(0, 128, 128).copy_(other[128:])
    assert torch.equal(weight[128:].detach() + 0, other[128:].detach() + 0)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_new_tensors(recipe: str) -> None:
    """Of rows as long they are quantized, else plain, and never larger than asked."""
    weight = made(recipe).detach()
    kept = [weight.new_zeros(ROWS, COLS), weight.new_empty(128, COLS), torch.empty_like(weight)]
    for found in kept:
        assert isinstance(found, QuantizedShard)
        assert found.codes.numel() == found.numel() // recipe_of(recipe).weight.codes_per_byte
    assert not weight.new_zeros(128, COLS).decode().nan_to_num(1).any()  # type: ignore[attr-defined]
    plain = [
        weight.new_empty(()),
        weight.new_zeros(3),
        torch.zeros_like(weight),
        torch.zeros_like(weight, dtype=torch.float32),
        weight.new_zeros((ROWS, COLS), dtype=torch.float32),
        weight.to(torch.float32),
    ]
    assert all(type(each) is Tensor for each in plain)
    assert plain[0].numel() == 1 and plain[0].dtype == torch.bfloat16
    assert [plain[k].dtype for k in (3, 4, 5)] == [torch.float32] * 3
    assert torch.equal(plain[5], weight.decode().float())
    assert weight.is_pinned() is False


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_cuts_between_tiles_stay_quantized(recipe: str) -> None:
    """Split, chunk, narrow and slices of rows; through a tile and by columns they are decoded."""
    weight = made(recipe).detach()
    full = weight.decode()
    cuts: list[tuple[Tensor, Tensor]] = [
        (weight[128:], full[128:]),
        (weight.narrow(0, 0, 128), full[:128]),
        *zip(weight.split(128), full.split(128), strict=True),
        *zip(weight.chunk(2), full.chunk(2), strict=True),
        *zip(torch.split(weight, [128, 128]), full.split(128), strict=True),
        (weight[:, :128], full[:, :128]),
        (weight.narrow(1, 128, 128).narrow(0, 0, 128), full[:128, 128:]),
        (weight[128:][:, 128:], full[128:, 128:]),
    ]
    for found, expected in cuts:
        assert isinstance(found, QuantizedShard) and torch.equal(found.decode(), expected)
        again = pickle.loads(pickle.dumps(found))
        assert torch.equal(again.decode(), expected)
        assert len(pickle.dumps(found)) < len(pickle.dumps(weight))
    for found, expected in (
        (weight[::2], full[::2]),
        (weight.split(128, dim=1)[0], full[:, :128]),
    ):
        assert type(found) is Tensor and torch.equal(found, expected)
    tile = recipe_of(recipe).weight.tile
    for through in (weight[8:136], weight[:, 8:136]):
        assert isinstance(through, QuantizedShard) == (tile is None)
    # As torch's loads cut what they then write to: a decoded copy would be written in vain.
    for dim in (0, 1):
        if tile is not None:
            with pytest.raises(RuntimeError, match=f"cuts at multiples of {tile[dim]}"):
                weight.narrow(dim, 8, 128)
    with pytest.raises(RuntimeError, match="narrow"):
        weight.view(-1).narrow(0, 8, 128)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed"])
def test_one_column_is_read_and_written_like_others(recipe: str) -> None:
    """With one scale a matrix a cut may be a byte wide, which a view of the codes would be too."""
    weight, other = made(recipe).detach(), made(recipe, seed=1).detach()
    whole, wanted = weight.decode(), other.decode()
    column = weight[:, 3:4]
    assert isinstance(column, QuantizedShard) and torch.equal(column.decode(), whole[:, 3:4])
    assert torch.equal(pickle.loads(pickle.dumps(column)).decode(), whole[:, 3:4])
    for start in range(COLS):
        weight.narrow(1, start, 1).copy_(other.narrow(1, start, 1))
    assert torch.equal(weight.decode(), wanted) and not torch.equal(wanted, whole)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_a_copy_to_a_new_buffer_leaves_the_parameter_alone(recipe: str) -> None:
    """What stages a save, or keeps a backup, has no part in the next step of the weight."""
    weight, other = made(recipe), made(recipe, seed=1)
    main = weight.main
    assert isinstance(main, MainWeight) and not torch.equal(weight.codes, other.codes)
    before = [h.clone() for h in weight.state.histories()] if weight.state else []
    for buffer in (torch.empty_like(weight), weight.detach().new_empty(ROWS, COLS)):
        assert isinstance(buffer, QuantizedShard) and buffer.main is None
        buffer.copy_(other.detach())
        assert torch.equal(buffer.codes, other.codes) and not main.is_overtaken
    if weight.state is not None:
        assert all(map(torch.equal, weight.state.histories(), before))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_cuts_without_rows_are_copied_saved_and_loaded(recipe: str) -> None:
    """What a rank beyond the last row has: a save stages it, and a load copies into it."""
    weight = made(recipe).detach()
    whole, main = weight.decode(), weight.main
    for rows in (weight[:0], weight[ROWS:], weight.narrow(0, 0, 0)):
        assert isinstance(rows, QuantizedShard) and rows.decode().shape == (0, COLS)
        loaded = torch.load(io.BytesIO(_saved(rows)), weights_only=True)
        for copied in (loaded, rows.clone(), copy.deepcopy(rows), torch.empty_like(rows)):
            assert isinstance(copied, QuantizedShard) and copied.shape == (0, COLS)
            copied.copy_(rows)
            rows.copy_(copied)
    assert torch.equal(weight.decode(), whole)
    assert main is not None and not main.is_overtaken


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_copies_between_quantized_tensors_are_of_bytes(recipe: str) -> None:
    """Of the whole, and of rows into rows with the scales that belong to them."""
    weight, other = made(recipe, 0).detach(), made(recipe, 1).detach()
    target = weight.clone()
    target.copy_(other)
    assert isinstance(target, QuantizedShard) and _same_bytes(target, other)
    target = weight.clone()
    for start in (0, 128):
        target[start : start + 128].copy_(other[start : start + 128])
    assert _same_bytes(target, other) and not _same_bytes(target, weight)
    target = weight.clone()
    for row in (0, 128):
        for col in (0, 128):
            target[row:][:, col:].narrow(1, 0, 128).narrow(0, 0, 128).copy_(
                other.narrow(1, col, 128).narrow(0, row, 128)
            )
    assert _same_bytes(target, other)
    plain = torch.zeros(ROWS, COLS, dtype=torch.bfloat16)
    assert torch.equal(plain.copy_(other), other.decode())


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_other_writes_raise_and_change_nothing(recipe: str) -> None:
    """Floats, another format, another shape, arithmetic."""
    weight, others = made(recipe), [each for each in RECIPE_NAMES if each != recipe]
    before = weight.detach().clone()
    odd = next(o for o in others if {o, recipe} != {"fp8_current", "fp8_delayed"})
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=_CURE):
            weight.copy_(torch.ones(ROWS, COLS))
        with pytest.raises(ValueError, match=f"a tensor of format {recipe}"):
            weight.copy_(made(odd))
        with pytest.raises(ValueError, match="a tensor of format"):
            weight.copy_(made(recipe)[:128])
        for change in (weight.zero_, lambda: weight.add_(1), lambda: weight.fill_(0)):
            with pytest.raises(RuntimeError, match=_CURE):
                change()
        with pytest.raises(RuntimeError, match=_CURE):
            weight[0] = 1.0
    with pytest.raises(RuntimeError, match=_CURE):
        weight.data = torch.zeros(ROWS, COLS, dtype=weight.dtype)
    assert isinstance(before, QuantizedShard) and _same_bytes(weight, before)


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.float, lambda m: m.to(torch.half)])
def test_casts_of_a_plain_model_are_refused_as_such(cast: Callable[[nn.Module], object]) -> None:
    """The weight is left as it is."""
    model = megafsdp.quantize_(nn.Linear(COLS, 128, bias=False).bfloat16(), "mxfp8")
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"a cast to torch.*Cast the model before quantize_"):
        cast(model)
    assert isinstance(before, QuantizedShard) and _same_bytes(model.weight, before)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_parts_under_another_scale_are_refused(recipe: str) -> None:
    """Codes of a matrix that was quantized by itself are no rows of a larger one."""
    target = made(recipe).detach()
    before = target.clone()
    torch.manual_seed(1)
    half = megafsdp.quantize_(nn.Linear(COLS, 128, bias=False).bfloat16(), recipe).weight.detach()
    if recipe in ("fp8_block", "mxfp8"):
        target[128:].copy_(half)
        assert torch.equal(target.decode()[128:], half.decode())
        return
    with pytest.raises(ValueError, match=r"one scale of a matrix of shape \(256, 256\)"):
        target[128:].copy_(half)
    assert isinstance(before, QuantizedShard) and _same_bytes(target, before)


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_pickles_name_one_function(recipe: str) -> None:
    """No class, no enum, no process group, no attribute is looked up; the rest is plain values."""
    pickled = pickle.dumps({"w": made(recipe)}, protocol=2)
    # Of the tensors below, as torch names them.
    of_tensors = pickle.dumps(torch.zeros(1, dtype=torch.uint8), protocol=2)
    names = [
        {argument for op, argument, _ in pickletools.genops(data) if op.name == "GLOBAL"}
        for data in (pickled, of_tensors)
    ]
    assert names[0] - names[1] - {"torch._utils _rebuild_tensor_v2"} <= {
        "megafsdp.quantize.shard rebuild_quantized"
    }
    assert b"ProcessGroup" not in pickled and b"getattr" not in pickled
    assert "megafsdp.quantize.shard rebuild_quantized" in names[0]


def test_a_fresh_process_loads_what_this_release_has_stored() -> None:
    """With ``weights_only=True``, after an import of megafsdp alone."""
    assert GOLDEN.stat().st_size < 100_000
    code = (
        "import sys, torch, megafsdp\n"
        "found = torch.load(sys.argv[1], weights_only=True)\n"
        "for name, (parameter, values) in sorted(found.items()):\n"
        "    assert type(parameter).__name__ == 'QuantizedShard' and parameter.requires_grad\n"
        "    assert torch.equal(parameter.detach().decode(), values), name\n"
        "    print(name, tuple(parameter.shape), parameter.dtype)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(GOLDEN)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()] == sorted(RECIPE_NAMES)


def test_this_release_still_writes_what_is_stored() -> None:
    """Written by ``python -m tests.quantize.test_shard``; codes have not changed."""
    found = torch.load(GOLDEN, weights_only=True)
    for name, (parameter, _) in found.items():
        fresh = _small(name)
        assert _same_bytes(parameter.detach(), fresh), name


def test_payloads_of_other_versions_and_damaged_ones_are_refused() -> None:
    """With what to do; nothing is made of them."""
    function, (version, description) = made("mxfp8").__reduce_ex__(2)
    assert function is rebuild_quantized
    with pytest.raises(ValueError, match="version 1 of the payload, got 2"):
        rebuild_quantized(version + 1, description)
    with pytest.raises(ValueError, match="none named codes"):
        rebuild_quantized(version, {k: v for k, v in description.items() if k != "codes"})
    with pytest.raises(ValueError, match="65536 codes in uint8, got 65535"):
        rebuild_quantized(version, description | {"codes": description["codes"][1:]})
    with pytest.raises(ValueError, match="one of the recipes"):
        rebuild_quantized(version, description | {"recipe": "fp3"})
    with pytest.raises(ValueError, match=r"a main weight of shape \(256, 256\) in torch.float32"):
        rebuild_quantized(version, description | {"main_weight": description["main_weight"][1:]})


def test_a_newer_payload_leaves_the_target_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As read from a file; and a file that was cut short."""
    with monkeypatch.context() as patched:
        patched.setattr(shard_file, "_PAYLOAD_VERSION", 2)
        data = _saved(made("nvfp4", 1))
    target = made("nvfp4", 0).detach()
    before = target.clone()
    with pytest.raises(ValueError, match="or with a newer one"):
        target.copy_(torch.load(io.BytesIO(data), weights_only=True))
    with pytest.raises((RuntimeError, ValueError), match=r"central directory|seek"):
        target.copy_(torch.load(io.BytesIO(data[: len(data) // 2]), weights_only=True))
    assert isinstance(before, QuantizedShard) and _same_bytes(target, before)


def test_stacks_are_cut_between_matrices() -> None:
    """Each matrix with its own scales, also where a format has one scale a matrix."""
    for recipe in RECIPE_NAMES:
        stack = nn.ParameterDict({"w": torch.randn(4, 128, 128)})
        megafsdp.annotate(stack["w"], is_linear_weight=True)
        megafsdp.quantize_(stack, recipe)
        weight = shard_of(stack["w"])
        assert weight is not None
        full = weight.detach().decode()
        for part, expected in zip(weight.detach().split(1), full.split(1), strict=True):
            assert isinstance(part, QuantizedShard) and torch.equal(part.decode(), expected)
        assert torch.equal(weight.detach()[:, 32:64] + 0, full[:, 32:64])
        assert torch.equal(weight.detach().view(-1)[5] + 0, full.view(-1)[5])
        with pytest.raises(RuntimeError, match="no cut along this dimension"):
            weight.detach().narrow(1, 32, 32)
        turned = weight.detach().transpose(1, 2)
        assert torch.equal(turned[1:3] + 0, full.transpose(1, 2)[1:3])
        target = weight.detach().new_zeros(4, 128, 128)
        for k in range(4):
            target[k : k + 1].copy_(weight.detach()[k : k + 1])
        assert isinstance(target, QuantizedShard) and _same_bytes(target, weight)
        assert weight.main is not None
        weight.main.values.mul_(3)
        encode_main_weights([weight])
        assert not torch.equal(weight.detach().decode(), full)


def _small(recipe: str) -> QuantizedShard:
    size = 16 if recipe == "nvfp4" else 32
    values = torch.arange(size * size).view(size, size).float().sub(100).div(7)
    model = nn.Linear(size, size, bias=False)
    with torch.no_grad():
        model.weight.copy_(values)
    megafsdp.quantize_(model, recipe)
    assert isinstance(model.weight, QuantizedShard)
    return model.weight


if __name__ == "__main__":
    parameters = {name: _small(name) for name in RECIPE_NAMES}
    torch.save({name: (p, p.detach().decode()) for name, p in parameters.items()}, GOLDEN)
