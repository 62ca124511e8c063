"""FusedAdam is torch's Adam over flat buffers, whatever is sharded and however states are kept."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megafsdp import (
    FusedAdam,
    MixedPrecisionPolicy,
    Muon,
    full_state_dict,
    full_tensor,
    fully_shard,
    load_full_state_dict,
)
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, local_tensor
from megafsdp.checkpoint import load, save
from megafsdp.fsdp.params import gather_sources
from megafsdp.optimizer.kernels.adam_kernel import AdamKernel
from megafsdp.optimizer.offload.placement import groups_of
from megafsdp.optimizer.states.formats import ScaledState
from tests.fsdp.toy import (
    Net,
    adamw,
    assert_same_parameters,
    batches,
    mine,
    pair,
    shard,
    train_both,
)
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp", "hfsdp")


def _options(strategy: str) -> dict[str, object]:
    if strategy in ("hsdp", "hfsdp"):
        shape = (2, dist.get_world_size() // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
        return {"mesh": mesh, "outer_strategy": "optim" if strategy == "hfsdp" else "no_shard"}
    return {"strategy": strategy}


def _fused(net: nn.Module, **options: object) -> FusedAdam:
    return FusedAdam(net.parameters(), lr=1e-2, eps=1e-5, **{"weight_decay": 0.01} | options)


def _trains_like_torch(strategy: str) -> None:
    reference, net = pair(1, **_options(strategy))
    rows = [p.detach().clone() for p in reference.parameters()]
    optimizers = iter([adamw, _fused])
    losses = train_both(
        reference,
        net,
        num_steps=3,
        num_microbatches=2,
        make_optimizer=lambda model: next(optimizers)(model),
    )
    for loss, wanted in losses:
        assert loss == pytest.approx(wanted, rel=1e-5)
    assert_same_parameters(net, reference, rtol=1e-4, atol=1e-5)
    assert not any(torch.equal(a, b) for a, b in zip(rows, reference.parameters(), strict=True))


@pytest.mark.native
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sharded_models_train_as_one_process_with_adamw(ranks: Ranks, strategy: str) -> None:
    """Three steps of FusedAdam on two or four ranks against torch's AdamW on one."""
    ranks(4 if strategy == "hfsdp" else 2).run(_trains_like_torch, strategy)


def _casts_after_a_step(strategy: str) -> int:
    """Return how many casts the units make in a forward after a step."""
    net = shard(Net(num_blocks=1), mp_policy=BF16, **_options(strategy))
    optimizer = _fused(net)
    net(*mine(batches(1)[0])).backward()
    optimizer.step()
    num_casts = 0
    inner = gather_sources.copy_pieces

    def counted(*arguments: Any) -> None:
        nonlocal num_casts
        num_casts += 1
        inner(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_sources, "copy_pieces", counted)
        net(*mine(batches(1)[0]))
    return num_casts


@pytest.mark.native
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "no_shard", "hfsdp"])
def test_what_the_step_has_cast_is_not_cast_again(ranks: Ranks, strategy: str) -> None:
    """Where a cast is made once a step, the step has made it."""
    assert set(ranks(4 if strategy == "hfsdp" else 2).run(_casts_after_a_step, strategy)) == {0}


def _bf16_steps(strategy: str) -> tuple[list[torch.Tensor], list[int]]:
    net = shard(Net(num_blocks=1), mp_policy=BF16, **_options(strategy))
    optimizer = _fused(net)
    losses, gathers = [], []
    for step in range(3):
        with record_collectives() as record:
            loss = net(*mine(batches(1, seed=step)[0]))
            loss.backward()
        losses.append(loss.detach())
        gathers.append(record.calls["all_gather"])
        optimizer.step()
        optimizer.zero_grad()
    return losses, gathers


@pytest.mark.native
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compute_weights_written_by_the_step_are_the_casts(ranks: Ranks, strategy: str) -> None:
    """With and without the copy-out of the kernel, losses are equal bit by bit."""
    ranks(4 if strategy == "hfsdp" else 2).run(_written_and_cast_agree, strategy)


def _written_and_cast_agree(strategy: str) -> None:
    (losses, gathers), (wanted, wanted_gathers) = (
        steps(strategy) for steps in (_bf16_steps, _without_copy_out)
    )
    assert gathers == wanted_gathers
    assert all(torch.equal(a, b) for a, b in zip(losses, wanted, strict=True))


