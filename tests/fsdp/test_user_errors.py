"""What goes wrong in users' hands: refused with a clear error, or raised by them and survived."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megafsdp import FSDPModule, fully_shard
from megafsdp.buffer.comm.collectives import record_collectives
from tests.fsdp.composed import Codes
from tests.fsdp.toy import (
    WIDTH,
    Block,
    Net,
    adamw,
    assert_same_grads,
    batches,
    mine,
    pair,
    shard,
    train_both,
)
from tests.ranks import Ranks


def _shown(module: nn.Module) -> set[str]:
    return {"sharded" if isinstance(p, DTensor) else "full" for p in module.parameters()}


def _hooks_on_sharded() -> None:
    for strategy in ("optim_grads_params", "no_shard"):
        _, net = pair(strategy=strategy)
        for parameter in net.parameters():
            with pytest.raises(RuntimeError, match="register_post_accumulate_grad_hook"):
                parameter.register_hook(lambda g: g)


def test_a_gradient_hook_on_a_sharded_parameter_is_refused(ranks: Ranks) -> None:
    """It would never fire; the error names the hook that does."""
    ranks(2).run(_hooks_on_sharded)


def _hooks_on_originals() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        block = Block()
        getattr(block.up.weight, register)(lambda g: None)
        before = dict(block.named_parameters())
        with pytest.raises(ValueError, match=r"'up.weight'.*after fully_shard\(\)"):
            fully_shard(block)
        assert all(p is before[n] for n, p in block.named_parameters())


def test_a_gradient_hook_registered_before_wrapping_is_refused(ranks: Ranks) -> None:
    """Sharded parameters would not have it."""
    ranks(2).run(_hooks_on_originals)


class Packed(nn.Parameter):
    """Codes that carry their scale as an attribute, as bitsandbytes has them."""


def _subclasses() -> None:
    codes, scale = torch.ones(4, 4, dtype=torch.int8), torch.ones(())
    packed = Packed(codes, requires_grad=False)
    for weight in (nn.Parameter(Codes(codes, scale), requires_grad=False), packed):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        net[1].weight = weight
        before = dict(net.named_parameters())
        name = type(weight).__qualname__
        with pytest.raises(NotImplementedError, match=rf"'1\.weight', a .*\.{name}\b.*ignored_par"):
            fully_shard(net)
        assert all(p is before[n] for n, p in net.named_parameters())
        fully_shard(net, ignored_params={weight})
        assert net[1].weight is weight
    with pytest.raises(NotImplementedError, match=r"'0\.weight', a .*Run a forward of the lazy"):
        fully_shard(nn.Sequential(nn.LazyLinear(4)))


def test_tensor_subclasses_are_refused_by_name(ranks: Ranks) -> None:
    """A flat buffer would drop what they carry; left alone, they stay."""
    ranks(2).run(_subclasses)


def _grad_of_sharded() -> None:
    reference, net = pair()
    batch = batches(1)[0]
    loss = net(*mine(batch))
    parameters = list(net.parameters())
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, parameters, retain_graph=True)
    unused = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    assert set(unused) == {None} and all(p.grad is None for p in parameters)
    reference(*batch).backward()
    loss.backward()
    assert_same_grads(net, reference)


def test_autograd_grad_of_sharded_parameters_is_refused(ranks: Ranks) -> None:
    """By torch: they are not in the graph. A backward after it is right."""
    ranks(2).run(_grad_of_sharded)


def _parts_converted() -> None:
    reference, net = pair()
    part = net.blocks[0].up
    before = dict(net.named_parameters())
    for same in (lambda: part.to(torch.float32), lambda: part.to("cpu"), part.float):
        assert same() is part
    for change in (part.half, part.double, lambda: part.to(torch.bfloat16), net.blocks.half):
        with pytest.raises(RuntimeError, match=r"before fully_shard\(\)"):
            change()
    for name, copier in (("deepcopy", copy.deepcopy), ("pickle", pickle.dumps)):
        with pytest.raises(RuntimeError, match=rf"{name}.*full_state_dict"):
            copier(part)
    part.load_state_dict(part.state_dict(), assign=True)
    assert all(p is before[n] for n, p in net.named_parameters())
    assert type(part) is nn.Linear
    train_both(reference, net, num_steps=1)


def test_a_part_of_a_unit_is_neither_converted_nor_copied(ranks: Ranks) -> None:
    """A plain submodule that holds sharded parameters refuses what its unit refuses."""
    ranks(2).run(_parts_converted)


def _converted_after_a_step() -> None:
    reference, net = pair()
    train_both(reference, net, num_steps=1)
    before = dict(net.named_parameters())
    net.to(torch.float32).to("cpu").float()
    assert all(p is before[n] for n, p in net.named_parameters())
    with pytest.raises(RuntimeError, match=r"before fully_shard\(\)"):
        net.to(torch.bfloat16)
    train_both(reference, net, num_steps=1)


def test_a_conversion_after_a_step_changes_nothing_or_raises(ranks: Ranks) -> None:
    """Training goes on either way."""
    ranks(2).run(_converted_after_a_step)


def _early_optimizer() -> None:
    net = Net()
    early = adamw(net)
    shard(net)
    net(*mine(batches(1)[0])).backward()
    with pytest.raises(ValueError, match=r"AdamW.*after fully_shard\(\)"):
        early.step()
    adamw(net).step()


def test_a_step_of_an_optimizer_built_before_wrapping_is_refused(ranks: Ranks) -> None:
    """It would change parameters that nobody reads."""
    ranks(2).run(_early_optimizer)


def _inner_after_outer(is_run: bool) -> None:
    net = fully_shard(Net())
    if is_run:
        net(*mine(batches(1)[0])).backward()
    with pytest.raises(ValueError, match="inner units first"):
        fully_shard(net.blocks[0])
    assert type(net.blocks[0]) is Block
    net(*mine(batches(1)[0])).backward()


@pytest.mark.parametrize("is_run", [False, True])
def test_an_inner_unit_wrapped_after_the_outer_one_is_refused(ranks: Ranks, is_run: bool) -> None:
    """The outer unit owns its parameters by then, before and after a forward."""
    ranks(2).run(_inner_after_outer, is_run)


def _two_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    net = Net()
    fully_shard(net.blocks[0], mesh=mesh["inner"])
    fully_shard(net)
    with (
        record_collectives() as record,
        pytest.raises(ValueError, match=r"one mesh.*'blocks\.0'.*same mesh"),
    ):
        net(*mine(batches(1)[0]))
    assert not record.calls


def test_units_over_different_ranks_are_refused(ranks: Ranks) -> None:
    """On all ranks alike, before the first collective."""
    ranks(4).run(_two_meshes)


def _state_dict_mid_iteration() -> None:
    _, net = pair()
    part = net.blocks[0].up
    told: list[str] = []

    def ask(*unused: object) -> None:
        for module in (net, net.blocks[0], part):
            with pytest.raises(RuntimeError, match="at rest"):
                module.state_dict()
            told.append(type(module).__name__)

    part.register_forward_hook(ask)
    net(*mine(batches(1)[0])).backward()
    assert told == ["FSDPNet", "FSDPBlock", "Linear"]
    net.state_dict()


def test_state_dicts_are_refused_while_a_unit_is_at_work(ranks: Ranks) -> None:
    """Of the root, the unit, and a plain submodule."""
    ranks(2).run(_state_dict_mid_iteration)


class Fails(nn.Module):
    """A block that raises in forward when asked, and a root that may catch it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.fails = False
        self.catches = False
        self.retries = False
        self.caught: list[BaseException] = []
        self.error: type[BaseException] = ValueError
        self.second.up.register_forward_hook(self._maybe_fail)

    def _maybe_fail(self, *unused: object) -> None:
        if self.fails:
            self.fails = not self.retries
            raise self.error("asked to fail")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both blocks, or the first alone; or the second again if it failed."""
        y = self.first(x)
        if not self.catches:
            return self.second(y).square().mean()
        try:
            return self.second(y).square().mean()
        except ValueError as error:
            if not self.retries:
                return y.square().mean()
            self.caught.append(error)
        return self.second(y).square().mean()


def _failing_pair() -> tuple[Fails, Fails]:
    torch.manual_seed(0)
    reference = Fails()
    net = Fails()
    net.load_state_dict(reference.state_dict())
    for unit in (net.first, net.second):
        fully_shard(unit)
    return reference, fully_shard(net)


def _after_an_exception() -> None:
    reference, net = _failing_pair()
    x = torch.randn(dist.get_world_size(), 3, 12)
    units = [m._fsdp_unit() for m in net.modules() if isinstance(m, FSDPModule)]
    for catches in (False, True):
        for is_ended in (True, False):
            net.fails = reference.fails = True
            net.catches = reference.catches = catches
            if catches:
                reference(x).backward()
                loss = net(x[dist.get_rank()])
                assert not net.second._fsdp_unit().is_unsharded
                loss.backward()
            else:
                with pytest.raises(ValueError, match="asked to fail"):
                    net(x[dist.get_rank()])
                assert not any(u.is_at_work for u in units)
            assert _shown(net) == {"sharded"}
            assert not any(u.is_unsharded for u in units)
            net.fails = reference.fails = False
            if is_ended:
                reference(x).backward()
                net(x[dist.get_rank()]).backward()
            assert_same_grads(net, reference)


def test_an_exception_in_forward_leaves_the_model_at_rest(ranks: Ranks) -> None:
    """At once, whether the root catches it or not; nothing stays unsharded."""
    ranks(2).run(_after_an_exception)


def _after_an_interrupt() -> None:
    reference, net = _failing_pair()
    x = torch.randn(dist.get_world_size(), 3, 12)
    net.error = KeyboardInterrupt
    optimizers = [adamw(reference), adamw(net)]
    units = [m._fsdp_unit() for m in (net, net.first, net.second)]
    # The last: without a sync, sums of the first backward wait for the next one.
    for is_reset, is_synced in ((False, True), (True, True), (False, False)):
        reference(x).backward()
        with contextlib.nullcontext() if is_synced else net.no_sync():
            net(x[dist.get_rank()]).backward()
        net.fails = True
        with pytest.raises(KeyboardInterrupt):
            net(x[dist.get_rank()])
        net.fails = False
        if is_reset:
            net.reset_iter_state()
            assert not any(u.is_unsharded or u.is_at_work for u in units)
        for optimizer in optimizers:
            if is_synced:
                optimizer.step()
                optimizer.zero_grad()
        reference(x).backward()
        net(x[dist.get_rank()]).backward()
        assert_same_grads(net, reference)
        assert _shown(net) == {"sharded"}
        assert not any(u.is_unsharded or u.is_at_work for u in units)
        reference.zero_grad()
        net.zero_grad()


def test_an_interrupted_forward_may_be_retried(ranks: Ranks) -> None:
    """No hook hears of an interrupt; the next forward cleans up, or ``reset_iter_state()``."""
    ranks(2).run(_after_an_interrupt)


def _cleared_after_a_forward(shows: str, set_to_none: bool) -> None:
    reference, net = _failing_pair()
    x = torch.randn(dist.get_world_size(), 3, 12)
    net.error, own = KeyboardInterrupt, x[dist.get_rank()]
    net(own).backward()
    if shows == "interrupt":
        net.fails = True
        with pytest.raises(KeyboardInterrupt):
            net(own)
        net.fails = False
    else:
        net.second.unshard()
    assert "full" in _shown(net)
    net.zero_grad(set_to_none)
    reference(x).backward()
    net(own).backward()
    assert_same_grads(net, reference)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("shows", ["interrupt", "unshard"])
def test_zero_grad_clears_gradients_of_parameters_that_are_not_shown(
    ranks: Ranks, shows: str, set_to_none: bool
) -> None:
    """Modules have the full parameters after an interrupt in forward, and after unshard()."""
    ranks(2).run(_cleared_after_a_forward, shows, set_to_none)


def _exception_is_kept() -> None:
    _, net = _failing_pair()
    x = torch.randn(3, 12, requires_grad=True)

    def events() -> list[tuple[str, str]]:
        with record_collectives() as record:
            net(x).backward()
        return record.events

    events()
    usual = events()
    net.fails = True
    with pytest.raises(ValueError) as caught:
        net(x)
    net.fails = False
    assert events() == usual
    assert caught.tb is not None
    net.fails = net.catches = net.retries = True
    reduced = [event for event in events() if event[0] == "reduce_scatter"]
    assert reduced == [event for event in usual if event[0] == "reduce_scatter"]
    assert net.caught


def test_a_unit_does_not_wait_for_a_forward_that_failed(ranks: Ranks) -> None:
    """Though the exception keeps its graph alive."""
    ranks(2).run(_exception_is_kept)


def _exception_in_another_method() -> None:
    _, net = pair()
    tokens = mine(batches(1)[0])[0]
    units = [m._fsdp_unit() for m in net.modules() if isinstance(m, FSDPModule)]
    for failing in (1, 0):
        # After a whole forward units are gathered ahead.
        hook = net.blocks[failing].register_forward_pre_hook(lambda *_: 1 / 0)
        for has_grad in (False, True):
            with pytest.raises(ZeroDivisionError), torch.set_grad_enabled(has_grad):
                net(tokens)
            assert _shown(net) == {"sharded"}
            assert not any(u.is_unsharded for u in units)
        hook.remove()
        net(tokens)


def test_an_exception_in_a_users_hook_leaves_the_model_at_rest(ranks: Ranks) -> None:
    """Hooks run inside of the unit's forward."""
    ranks(2).run(_exception_in_another_method)


