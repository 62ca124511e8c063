"""Two mesh axes: main weights divided over both (HFSDP), and parameters kept among neighbours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megafsdp import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    microbatch,
)
from megafsdp.buffer.comm.collectives import CollectiveRecord, record_collectives
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.checkpoint import load, save
from megafsdp.device.memory import Category
from tests.fsdp.toy import (
    Net,
    adamw,
    assert_same_grads,
    assert_same_parameters,
    batches,
    full_grads,
    fused_adamw,
    mine,
    pair,
    shard,
    train_both,
)
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
SHAPES = [(2, 2), (1, 2), (2, 1)]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def _calls(record: CollectiveRecord, mesh: DeviceMesh) -> Counter[tuple[str, str]]:
    names = {mesh.get_group(a).group_name: a for a in mesh.mesh_dim_names or ()}
    calls = record.calls_by_group.items()
    return Counter({(k, names[g]): n for (k, g), n in calls if g in names})


def _trains(shape: tuple[int, int], policy: MixedPrecisionPolicy) -> None:
    mesh = _mesh(shape)
    reference, net = pair(num_blocks=2, mesh=mesh, outer_strategy="optim", mp_policy=policy)
    if policy.param_dtype is None:
        losses = train_both(
            reference, net, num_steps=2, num_microbatches=2, make_optimizer=fused_adamw
        )
        for loss, wanted in losses:
            assert loss == pytest.approx(wanted, rel=1e-5)
        assert_same_parameters(net, reference, rtol=1e-4, atol=1e-5)
        return
    # In bf16 the reference is the same engine with main weights on the inner axis alone; sums over
    # the outer axis are made in another order.
    other = shard(reference, mesh=mesh, mp_policy=policy)
    optimizers = [fused_adamw(net), fused_adamw(other)]
    for step in range(2):
        for model in (net, other):
            model(*mine(batches(1, seed=step)[0])).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wanted = full_state_dict(other)
    for name, value in full_state_dict(net).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
def test_main_weights_divided_over_both_axes_train_like_one_process(
    ranks: Ranks, shape: tuple[int, int], policy: MixedPrecisionPolicy
) -> None:
    """HFSDP is a layout, not another arithmetic."""
    ranks(math.prod(shape)).run(_trains, shape, policy)


def _holds() -> tuple[int, int, int, int, int]:
    mesh = _mesh((2, 2))
    _, net = pair(mesh=mesh, outer_strategy="optim")
    parameters = list(net.parameters())
    assert all(isinstance(p, UnevenDTensor) for p in parameters)
    live = net._fsdp_unit().ledger.live
    net(*mine(batches(1)[0])).backward()
    at_rest = dict(live)
    numel = sum(g.layout.gathered_numel for g in net._fsdp_unit().groups)
    for block in net.blocks:
        numel += sum(g.layout.gathered_numel for g in block._fsdp_unit().groups)
    return (
        sum(p.local.numel() for p in parameters),
        numel,
        at_rest[Category.MAIN_WEIGHT],
        at_rest[Category.COMPUTE_WEIGHT],
        at_rest[Category.MAIN_GRAD],
    )


def test_each_rank_holds_a_piece_of_the_main_weight_and_a_shard_of_the_compute_weight(
    ranks: Ranks,
) -> None:
    """Pieces of all ranks make the model once; bytes are 4/(N M), 4/N and 4/(N M) a parameter."""
    answers = ranks(4).run(_holds)
    assert sum(a[0] for a in answers) == sum(p.numel() for p in Net().parameters())
    for _, numel, main_weight, compute_weight, main_grad in answers:
        assert (main_weight, compute_weight, main_grad) == (numel, 2 * numel, numel)


def _counts(shape: tuple[int, int], told: str) -> dict[tuple[str, str], int]:
    mesh = _mesh(shape)
    net = shard(Net(num_blocks=2), mesh=mesh, outer_strategy="optim")
    optimizer = fused_adamw(net)
    for step in range(2):
        with record_collectives() as record:
            for k, batch in enumerate(batches(3, seed=step)):
                if told == "set_requires_all_reduce":
                    net.set_requires_all_reduce(k == 2)
                with microbatch(net, is_last=k == 2 or told != "microbatch"):
                    net(*mine(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _calls(record, mesh)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("told", ["microbatch", "set_requires_all_reduce", "plain"])
def test_the_outer_axis_is_used_once_a_step(
    ranks: Ranks, shape: tuple[int, int], told: str
) -> None:
    """Of 3 groups: one join and, where the last microbatch is known, one sum each."""
    for counts in ranks(math.prod(shape)).run(_counts, shape, told):
        # An axis of one rank exchanges nothing.
        has_outer, has_inner = (size > 1 for size in shape)
        assert counts["all_gather", "outer"] == has_outer * 3
        assert counts["reduce_scatter", "outer"] == has_outer * (9 if told == "plain" else 3)
        assert counts["reduce_scatter", "inner"] == has_inner * 9
        assert counts["all_gather", "inner"] == has_inner * 3 * 4


def _moves_whole_tensors() -> None:
    mesh = _mesh((2, 2))
    reference, net = pair(mesh=mesh, outer_strategy="optim")
    wanted = reference.state_dict()
    for name, value in full_state_dict(net).items():
        assert torch.equal(value, wanted[name]), name
    changed = {name: value + 1 for name, value in wanted.items()}
    net(*mine(batches(1)[0]))
    load_full_state_dict(net, changed)
    reference.load_state_dict(changed)
    batch = batches(1, seed=5)[0]
    reference(*batch).backward()
    net(*mine(batch)).backward()
    assert_same_grads(net, reference)
    norm = clip_grad_norm_(net, 0.1)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    assert_same_grads(net, reference)


def test_whole_tensors_norms_and_clipping_see_both_axes(ranks: Ranks) -> None:
    """Full state dicts go out and in, and every gradient element counts once."""
    ranks(4).run(_moves_whole_tensors)


def _saves_and_loads(directory: Path) -> None:
    net = shard(Net(num_blocks=1), mesh=_mesh((2, 2)), outer_strategy="optim")
    optimizer = fused_adamw(net)
    net(*mine(batches(1)[0])).backward()
    optimizer.step()
    save(directory, step=1, model=net, optimizer=optimizer)
    wanted = full_state_dict(net)
    net.zero_grad()
    net(*mine(batches(1, seed=2)[0])).backward()
    wanted_grads = full_grads(net)
    for options in (
        {"mesh": _mesh((4,))},
        {"mesh": _mesh((4, 1)), "outer_strategy": "optim"},
        {"mesh": _mesh((2, 2))},
        {"mesh": _mesh((4,)), "strategy": "optim"},
    ):
        other = shard(Net(num_blocks=1, seed=1), **options)
        load(directory, model=other, optimizer=fused_adamw(other))
        for name, value in full_state_dict(other).items():
            assert torch.equal(value, wanted[name]), name
        other(*mine(batches(1, seed=2)[0])).backward()
        for name, grad in full_grads(other).items():
            torch.testing.assert_close(grad, wanted_grads[name], rtol=1e-4, atol=1e-6)


def test_checkpoints_move_between_divided_and_other_layouts(ranks: Ranks, tmp_path: Path) -> None:
    """What was saved with both axes dividing loads into any mesh, compute weights fresh."""
    ranks(4).run(_saves_and_loads, tmp_path)


def _gathers_from_neighbours(shape: tuple[int, ...]) -> None:
    mesh = _mesh(shape)
    reference, net = pair(mesh=mesh, reshard_after_forward=2)
    inner = mesh.get_group("inner").group_name
    optimizers = [fused_adamw(reference), fused_adamw(net)]
    for step in range(2):
        batch = batches(1, seed=step)[0]
        reference(*batch).backward()
        with record_collectives() as forward:
            loss = net(*mine(batch))
        live = net._fsdp_unit().ledger.live[Category.UNSHARDED]
        with record_collectives() as backward:
            loss.backward()
        assert live == 0
        assert forward.calls_by_group["all_gather", inner] == 4
        assert ("all_gather", inner) not in backward.calls_by_group
        assert backward.calls["all_gather"] == 4
        assert_same_grads(net, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ledger = net._fsdp_unit().ledger
    net.reset_iter_state()
    with torch.no_grad():
        net(*mine(batch))
    assert ledger.live[Category.UNSHARDED] == 0


@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_parameters_kept_among_neighbours_are_gathered_from_them(
    ranks: Ranks, shape: tuple[int, ...]
) -> None:
    """``reshard_after_forward=2``: forward gathers over four ranks, backward over two."""
    ranks(4).run(_gathers_from_neighbours, shape)


def _same_with_and_without_neighbours() -> None:
    nets = [shard(Net(num_blocks=2), mp_policy=BF16, reshard_after_forward=n) for n in (2, True)]
    for net in nets:
        net(*mine(batches(1)[0])).backward()
    wanted = full_grads(nets[1])
    for name, grad in full_grads(nets[0]).items():
        assert grad is not None and wanted[name] is not None
        assert torch.equal(grad, wanted[name]), name


def test_bf16_gradients_with_and_without_neighbours_have_the_same_bits(ranks: Ranks) -> None:
    """Backward reads the same compute weights from two ranks as from four."""
    ranks(4).run(_same_with_and_without_neighbours)


def _slices_are_freed() -> None:
    net = shard(Net(), reshard_after_forward=2)
    live = net._fsdp_unit().ledger.live
    loss = net(*mine(batches(1)[0]))
    assert live[Category.COMPUTE_WEIGHT] > 0
    loss.backward()
    assert live[Category.COMPUTE_WEIGHT] == 0
    net(*mine(batches(1)[0]))
    assert live[Category.COMPUTE_WEIGHT] > 0
    adamw(net).step()
    again = shard(Net(), reshard_after_forward=True)
    load_full_state_dict(again, full_state_dict(net))
    loss = net(*mine(batches(1, seed=3)[0]))
    assert torch.equal(loss, again(*mine(batches(1, seed=3)[0]))), "the step's weights are read"
    loss.backward()
    assert live[Category.COMPUTE_WEIGHT] == 0
    net.norm.register_forward_hook(lambda _, __, y: y.register_hook(lambda g: 1 / 0) and None)
    loss = net(*mine(batches(1)[0]))
    assert live[Category.COMPUTE_WEIGHT] > 0
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    net.reset_iter_state()
    assert live[Category.COMPUTE_WEIGHT] == 0


def test_slices_are_freed_by_backward_and_never_outlive_a_step(ranks: Ranks) -> None:
    """A slice is half the unit; the gather of backward frees it, stale ones are not read."""
    ranks(4).run(_slices_are_freed)


def _refuses(options: dict[str, object], shape: tuple[int, ...]) -> str:
    with pytest.raises(ValueError) as error:
        fully_shard(Net(), mesh=_mesh(shape), **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "shape", "words"),
    [
        ({"outer_strategy": "optim"}, (4,), "mesh of two axes"),
        ({"outer_strategy": "optim", "strategy": "optim"}, (2, 2), "optim_grads_params"),
        ({"outer_strategy": "full"}, (2, 2), "'no_shard' or 'optim'"),
        ({"reshard_after_forward": 3}, (4,), "divisor of the 4 ranks"),
        ({"reshard_after_forward": 0}, (2, 2), "divisor of the 2 ranks"),
    ],
)
def test_choices_without_meaning_are_refused(
    ranks: Ranks, options: dict[str, object], shape: tuple[int, ...], words: str
) -> None:
    """On all ranks alike, before anything is changed."""
    for message in ranks(4).run(_refuses, options, shape):
        assert words in message


def _treats_extremes() -> list[object]:
    chosen = []
    for number in (1, dist.get_world_size()):
        net = fully_shard(Net(), reshard_after_forward=number)
        chosen.append(net._fsdp_unit().options.reshard_after_forward)
    return chosen


def test_one_neighbour_keeps_and_all_free(ranks: Ranks) -> None:
    """As in torch: 1 means False, the size of the axis means True."""
    assert ranks(4).run(_treats_extremes) == [[False, True]] * 4


def _gathers_anew_after_a_load() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    reference, net = pair(mesh=mesh, outer_strategy="optim")
    tokens, _ = mine(batches(1)[0])
    with torch.no_grad():
        net(tokens)
        net.blocks[1].unshard(async_op=True)
        for parameter in reference.parameters():
            parameter.mul_(2.0)
        load_full_state_dict(net, reference.state_dict())
        torch.testing.assert_close(net(tokens), reference(tokens), rtol=1e-5, atol=1e-5)


def test_a_gather_that_a_load_overtakes_is_made_anew(ranks: Ranks) -> None:
    """The pieces are joined again before the unit runs."""
    ranks(2).run(_gathers_anew_after_a_load)