def _casts_that_are_out_of_date(strategy: str) -> None:
    net, other = (shard(Net(seed=seed), mp_policy=BF16, **_options(strategy)) for seed in (0, 1))
    optimizer, batch = _fused(net), mine(batches(1)[0])

    def assert_forward_reads_main_weights() -> None:
        load_full_state_dict(other, full_state_dict(net))
        with torch.no_grad():
            assert torch.equal(net(*batch), other(*batch))

    net(*batch).backward()
    optimizer.step()
    net.blocks[0].unshard(async_op=True)
    optimizer.step()
    assert_forward_reads_main_weights()
    optimizer.step()
    load_full_state_dict(net, {name: 2 * value for name, value in full_state_dict(net).items()})
    assert_forward_reads_main_weights()


@pytest.mark.native
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_casts_that_a_step_has_written_give_way_to_later_changes(
    ranks: Ranks, strategy: str
) -> None:
    """To those of a step while an earlier cast is on its way, and to those of a load."""
    ranks(2).run(_casts_that_are_out_of_date, strategy)


def _without_copy_out(strategy: str) -> tuple[list[torch.Tensor], list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "megafsdp.fsdp.params.cast_weight.CastWeight.start_encoding", lambda weight: None
        )
        return _bf16_steps(strategy)


def _num_runs(net: Net) -> int:
    """Return how many runs matrices and vectors form where this rank holds them side by side."""
    num_runs = 0
    for group in groups_of(net.parameters()):
        own = [(group.main_weight.tensor(i), p) for i, p in enumerate(group.parameters)]
        held = sorted((t.storage_offset(), len(p.shape) > 1) for t, p in own if t.numel())
        kinds = [is_matrix for _, is_matrix in held]
        num_runs += sum(a != b for a, b in itertools.pairwise([None, *kinds]))
    return num_runs


