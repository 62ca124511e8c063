"""FusedAdam's states: their formats and steps on them, remainders, state dicts and checkpoints.

The oracle of a step on narrow states is the definition of the step in reference.py between a decode
and an encode, tensor by tensor.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megafsdp import (
    FusedAdam,
    MixedPrecisionPolicy,
    Muon,
    full_tensor,
    fully_shard,
    mark_main_weights_changed,
)
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor, wrap_like
from megafsdp.checkpoint import load, save
from megafsdp.errors import CheckpointError
from megafsdp.optimizer.kernels import reference
from megafsdp.optimizer.kernels.hyper import AdamConstants, AdamHyper
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from megafsdp.optimizer.states.formats import ScaledState, dtype_for, is_scaled
from tests.fsdp.toy import Net, batches, mine, pair, shard
from tests.optimizer.cases import for_each
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
ALL_BF16 = MixedPrecisionPolicy(param_dtype=BF16, main_params_dtype=BF16)
FP32_MAIN = MixedPrecisionPolicy(param_dtype=BF16, main_params_dtype=FP32)
HYPER = AdamHyper(lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
FORMATS = (FP32, BF16, FP16, FP8)
NUM_STEPS = 3
# Formats that differ in how they are stepped: whole buffers, chunks of them, one by one.
SOME_MODES = [(FP32, FP32), (BF16, FP32), (FP8, FP16)]


def _optimizer(
    net: nn.Module, modes: tuple[torch.dtype, torch.dtype], **options: object
) -> FusedAdam:
    return FusedAdam(
        net.parameters(),
        lr=HYPER.lr,
        betas=HYPER.betas,
        eps=HYPER.eps,
        weight_decay=HYPER.weight_decay,
        exp_avg_dtype=modes[0],
        exp_avg_sq_dtype=modes[1],
        **options,
    )


class _Moment:
    """One moment of the oracle, kept in a format."""

    def __init__(self, shape: torch.Size, wished: torch.dtype, *, is_second: bool) -> None:
        self.dtype = dtype_for(shape, wished)
        self.rows = (shape[0] if shape else 1, shape[1:].numel())
        self.kept = torch.zeros(shape, dtype=FP32 if is_scaled(self.dtype) else self.dtype)
        self.scaled = None
        if is_scaled(self.dtype):
            cpu = torch.device("cpu")
            self.scaled = ScaledState.zeros(*self.rows, self.dtype, cpu, keeps_positive=is_second)

    def get(self) -> torch.Tensor:
        if self.scaled is not None:
            return self.scaled.decode().view(self.kept.shape)
        return self.kept.float()

    def set(self, values: torch.Tensor) -> None:
        if self.scaled is not None:
            self.scaled.encode(values.reshape(self.rows), is_step=True)
        else:
            self.kept.copy_(values)


def _steps_on(net: nn.Module, optimizer: FusedAdam, num_steps: int, seed: int = 0) -> None:
    """Step by gradients that every mesh has alike, in the place of those of one backward."""
    generator = torch.Generator().manual_seed(seed)
    net(*mine(batches(1)[0])).backward()
    for _ in range(num_steps):
        for parameter in net.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.grad.copy_from_full_(values.to(parameter.grad.dtype))
        optimizer.step()
    optimizer.zero_grad()


Definition = dict[str, list[torch.Tensor]]


def _by_definition(modes: tuple[torch.dtype, torch.dtype]) -> Definition:
    """Return by name the weight and the two moments, as they are read, of the small toy's steps."""
    weights = {n: p.detach().clone() for n, p in _small().named_parameters()}
    moments = {
        name: [_Moment(weight.shape, modes[i], is_second=bool(i)) for i in range(2)]
        for name, weight in weights.items()
    }
    generator = torch.Generator().manual_seed(0)
    with reference.denormal_mode(True):
        for step in range(1, NUM_STEPS + 1):
            for name, weight in weights.items():
                grad = torch.randn(weight.shape, generator=generator)
                constants = AdamConstants.rounded(HYPER, step)
                values = [m.get() for m in moments[name]]
                weights[name], *values = reference.update(weight, grad, *values, constants)
                for moment, value in zip(moments[name], values, strict=True):
                    moment.set(value)
    return {name: [w, *(m.get() for m in moments[name])] for name, w in weights.items()}