def _divided_by_nothing() -> None:
    _, net = pair()
    for factor in (0, -2.0):
        with pytest.raises(ValueError, match=f"a positive factor, got {factor}"):
            net.set_gradient_divide_factor(factor)


def test_a_divide_factor_must_be_positive(ranks: Ranks) -> None:
    """Gradients would be infinite, or lead uphill."""
    ranks(1).run(_divided_by_nothing)


def _outer_called_from_within() -> None:
    inner = fully_shard(Block())
    outer = fully_shard(nn.Sequential(inner))
    inner.norm.register_forward_pre_hook(lambda _, args: outer(*args) and None)
    with pytest.raises(RuntimeError, match="Call the outermost module first"):
        inner(torch.randn(2, WIDTH))


def test_a_root_cannot_adopt_a_unit_at_work(ranks: Ranks) -> None:
    """What the unit has recorded of its forward would be lost with its schedule."""
    ranks(1).run(_outer_called_from_within)


class _Keeping(nn.Module):
    """Computes with a list of its parameters that it made when it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(12, 12)), nn.Parameter(torch.ones(12))
        self.kept = [self.weight, self.bias]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, *self.kept)


def _kept_parameters() -> None:
    for strategy in ("optim_grads_params", "no_shard"):
        net = nn.Sequential(nn.Linear(12, 12), _Keeping())
        fully_shard(net[1], strategy=strategy)
        fully_shard(net, strategy=strategy)
        loss = net(torch.ones(2, 12)).sum()
        with pytest.raises(RuntimeError, match=r"'(weight|bias)', got one of .* it has replaced"):
            loss.backward()


def test_gradients_of_replaced_parameters_are_refused(ranks: Ranks) -> None:
    """A module that keeps its parameters in a list would train values that nobody steps."""
    ranks(2).run(_kept_parameters)