def test_kernels_are_looked_for_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user learns before the first step that there are none for a device, each asked once."""
    asked: list[torch.device] = []
    monkeypatch.setattr("megafsdp.optimizer.adam.fused_adam.usable_module", asked.append)
    weights = [nn.Parameter(torch.ones(3, device=device)) for device in ("cpu", "cpu", "meta")]
    optimizer = FusedAdam(weights[:2])
    assert asked == [torch.device("cpu")]
    optimizer.add_param_group({"params": weights[2:]})
    assert asked == [torch.device("cpu"), torch.device("meta")]


def _launches() -> tuple[int, int, int]:
    net = shard(Net())
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim < 2]
    optimizer = FusedAdam([{"params": decayed, "weight_decay": 0.1}, {"params": others}])
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            AdamKernel, "__call__", lambda kernel, buffers, runs, step: calls.append(len(runs))
        )
        net(*mine(batches(1)[0])).backward()
        optimizer.step()
        split = sum(calls)
        calls.clear()
        _fused(net).step()
    return split, sum(calls), _num_runs(net)


def test_a_group_is_one_launch(ranks: Ranks) -> None:
    """Four units are four launches; parameter groups that alternate cut them into runs."""
    answers = ranks(2).run(_launches)
    assert [whole for _, whole, _ in answers] == [4, 4]
    assert all(split == num_runs for split, _, num_runs in answers)
    assert max(split for split, _, _ in answers) > 4, "some shard holds matrices and vectors"


def _keeps_states(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    net = shard(Net(num_blocks=1))
    optimizer = _fused(net, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    net(*mine(batches(1)[0])).backward()
    for _ in range(3):
        for parameter in net.parameters():
            # Gradients that no sum over ranks has rounded.
            parameter.grad.copy_from_full_(torch.randn(parameter.shape, generator=generator))
        optimizer.step()
    states = {}
    for name, parameter in net.named_parameters():
        is_plain = parameter.ndim < 2 and dtype is not torch.bfloat16
        for kind in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[parameter][kind]
            assert isinstance(state, UnevenDTensor) and state.shape == parameter.shape
            assert state.dtype == (torch.float32 if is_plain else dtype)
            values = optimizer.get_unscaled_state(parameter, kind)
            states[f"{name}.{kind}"] = full_tensor(values)
            optimizer.set_scaled_state(parameter, kind, values)
            again = optimizer.get_unscaled_state(parameter, kind)
            assert torch.equal(local_tensor(again), local_tensor(values))
            wanted = local_tensor(values).clone()
            # A copy, also of a state in fp32.
            local_tensor(again).fill_(-1.0)
            kept = optimizer.get_unscaled_state(parameter, kind)
            assert torch.equal(local_tensor(kept), wanted)
        states[name] = full_tensor(parameter.detach())
    return states


@pytest.mark.native
@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_states_are_near_fp32_and_do_not_depend_on_the_mesh(
    ranks: Ranks, dtype: torch.dtype
) -> None:
    """One rank and three hold the same states, bit by bit."""
    alone = ranks(1).run(_keeps_states, dtype)[0]
    for divided in ranks(3).run(_keeps_states, dtype):
        assert divided.keys() == alone.keys()
        for name, value in divided.items():
            assert torch.equal(value, alone[name]), name
    exact = ranks(1).run(_keeps_states, torch.float32)[0]
    # Three steps of at most 1e-2 each, off by 2 ** -4 (FP8), 2 ** -9 (bf16), 2 ** -12 (fp16).
    tolerance = {torch.float8_e4m3fn: 4e-3, torch.bfloat16: 2e-4, torch.float16: 2e-5}[dtype]
    for name, value in alone.items():
        if not name.endswith(("exp_avg", "exp_avg_sq")):
            torch.testing.assert_close(value, exact[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_scaled_states_are_stable_and_keep_zeros(dtype: torch.dtype) -> None:
    """Encoding what was decoded changes no byte; blocks of zeros and of denormals stay zero."""
    generator = torch.Generator().manual_seed(0)
    state = ScaledState.zeros(20, 300, dtype, torch.device("cpu"))
    assert not state.decode().any()
    for exponent in range(-45, 30, 5):
        values = torch.randn(20, 300, generator=generator) * 10.0**exponent
        values[3] = 0.0
        state.encode(values)
        decoded, codes = state.decode(), state.codes.view(torch.uint8).clone()
        assert not decoded[3].any() and bool(decoded.isfinite().all())
        state.encode(decoded)
        assert torch.equal(state.codes.view(torch.uint8), codes)
        if exponent > -34:
            error = (decoded - values).abs().max() / values.abs().max()
            assert error < (2e-3 if dtype is torch.float16 else 0.07)


def _mixed() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    ours, theirs, plain = (copy.deepcopy(base) for _ in range(3))
    fully_shard(ours)
    torch_fully_shard(theirs)
    models = [ours, theirs, plain]
    optimizer = FusedAdam([p for m in models for p in m.parameters()], lr=1e-2, weight_decay=0.1)
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for model in models:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = plain.state_dict()
    assert not torch.equal(wanted["0.weight"], base.state_dict()["0.weight"])
    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(full_tensor(parameter.detach()), wanted[name])


def test_megafsdp_fsdp2_and_plain_parameters_share_an_optimizer(ranks: Ranks) -> None:
    """One optimizer, three ways of keeping parameters, one result."""
    ranks(2).run(_mixed)


def _resumes(directory: Path, kind: str) -> None:
    batches_ = [mine(b) for b in batches(4)]

    def steps(net: Net, optimizer: torch.optim.Optimizer, of: list) -> None:
        for batch in of:
            net(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    going = shard(Net(num_blocks=1))
    optimizer = _fused(going)
    steps(going, optimizer, batches_[:2])
    resumed = shard(Net(num_blocks=1, seed=1))
    other = _fused(resumed) if kind != "torch" else adamw(resumed)
    if kind == "state_dict":
        resumed.load_state_dict(going.state_dict())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        save(directory, step=2, model=going, optimizer=optimizer)
        load(directory, model=resumed, optimizer=other, strict="model")
    steps(going, optimizer, batches_[2:])
    steps(resumed, other, batches_[2:])
    wanted = full_state_dict(going)
    for name, value in full_state_dict(resumed).items():
        if kind == "torch":
            torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(value, wanted[name]), name
    storage = {p.untyped_storage().data_ptr() for p in _local_states(other)}
    assert kind == "torch" or len(storage) == 2 * 2


def _local_states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [s for state in optimizer.state.values() for n, s in state.items() if n != "step"]
    return [local for local in map(local_tensor, states) if local.numel()]


@pytest.mark.parametrize("kind", ["state_dict", "checkpoint", "torch"])
def test_states_load_into_flat_buffers_and_into_torch(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """A resumed run goes on bit by bit; torch's AdamW goes on from FusedAdam's checkpoint."""
    ranks(2).run(_resumes, tmp_path, kind)


def _clips_in_the_step() -> None:
    reference, net = pair()
    optimizers = [adamw(reference), _fused(net, max_grad_norm=0.3)]
    for step in range(3):
        batch = batches(1, seed=step)[0]
        reference(*batch).backward()
        net(*mine(batch)).backward()
        before = [local_tensor(p.grad).clone() for p in net.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
        assert norm > 0.3
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(optimizers[1].grad_norm, norm)
        after = [local_tensor(p.grad) for p in net.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert_same_parameters(net, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.native
def test_the_step_clips_by_the_norm_of_all_gradients(ranks: Ranks) -> None:
    """As clip_grad_norm_ before the step, without a pass over the gradients."""
    ranks(2).run(_clips_in_the_step)


def _scales_with_torch() -> None:
    reference, net = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = [adamw(reference), _fused(net)]
    for step in range(3):
        batch = batches(1, seed=step)[0]
        reference(*batch).backward()
        scaler.scale(net(*mine(batch))).backward()
        if step == 1:
            optimizers[1].zero_grad()
            scaler.scale(net(*mine(batch)) * float("inf")).backward()
        else:
            optimizers[0].step()
        scaler.step(optimizers[1])
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert_same_parameters(net, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.native
def test_torchs_gradient_scaler_unscales_inside_the_step(ranks: Ranks) -> None:
    """A step whose gradients are not finite is left out."""
    ranks(2).run(_scales_with_torch)


@pytest.mark.native
@pytest.mark.parametrize("capturable", [False, True])
def test_torchs_gradient_scaler_steps_an_optimizer_without_gradients(capturable: bool) -> None:
    """As a discriminator's, whose turn it is not; torch's fused AdamW takes it too."""
    used, unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizers = [FusedAdam([p], lr=0.5, capturable=capturable) for p in (used, unused)]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(used.sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(used, torch.full((3,), 0.5))
    assert torch.equal(unused, torch.ones(3))


def _unlike() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    shapes = [(7, 5), (4,), (), (3, 2, 2)]
    made = [torch.randn(s) for s in shapes]
    made.append(torch.randn(6, 4).t())

    made.append(torch.randn(5, 3).bfloat16())
    return [(nn.Parameter(t.clone()), nn.Parameter(t.clone())) for t in made]


@pytest.mark.native
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_plain_parameters_of_any_shape_and_layout_match_torch(adam_w_mode: bool) -> None:
    """0-d, transposed and bf16 parameters; coupled decay is torch.optim.Adam's."""
    pairs = _unlike()
    ours = FusedAdam(
        [a for a, _ in pairs], lr=1e-2, eps=1e-5, weight_decay=0.1, adam_w_mode=adam_w_mode
    )
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    theirs = kind([b for _, b in pairs], lr=1e-2, eps=1e-5, weight_decay=0.1)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (ours, theirs)]
    for _ in range(4):
        for a, b in pairs:
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        ours.step()
        theirs.step()
        for scheduler in schedulers:
            scheduler.step()
    for a, b in pairs:
        # In bf16 torch rounds every intermediate; ours rounds once a step: one unit in 2 ** -8.
        is_narrow = a.dtype is torch.bfloat16
        torch.testing.assert_close(
            a, b, rtol=1.6e-2 if is_narrow else 1e-5, atol=2e-2 if is_narrow else 1e-6
        )