def _small(seed: int = 0) -> Net:
    return Net(num_blocks=1, seed=seed)


def _rows(like: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return the rows of a full tensor that this rank has of a sharded one."""
    rows = torch.zeros_like(like)
    rows.copy_from_full_(full)
    return local_tensor(rows)


def _matches_the_definition(modes: tuple[torch.dtype, torch.dtype], wanted: Definition) -> int:
    """Return how many elements this rank has."""
    net = shard(_small())
    optimizer = _optimizer(net, modes)
    _steps_on(net, optimizer, NUM_STEPS)
    for name, parameter in net.named_parameters():
        weight, *moments = wanted[name]
        assert torch.equal(local_tensor(parameter), _rows(parameter.detach(), weight)), name
        for kind, mode, moment in zip(("exp_avg", "exp_avg_sq"), modes, moments, strict=True):
            values = optimizer.get_unscaled_state(parameter, kind)
            assert torch.equal(local_tensor(values), _rows(values, moment)), (name, kind)
            state = optimizer.state[parameter][kind]
            assert state.dtype == dtype_for(parameter.shape, mode)
            # Bytes are those of this rank's rows.
            assert local_tensor(state).numel() == local_tensor(parameter).numel()
    return sum(local_tensor(parameter).numel() for parameter in net.parameters())


@pytest.mark.native
@pytest.mark.parametrize("first", FORMATS)
def test_every_format_steps_as_decode_update_encode(ranks: Ranks, first: torch.dtype) -> None:
    """All pairs of formats, bit by bit, rows divided among three ranks."""
    pairs = [(first, second) for second in FORMATS]
    cases = [(modes, _by_definition(modes)) for modes in pairs]
    numels = ranks(3).run(for_each, _matches_the_definition, cases)
    assert all(min(own) > 0 for own in numels), "each rank has rows"


def _seven_large_steps(
    modes: tuple[torch.dtype, torch.dtype], grad_dtype: torch.dtype
) -> torch.Tensor:
    """Return 278,484 weights after seven steps of learning rate 1 with short memories."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(276, 1009, generator=generator))
    first, second = modes
    optimizer = FusedAdam(
        [weight],
        lr=1.0,
        betas=(0.1, 0.25),
        exp_avg_dtype=first,
        exp_avg_sq_dtype=second,
        use_decoupled_grad=True,
    )
    for _ in range(7):
        weight.decoupled_grad = torch.randn(weight.shape, generator=generator).to(grad_dtype)
        optimizer.step()
    return weight.detach()


@pytest.mark.native
@pytest.mark.parametrize(
    ("modes", "mean", "largest"),
    [
        ((FP32, FP32), 2e-3, 2e-2),
        ((FP16, FP16), 2e-3, 2e-2),
        ((BF16, BF16), 2e-3, 2e-2),
        ((FP8, FP32), 1e-2, 6e-2),
        # Where a second moment was rounded up to FP8's smallest value, a step is too short.
        ((FP32, FP8), 1e-2, 3e-1),
        ((FP8, FP8), 1.5e-2, 3e-1),
    ],
)
def test_formats_stay_near_fp32_with_bf16_gradients(
    modes: tuple[torch.dtype, torch.dtype], mean: float, largest: float
) -> None:
    """Mean and largest error against fp32 gradients and states, of weights that move by 7."""
    error = (_seven_large_steps(modes, BF16) - _seven_large_steps((FP32, FP32), FP32)).abs()
    assert 0 < error.mean() < mean
    assert error.max() < largest


@pytest.mark.native
@pytest.mark.parametrize("modes", [(FP8, FP8), (FP16, FP16), (BF16, BF16)])
def test_zero_gradients_leave_zero_states(modes: tuple[torch.dtype, torch.dtype]) -> None:
    """No scale of zero divides: five steps by zeros change nothing and give no NaN."""
    weight = nn.Parameter(torch.ones(20, 300))
    optimizer = FusedAdam([weight], exp_avg_dtype=modes[0], exp_avg_sq_dtype=modes[1])
    for _ in range(5):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    for kind in ("exp_avg", "exp_avg_sq"):
        assert not optimizer.get_unscaled_state(weight, kind).any()
        assert not optimizer.state[weight][kind].view(torch.uint8).any()
    assert torch.equal(weight.detach(), torch.ones(20, 300))


def _shares_meshes() -> None:
    net = shard(Net())
    optimizer = _optimizer(net, (FP8, BF16))
    with record_collectives() as record:
        _steps_on(net, optimizer, 1)
        num_collectives = sum(record.calls.values())
        optimizer.state_dict()
        for parameter in net.parameters():
            optimizer.get_unscaled_state(parameter, "exp_avg")
    assert sum(record.calls.values()) == num_collectives
    assert any(local_tensor(p).numel() == 0 for p in net.parameters())
    for parameter in net.parameters():
        state = optimizer.state[parameter]
        for kind in ("exp_avg", "exp_avg_sq"):
            for like in (state[kind], optimizer.get_unscaled_state(parameter, kind)):
                assert isinstance(like, UnevenDTensor)
                assert like.device_mesh == parameter.device_mesh
                assert like.placements == parameter.placements
                assert (like.shape, like.stride()) == (parameter.shape, parameter.stride())
                assert like.__create_chunk_list__() == parameter.__create_chunk_list__()
        assert state["step"] == 1


def test_states_are_dtensors_like_their_parameters(ranks: Ranks) -> None:
    """Mesh, placements, shape, strides and chunks; no collective; counts of steps where empty."""
    ranks(4).run(_shares_meshes)


def _counts_where_empty(directory: Path, modes: tuple[torch.dtype, torch.dtype]) -> int:
    """Return how many elements of the first unit this rank has."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 8))
    for unit in (net[0], net):
        fully_shard(unit)
    optimizer = _optimizer(net, modes)
    generator = torch.Generator().manual_seed(0)

    def steps_are(optimizer: FusedAdam, counts: list[int]) -> None:
        """Compare counts by parameter, as shown and as packed."""
        parameters = optimizer.param_groups[0]["params"]
        shown = [optimizer.state[parameter] for parameter in parameters]
        packed = optimizer.state_dict()["state"]
        for states in (shown, [packed[index] for index in range(len(parameters))]):
            assert [float(state["step"]) for state in states] == counts

    for step in range(3):
        net(torch.randn(4, 5, generator=generator)).square().sum().backward()
        if step == 1:
            # Some of a unit step by themselves.
            net[0].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
    counts = [3, 2, 3, 3]
    steps_are(optimizer, counts)
    save(directory, step=3, model=net, optimizer=optimizer)
    resumed = _optimizer(net, modes)
    load(directory, model=net, optimizer=resumed)
    steps_are(resumed, counts)
    net(torch.randn(4, 5, generator=generator)).square().sum().backward()
    resumed.step()
    steps_are(resumed, [count + 1 for count in counts])
    return sum(local_tensor(parameter).numel() for parameter in net[0].parameters())


def test_a_rank_without_elements_counts_steps_too(ranks: Ranks, tmp_path: Path) -> None:
    """Three rows on four ranks: whoever has none of a unit shows, packs and saves its steps."""
    cases = [(tmp_path / str(number), modes) for number, modes in enumerate(SOME_MODES)]
    for numels in zip(*ranks(4).run(for_each, _counts_where_empty, cases), strict=True):
        assert min(numels) == 0 < max(numels)


def test_states_of_plain_parameters_are_plain() -> None:
    """No DTensor appears where there was none; flat rows that are loaded get the shape."""
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.ones_like(weight)
    for mode in (FP32, BF16, FP8):
        optimizer = FusedAdam([weight], exp_avg_dtype=mode)
        optimizer.step()
        packed = optimizer.state_dict()
        states = {n: v.reshape(-1) if v.ndim else v for n, v in packed["state"][0].items()}
        optimizer.load_state_dict(packed | {"state": {0: states}})
        for kind in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[weight][kind]
            assert type(state) is torch.Tensor and state.shape == weight.shape
            assert torch.equal(optimizer.get_unscaled_state(weight, kind).view(-1), states[kind])


def _refuses_mixtures(is_named: bool) -> str:
    net = shard(Net())
    given = net.named_parameters() if is_named else net.parameters()
    optimizer = FusedAdam(given, use_decoupled_grad=True)
    second = net.blocks[1].up.weight
    second.decoupled_grad = torch.zeros(second.shape)
    with pytest.raises(RuntimeError, match="a gradient kept as its parameter") as error:
        optimizer.step()
    with pytest.raises(ValueError, match="fp32 values"):
        optimizer.set_scaled_state(second, "exp_avg", torch.zeros(1, dtype=BF16))
    return str(error.value)


@pytest.mark.parametrize("is_named", [True, False])
def test_mixtures_and_wrong_dtypes_are_refused(ranks: Ranks, is_named: bool) -> None:
    """The message names the parameter, shapes and types, not elements."""
    for message in ranks(2).run(_refuses_mixtures, is_named):
        assert "UnevenDTensor" in message or "Parameter" in message
        name = "'blocks.1.up.weight'" if is_named else "'up.weight' of unit"
        assert f"parameter {name}" in message and "shape (60, 12)" in message
        assert len(message) < 500


def test_messages_name_plain_parameters_that_came_with_names() -> None:
    """Sparse gradients and dtypes that are not stepped; without names there is the shape."""
    named = {name: nn.Parameter(torch.ones(3)) for name in ("good", "bad")}
    named["bad"].grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match=r"parameter 'bad' of shape \(3,\)"):
        FusedAdam(named.items()).step()
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(3,\)"):
        FusedAdam(named.values()).step()
    with pytest.raises(ValueError, match=r"parameter 'good' of shape \(3,\) in torch.float32"):
        FusedAdam(named.items(), store_param_remainders=True)
    named["bad"] = nn.Parameter(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"parameter 'bad' of shape \(3,\) in torch.float64"):
        FusedAdam(named.items())


def _takes_decoupled_grads() -> None:
    net, other = shard(Net()), shard(Net())
    ours = _optimizer(net, (FP32, FP32), use_decoupled_grad=True)
    wanted = _optimizer(other, (FP32, FP32))
    for model in (net, other):
        model(*mine(batches(1)[0])).backward()
    for parameter, twin in zip(net.parameters(), other.parameters(), strict=True):
        parameter.decoupled_grad = wrap_like(parameter, local_tensor(parameter.grad).bfloat16())
        parameter.grad = None
        local_tensor(twin.grad).copy_(local_tensor(parameter.decoupled_grad))
    ours.step()
    wanted.step()
    for parameter, twin in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(local_tensor(parameter), local_tensor(twin))


@pytest.mark.native
def test_decoupled_bf16_gradients_of_dtensors_step_as_fp32_ones(ranks: Ranks) -> None:
    """They are read in bf16, without a cast, and step as their fp32 values do."""
    ranks(2).run(_takes_decoupled_grads)


def _remainders_follow_fp32(strategy: str, compute: torch.dtype) -> None:
    policies = [MixedPrecisionPolicy(compute, main_params_dtype=main) for main in (BF16, FP32)]
    net, twin = (shard(_small(), mp_policy=policy, strategy=strategy) for policy in policies)
    with torch.no_grad():
        for parameter, other in zip(net.parameters(), twin.parameters(), strict=True):
            local_tensor(other).copy_(local_tensor(parameter))
    mark_main_weights_changed(twin)
    ours = _optimizer(net, (FP32, FP32), store_param_remainders=True)
    wanted = _optimizer(twin, (FP32, FP32))
    for step in range(3):
        for model in (net, twin):
            model(*mine(batches(1, seed=step)[0])).backward()
        for parameter, other in zip(net.parameters(), twin.parameters(), strict=True):
            local_tensor(other.grad).copy_(local_tensor(parameter.grad))
        for optimizer in (ours, wanted):
            optimizer.step()
            optimizer.zero_grad()
    for parameter, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert parameter.dtype == BF16
        assert ours.state[parameter]["param_remainder"].dtype == torch.int16
        weight = ours.canonical_weight(parameter)
        assert isinstance(weight, UnevenDTensor) or strategy == "no_shard"
        assert torch.equal(local_tensor(weight), local_tensor(other.detach()))
    with torch.no_grad():
        loss = net(*mine(batches(1)[0]))
        mark_main_weights_changed(net)
        assert torch.equal(loss, net(*mine(batches(1)[0]))), "forward reads the new main weights"
    assert any(local_tensor(ours.state[p]["param_remainder"]).any() for p in net.parameters())


@pytest.mark.native
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_remainders_make_fp32_weights_of_bf16_parameters(ranks: Ranks, strategy: str) -> None:
    """Bits of parameter and remainder are those of fp32 main weights with the same gradients.

    Whatever the weights compute in, and the next forward reads casts of the new ones.
    """
    cases = [(strategy, compute) for compute in (BF16, FP16, FP32)]
    ranks(2).run(for_each, _remainders_follow_fp32, cases)


def _wide_storage(net: nn.Module, optimizer: FusedAdam) -> set[torch.dtype]:
    return {local_tensor(t).dtype for t in net.parameters()} | {
        s.dtype for state in optimizer.state.values() for n, s in state.items() if n != "step"
    }


def _has_no_second_weight() -> None:
    net = shard(Net())
    optimizer = _optimizer(net, (FP32, FP32))
    _steps_on(net, optimizer, 1)
    assert all(set(s) == {"step", "exp_avg", "exp_avg_sq"} for s in optimizer.state.values())
    narrow = shard(Net(), mp_policy=ALL_BF16)
    optimizer = _optimizer(narrow, (BF16, BF16), store_param_remainders=True)
    _steps_on(narrow, optimizer, 1)
    assert _wide_storage(narrow, optimizer) == {BF16, torch.int16}


def test_weights_are_stored_once(ranks: Ranks) -> None:
    """fp32 parameters have no copy in the states; with remainders nothing is fp32."""
    ranks(2).run(_has_no_second_weight)


def test_nans_that_are_loaded_into_remainders_stay_nans() -> None:
    """Also those of which the upper half alone, or rounded, is infinity or zero."""
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -0x7FFFFF, -1], dtype=torch.int32)
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = FusedAdam([weight], store_param_remainders=True)
    optimizer.load_canonical(weight, bits.view(torch.float32))
    assert weight.isnan().all() and optimizer.canonical_weight(weight).isnan().all()


@pytest.mark.native
def test_remainders_of_plain_parameters_and_refusals() -> None:
    """Transposed bf16 parameters too; fp32 ones are refused, in groups added later as well."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(40, 30).bfloat16().t())
    wide = nn.Parameter(weight.detach().float().clone())
    ours = FusedAdam([weight], lr=1e-3, store_param_remainders=True)
    wanted = FusedAdam([wide], lr=1e-3)
    for _ in range(5):
        weight.grad = torch.randn_like(weight)
        wide.grad = weight.grad.float()
        ours.step()
        wanted.step()
    assert torch.equal(ours.canonical_weight(weight), wide.detach())
    with pytest.raises(ValueError, match="bf16 parameters with store_param_remainders"):
        FusedAdam([wide], store_param_remainders=True)
    with pytest.raises(ValueError, match="bf16 parameters with store_param_remainders"):
        ours.add_param_group({"params": [wide]})


def test_halves_of_every_kind_of_number_join_to_the_same_bits() -> None:
    """Every low half beside high halves of zeros, ties, denormals, the largest and infinities."""
    highs = [0x0000, 0x8000, 0x0001, 0x8001, 0x0080, 0x3F80, 0xBF80, 0x3F81, 0x7F7F, 0xFF7F]
    lows = torch.arange(1 << 16, dtype=torch.int64)
    for high in highs:
        bits = (high << 16) + lows
        bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
        values = bits.view(FP32)
        upper, lower = reference.fp32_to_halves(values)
        joined = reference.halves_to_fp32(upper, lower)
        assert torch.equal(joined.view(torch.int32), bits), hex(high)
        # The half that computes is the nearest bf16, ties away from zero.
        nearest = values.bfloat16()
        is_tie = lows == 0x8000
        assert torch.equal(upper[~is_tie].view(torch.int16), nearest[~is_tie].view(torch.int16))
    infinite = torch.tensor([torch.inf, -torch.inf])
    assert torch.equal(reference.halves_to_fp32(*reference.fp32_to_halves(infinite)), infinite)
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(FP32)
    halves = reference.fp32_to_halves(reference.plain_nans(nans))
    assert reference.halves_to_fp32(*halves).isnan().all()
    assert halves[0].isnan().all()


def _resumes(directory: Path, kind: str, modes: tuple[torch.dtype, torch.dtype]) -> None:
    going, resumed = shard(_small()), shard(_small(seed=1))
    optimizer, other = (_optimizer(net, modes) for net in (going, resumed))
    _steps_on(going, optimizer, 2)
    # A load also replaces what is there.
    _steps_on(resumed, other, 1, seed=5)
    if kind == "state_dict":
        resumed.load_state_dict(going.state_dict())
        packed = copy.deepcopy(optimizer.state_dict())
        for state in packed["state"].values():
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == FP32
            assert isinstance(state["exp_avg"], UnevenDTensor)
        other.load_state_dict(packed)
    elif kind == "local":
        resumed.load_state_dict(going.state_dict())
        packed = copy.deepcopy(optimizer.state_dict())
        for state in packed["state"].values():
            state["exp_avg"] = local_tensor(state["exp_avg"]).clone()
        other.load_state_dict(packed)
    else:
        save(directory, step=2, model=going, optimizer=optimizer)
        load(directory, model=resumed, optimizer=other)
    for parameter in resumed.parameters():
        for name, mode in zip(("exp_avg", "exp_avg_sq"), modes, strict=True):
            state = other.state[parameter][name]
            assert state.dtype == dtype_for(parameter.shape, mode)
            assert state.__create_chunk_list__() == parameter.__create_chunk_list__()
    _steps_on(going, optimizer, 2, seed=1)
    _steps_on(resumed, other, 2, seed=1)
    for (name, ours), theirs in zip(resumed.named_parameters(), going.parameters(), strict=True):
        assert torch.equal(local_tensor(ours), local_tensor(theirs)), name


@pytest.mark.parametrize("kind", ["state_dict", "local", "checkpoint"])
def test_narrow_states_resume_bit_by_bit(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """State dicts and checkpoints have fp32 moments; encoding them again changes nothing."""
    cases = [(tmp_path / str(number), kind, modes) for number, modes in enumerate(SOME_MODES)]
    ranks(2).run(for_each, _resumes, cases)


def _saves(directory: Path, modes: tuple[torch.dtype, torch.dtype]) -> dict[str, torch.Tensor]:
    net = shard(_small())
    optimizer = _optimizer(net, modes)
    _steps_on(net, optimizer, 2)
    save(directory, step=2, model=net, optimizer=optimizer)
    return _full_states(net, optimizer)


def _loads(directory: Path, modes: tuple[torch.dtype, torch.dtype]) -> dict[str, torch.Tensor]:
    net = shard(_small(seed=1))
    optimizer = _optimizer(net, modes)
    load(directory, model=net, optimizer=optimizer)
    return _full_states(net, optimizer)


def _full_states(net: nn.Module, optimizer: FusedAdam) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{kind}": full_tensor(optimizer.get_unscaled_state(parameter, kind))
        for name, parameter in net.named_parameters()
        for kind in ("exp_avg", "exp_avg_sq")
    }


def test_checkpoints_load_on_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Saved on four, loaded on two and on one; into fp32 states as well."""
    cases = [(tmp_path / str(number), modes) for number, modes in enumerate(SOME_MODES)]
    saved = ranks(4).run(for_each, _saves, cases)[0]
    for directory, _ in cases:
        sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
        assert len(sizes) >= 4 and max(sizes) < sum(sizes) / 2, "each rank has written its rows"
    into_fp32 = [(directory, (FP32, FP32)) for directory, _ in cases]
    for num_ranks, wished in ((2, cases), (1, cases), (1, into_fp32)):
        found = ranks(num_ranks).run(for_each, _loads, wished)[0]
        for loaded, wanted, case in zip(found, saved, wished, strict=True):
            assert loaded.keys() == wanted.keys(), case
            for name, value in loaded.items():
                assert torch.equal(value, wanted[name]), (name, case)


def _changes_its_weights(directory: Path) -> None:
    narrow = shard(_small(), mp_policy=ALL_BF16)
    optimizer = _optimizer(narrow, (FP32, FP32), store_param_remainders=True)
    _steps_on(narrow, optimizer, 3)
    weights = {n: full_tensor(optimizer.canonical_weight(p)) for n, p in narrow.named_parameters()}
    save(directory / "narrow", step=3, model=narrow, optimizer=optimizer)

    wide = shard(_small(seed=1), mp_policy=FP32_MAIN)
    wide_optimizer = _optimizer(wide, (FP32, FP32))
    load(directory / "narrow", model=wide, optimizer=wide_optimizer)
    for name, parameter in wide.named_parameters():
        assert torch.equal(full_tensor(parameter.detach()), weights[name]), name
    save(directory / "wide", step=3, model=wide, optimizer=wide_optimizer)

    for source in ("narrow", "wide"):
        again = shard(_small(seed=2), mp_policy=ALL_BF16)
        other = _optimizer(again, (FP32, FP32), store_param_remainders=True)
        load(directory / source, model=again, optimizer=other)
        for (name, parameter), own in zip(
            again.named_parameters(), narrow.parameters(), strict=True
        ):
            assert torch.equal(full_tensor(other.canonical_weight(parameter)), weights[name])
            assert torch.equal(local_tensor(parameter), local_tensor(own))
        loss = again(*mine(batches(1)[0]))
        assert torch.equal(loss, narrow(*mine(batches(1)[0])))

    packed = copy.deepcopy(optimizer.state_dict())
    again = shard(_small(seed=3), mp_policy=ALL_BF16)
    again.load_state_dict(narrow.state_dict())
    other = _optimizer(again, (FP32, FP32), store_param_remainders=True)
    other.load_state_dict(packed)
    for name, parameter in again.named_parameters():
        assert torch.equal(full_tensor(other.canonical_weight(parameter)), weights[name])

    bare = shard(_small(), mp_policy=ALL_BF16)
    with pytest.raises(CheckpointError, match="bfloat16"):
        load(directory / "wide", model=bare)
    load(directory / "wide", model=bare, strict="none")
    for name, parameter in bare.named_parameters():
        assert torch.equal(full_tensor(parameter.detach()), weights[name].bfloat16()), name


def test_fp32_weights_load_into_remainders_and_back(ranks: Ranks, tmp_path: Path) -> None:
    """Checkpoints hold the joined fp32 weight, whichever way the weight was kept."""
    ranks(2).run(_changes_its_weights, tmp_path)


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("has_remainders", [False, True])
def test_copies_and_pickles_step_on_as_the_optimizer_does(
    dtype: torch.dtype, has_remainders: bool
) -> None:
    """With its options and the scales and remainders of its states."""
    kind = torch.bfloat16 if has_remainders else torch.float32
    first = nn.Parameter(torch.randn(5, 130).to(kind))
    optimizer = FusedAdam(
        [first],
        lr=0.1,
        weight_decay=0.1,
        adam_w_mode=False,
        exp_avg_dtype=dtype,
        exp_avg_sq_dtype=dtype,
        store_param_remainders=has_remainders,
        max_grad_norm=3.0,
    )
    first.grad = torch.randn(5, 130).to(kind)
    optimizer.step()
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    assert all(torch.equal(each.grad_norm, optimizer.grad_norm) for each in copies)
    grad = torch.randn(5, 130).to(kind)
    for each in (optimizer, *copies):
        (parameter,) = each.param_groups[0]["params"]
        parameter.grad = grad.clone()
        each.step()
    for each in copies:
        (parameter,) = each.param_groups[0]["params"]
        assert parameter is not first
        assert torch.equal(parameter, first)
        assert torch.equal(each.grad_norm, optimizer.grad_norm)
        for name, value in optimizer.state_dict()["state"][0].items():
            assert torch.equal(each.state_dict()["state"][0][name], value), name
            assert each.state[parameter][name].dtype == optimizer.state[first][name].dtype


def _copies_sharded() -> None:
    _, net = pair()
    optimizer = FusedAdam(net.parameters(), lr=0.1, exp_avg_dtype=torch.bfloat16)
    net(*mine(batches(1)[0])).backward()
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    for each in (optimizer, copied):
        each.step()
    moved = zip(net.parameters(), copied.param_groups[0]["params"], strict=True)
    assert all(torch.equal(local_tensor(a), local_tensor(b)) for a, b in moved)


def test_copies_of_sharded_parameters_step_by_themselves(ranks: Ranks) -> None:
    """They have the rows and gradients of their own that copied parameters have."""
    ranks(2).run(_copies_sharded)


def test_an_optimizer_with_states_on_the_host_is_not_copied() -> None:
    """Threads and host memory are its own."""
    optimizer = HybridDeviceOptimizer([nn.Parameter(torch.ones(3))])
    for copies in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"state_dict\(\)"):
            copies(optimizer)


@pytest.mark.parametrize("kind", [FusedAdam, Muon, torch.optim.AdamW])
def test_hooks_of_a_load_see_states(kind: type[torch.optim.Optimizer]) -> None:
    """The first may replace the state dict that is loaded, the last finds it loaded."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = kind([{"params": [weight], "use_muon": False}])
    weight.grad = torch.ones(4)
    optimizer.step()
    packed = copy.deepcopy(optimizer.state_dict())
    seen: list[torch.Tensor] = []

    def renames(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        states = {i: dict(state) for i, state in given["state"].items()}
        for state in states.values():
            state["exp_avg"] = 2 * state.pop("old_name")
        return given | {"state": states}

    packed["state"][0]["old_name"] = packed["state"][0].pop("exp_avg")
    optimizer.register_load_state_dict_pre_hook(renames)
    optimizer.register_load_state_dict_post_hook(
        lambda loaded: seen.append(loaded.state[weight]["exp_avg"].clone())
    )
    before = optimizer.state[weight]["exp_avg"].clone()
    optimizer.load_state_dict(packed)
    assert torch.equal(optimizer.state[weight]["exp_avg"], 2 * before)
    assert len(seen) == 1 and torch.equal(seen[0], 2 * before)
    assert "old_name" in packed["state"][0]


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Adamax, torch.optim.SGD])
def test_states_of_another_kind_are_refused(kind: type[torch.optim.Optimizer]) -> None:
    """What has no place here would be dropped, and the moments begin at zero, without a word."""
    weight = torch.nn.Parameter(torch.ones(4))
    other = kind([weight], **({"lr": 0.1, "momentum": 0.9} if kind is torch.optim.SGD else {}))
    weight.grad = torch.ones(4)
    other.step()
    optimizer = FusedAdam([weight])
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"got a state '\w+'.*parameter 0 of a loaded"):
        optimizer.load_state_dict(other.state_dict())
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert torch.equal(before["state"][0]["exp_avg"], after["state"][0]["exp_avg"])


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_a_decay_of_the_other_kind_is_refused(adam_w_mode: bool) -> None:
    """Nothing in this class's groups could say it; without a decay there is no difference."""
    weight = torch.nn.Parameter(torch.ones(4))
    kind = torch.optim.Adam if adam_w_mode else torch.optim.AdamW
    optimizer = FusedAdam([weight], adam_w_mode=adam_w_mode)
    with pytest.raises(ValueError, match=rf"FusedAdam\(adam_w_mode={not adam_w_mode}\)"):
        optimizer.load_state_dict(kind([weight], weight_decay=0.1).state_dict())
    optimizer.load_state_dict(kind([weight], weight_decay=0).state_dict())
    assert optimizer.param_groups[0]["weight_decay"] == 0
    # Its own state dict says it to torch's Adam, whose groups can.
    theirs = torch.optim.Adam([weight])
    theirs.load_state_dict(optimizer.state_dict())
    assert theirs.param_groups[0]["decoupled_weight_decay"] is adam_w_mode