class _Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x).square().sum() + 3 * self.right(x).sum()


def _swaps_gradients() -> None:
    found = []
    for is_sharded in (False, True):
        net = _Twins()
        if is_sharded:
            fully_shard(net)
        kind = FusedAdam if is_sharded else torch.optim.AdamW
        optimizer = kind(net.parameters(), lr=0.1, weight_decay=0.0)
        for step in range(3):
            net(torch.ones(2, 6)).backward()
            if step == 1:
                for own, other in zip(net.left.parameters(), net.right.parameters(), strict=True):
                    own.grad, other.grad = other.grad, own.grad
            if step == 2:
                # As a user may, between steps: a tensor of its own in the place of the state.
                state = optimizer.state[net.left.weight]
                state["exp_avg"] = torch.ones_like(net.left.weight).detach()
            optimizer.step()
            optimizer.zero_grad()
        found.append([full_tensor(parameter.detach()) for parameter in net.parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_gradients_that_were_swapped_and_states_that_were_replaced_count(ranks: Ranks) -> None:
    """A step reads what parameters and states have, wherever it lies in flat buffers."""
    ranks(2).run(_swaps_gradients)


def _swaps_gradients_of_other_rows(optimizer_class: Callable[..., torch.optim.Optimizer]) -> None:
    net = fully_shard(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    optimizer = optimizer_class(net.parameters(), lr=0.1)
    net(torch.ones(2, 6)).square().sum().backward()
    before = full_state_dict(net)
    first, second = net[0].weight, net[1].weight
    first.grad, second.grad = second.grad, first.grad
    with pytest.raises(RuntimeError, match="cut between other rows"):
        optimizer.step()
    after = full_state_dict(net)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    # All gradients of a unit, in the same places of another unit's buffer.
    own = fully_shard(nn.Linear(6, 6, bias=False))
    other = fully_shard(nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 60)))
    optimizer = optimizer_class(own.parameters(), lr=0.1)
    for unit in (own, other):
        unit(torch.ones(2, 6)).square().sum().backward()
    own.weight.grad = other[0].weight.grad
    with pytest.raises(RuntimeError, match="cut between other rows"):
        optimizer.step()


@pytest.mark.parametrize("optimizer_class", [FusedAdam, Muon])
def test_gradients_of_other_rows_are_refused_on_all_ranks(
    ranks: Ranks, optimizer_class: Callable[..., torch.optim.Optimizer]
) -> None:
    """Each of two ranks has one layer, and the gradients of the other."""
    ranks(2).run(_swaps_gradients_of_other_rows, optimizer_class)


class _Maps(nn.Module):
    def __init__(self, num_rows: int) -> None:
        super().__init__()
        torch.manual_seed(num_rows)
        self.first, self.second = nn.Linear(6, num_rows), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).square().sum() + self.second(x).square().sum()


def _swaps_gradients_of_units() -> None:
    found = []
    for is_sharded in (False, True):
        net = nn.ModuleList([_Maps(3), _Maps(7)])
        if is_sharded:
            for unit in net:
                fully_shard(unit)
        optimizer = (FusedAdam if is_sharded else torch.optim.AdamW)(net.parameters(), lr=0.1)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        for unit in net:
            unit(torch.ones(2, 6)).backward()
        left, right = (unit.second.weight for unit in net)
        left.grad, right.grad = right.grad, left.grad
        optimizer.step()
        found.append([full_tensor(parameter.detach()) for parameter in net.parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_gradients_that_units_have_swapped_count(ranks: Ranks) -> None:
    """They lie in buffers that are laid out in another way."""
    ranks(1).run(_swaps_gradients_of_units)


def test_unused_parameters_keep_their_step_count() -> None:
    """A parameter without a gradient is left alone, and catches up by its own count."""
    a, b = (nn.Parameter(torch.ones(40, 4)) for _ in range(2))
    optimizer = FusedAdam([a, b], lr=0.1)
    for step in range(3):
        a.grad = torch.ones_like(a)
        b.grad = torch.ones_like(b) if step == 2 else None
        optimizer.step()
    assert (optimizer.state[a]["step"], optimizer.state[b]["step"]) == (3, 1)
    torch.testing.assert_close(b.detach(), torch.full((40, 4), 0.9), rtol=1e-6, atol=1e-6)


def _refuses() -> None:
    """Numbers, dtypes, sparse gradients and mixtures of DTensors and plain gradients."""
    parameter = nn.Parameter(torch.ones(3))
    for options, words in (
        ({"lr": -1.0}, "lr of FusedAdam"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"eps": -1.0}, "eps"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"exp_avg_dtype": torch.int8}, "exp_avg_dtype"),
    ):
        with pytest.raises(ValueError, match=words):
            FusedAdam([parameter], **options)
    model = nn.Linear(3, 3)
    stale = FusedAdam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    stale.step()
    fully_shard(model)
    with pytest.raises(ValueError, match="Build the optimizer after fully_shard"):
        stale.step()
    parameter.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="a dense gradient"):
        FusedAdam([parameter]).step()


def test_what_has_no_meaning_is_refused(ranks: Ranks) -> None:
    """Numbers, dtypes, replaced parameters, sparse gradients."""
    ranks(1).run(_refuses)


def test_a_group_that_is_refused_is_not_added() -> None:
    """What FusedAdam cannot step is told at once, and leaves the optimizer as it was."""
    optimizer = FusedAdam([nn.Parameter(torch.ones(3))])
    other = nn.Parameter(torch.ones(3))
    for options, words in (
        ({"maximize": True}, "got {'maximize': True}"),
        ({"amsgrad": True}, "got {'amsgrad': True}"),
        ({"decoupled_weight_decay": False}, "got {'decoupled_weight_decay': False}"),
        ({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]}, "float64"),
        ({"params": [nn.Parameter(torch.ones(3, dtype=torch.complex64))]}, "complex64"),
    ):
        with pytest.raises(ValueError, match=words):
            optimizer.add_param_group({"params": [other]} | options)
        assert len(optimizer.param_groups) == 1
        with pytest.raises(ValueError, match=words):
            FusedAdam([{"params": [other]} | options])
    neutral = {"maximize": False, "amsgrad": False, "decoupled_weight_decay": True}
    # What never gets a gradient may be anything.
    frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
    optimizer.add_param_group({"params": [other, frozen]} | neutral)
    assert len(optimizer.param_groups) == 2
