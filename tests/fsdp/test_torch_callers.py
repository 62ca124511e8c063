"""Code of torch that asks for its own units finds ours: pipelining, forward methods, other APIs."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable import replicate, replicate_with_fsdp
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megafsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    UnshardHandle,
    full_tensor,
    fully_shard,
    register_fsdp_forward_method,
    summon_full_params,
)
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.op_rules import IS_DISPATCH_BYPASSED
from tests.fsdp.toy import WIDTH, Block, Net, adamw, assert_same_grads, pair
from tests.pairwise import pairwise
from tests.ranks import Ranks

# From torch 2.15 on, pipelines end the backwards of a stage by finalize_backward().
IS_FINALIZED = hasattr(torch_fsdp, "GradientReductionHandle")
NUM_LAYERS, NUM_MICROBATCHES, NUM_STEPS = 4, 4, 2
STRATEGIES = ["optim_grads_params", "optim_grads", "optim", "no_shard"]


def _joins_uneven_batches() -> None:
    _, net = pair(num_blocks=1)
    with pytest.raises(
        NotImplementedError, match=r"algorithms\.Join\. Drop the incomplete batches"
    ):
        Join([net])


def test_uneven_batches_by_torchs_join_are_refused_with_a_cure(ranks: Ranks) -> None:
    """Torch's own message is that an attribute is missing."""
    ranks(2).run(_joins_uneven_batches)


def _is_one_of_torchs() -> None:
    _, net = pair(num_blocks=1)
    handle = net.unshard(async_op=True)
    for module, ours, theirs in (
        (net, FSDPModule, torch_fsdp.FSDPModule),
        (net.blocks[0], FSDPModule, torch_fsdp.FSDPModule),
        (handle, UnshardHandle, torch_fsdp.UnshardHandle),
    ):
        assert isinstance(module, ours) and isinstance(module, theirs)
    handle.wait()
    assert isinstance(net, Net) and not isinstance(net.norm, torch_fsdp.FSDPModule)
    # The class looks like torch's; transformers looks up its own names.
    assert repr(net).startswith("FSDPNet(") and "): FSDPBlock(" in repr(net)
    register_fsdp_forward_method(net, "forward")
    assert net._get_name() == "Net" and net.norm._get_name() == "LayerNorm"
    # Made by the class of the whole, as torch does.
    layers = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)))
    assert type(layers[:2]) is nn.Sequential and len(layers[:2]) == 2
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(net)


def test_a_unit_is_an_instance_of_torchs_class(ranks: Ranks) -> None:
    """And its handle; construction, copies and names are as before."""
    ranks(2).run(_is_one_of_torchs)


def _marked_as_managed() -> None:
    def marks(name: str) -> list[bool]:
        return [getattr(module, name, False) for module in net.modules()]

    net = Net(num_blocks=2)
    fully_shard(net.blocks[0])
    assert sum(marks("_is_fsdp_managed_module")) == len(list(net.blocks[0].modules()))
    fully_shard(net)
    assert all(marks("_is_fsdp_managed_module")) and all(marks("_fsdp_use_orig_params"))
    with summon_full_params(net):
        assert not any(marks("_is_fsdp_managed_module"))
    assert all(marks("_is_fsdp_managed_module"))


def test_modules_are_marked_as_managed_while_their_forwards_gather(ranks: Ranks) -> None:
    """Models of transformers read it, and then run as often on each rank."""
    ranks(2).run(_marked_as_managed)


def _stage(
    layers: nn.Sequential, mesh: DeviceMesh, strategy: str, *, is_unit: bool
) -> nn.Sequential:
    for layer in layers:
        fully_shard(layer, mesh=mesh, strategy=strategy)
    return fully_shard(layers, mesh=mesh, strategy=strategy) if is_unit else layers


def _pipelined(
    kind: Callable[..., Any],
    strategy: str,
    is_unit: bool = True,
    num_calls: int = 1,
    options: dict[str, Any] | None = None,
) -> None:
    """Train 2 pipeline ranks x 2 data-parallel ranks beside one process with the same batches.

    ``num_calls`` calls of the schedule, which is made with ``options``, make one step.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    torch.manual_seed(0)
    reference = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
    is_multi = issubclass(kind, PipelineScheduleMulti)
    num_stages = 4 if is_multi else 2
    size, rank = NUM_LAYERS // num_stages, pp.get_local_rank()
    is_v = kind in (ScheduleZBVZeroBubble, ScheduleDualPipeV)
    indices = [rank, num_stages - 1 - rank] if is_v else range(rank, num_stages, 2)
    # A slice of a Sequential keeps the names of the whole.
    parts = {
        index: _stage(
            copy.deepcopy(reference[index * size : (index + 1) * size]),
            dp,
            strategy,
            is_unit=is_unit,
        )
        for index in indices
    }
    stages = [
        PipelineStage(part, index, num_stages, torch.device("cpu"), group=pp.get_group())
        for index, part in parts.items()
    ]
    schedule = kind(
        stages if is_multi else stages[0],
        NUM_MICROBATCHES,
        loss_fn=F.mse_loss,
        **(options or {}),
    )
    optimizers = [adamw(module) for module in (reference, *parts.values())]
    units = {
        m._fsdp_unit() for p in parts.values() for m in p.modules() if isinstance(m, FSDPModule)
    }
    num_groups = sum(len(unit.groups) for unit in units)
    for step in range(NUM_STEPS):
        for call in range(num_calls):
            x, target = torch.randn(2, 2, 2 * NUM_MICROBATCHES, WIDTH)
            F.mse_loss(reference(x.flatten(0, 1)), target.flatten(0, 1)).backward()
            with record_collectives() as record:
                inputs = [x[dp.get_local_rank()]] if 0 in parts else []
                is_last = {} if num_calls == 1 else {"finalize_gradients": call == num_calls - 1}
                schedule.step(*inputs, target=target[dp.get_local_rank()], **is_last)
        # Microbatches are added up locally. The first step also runs every stage once more, to find
        # out what it passes on.
        num_reductions = record.calls["reduce_scatter"] + record.calls["all_reduce"]
        assert step == 0 or not is_unit or num_reductions == num_groups + len(parts)
        for part in parts.values():
            for name, parameter in part.named_parameters():
                wanted = reference.get_parameter(name).grad
                torch.testing.assert_close(
                    full_tensor(parameter.grad), wanted, rtol=1e-4, atol=1e-6
                )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for part in parts.values():
        for name, parameter in part.named_parameters():
            wanted = reference.get_parameter(name).detach()
            torch.testing.assert_close(
                full_tensor(parameter.detach()), wanted, rtol=1e-4, atol=1e-5
            )
    assert not any(unit.is_at_work or unit.is_unsharded for unit in units)


_BOTH_ENDS_OF_A_V = pytest.mark.skipif(
    IS_DISPATCH_BYPASSED, reason="torch 2.11 sends to the same rank, which gloo cannot"
)


@pytest.mark.parametrize(
    ("kind", "strategies"),
    [
        (Schedule1F1B, STRATEGIES),
        (ScheduleInterleaved1F1B, STRATEGIES[:1]),
        (ScheduleInterleavedZeroBubble, STRATEGIES),
        pytest.param(ScheduleZBVZeroBubble, STRATEGIES[:1], marks=_BOTH_ENDS_OF_A_V),
        pytest.param(ScheduleDualPipeV, STRATEGIES[:1], marks=_BOTH_ENDS_OF_A_V),
    ],
)
def test_torchs_pipelining_trains_as_one_process(
    ranks: Ranks, kind: type, strategies: list[str]
) -> None:
    """Two stages on two ranks each in every strategy, and four that are interleaved."""
    for strategy in strategies:
        ranks(4).run(_pipelined, kind, strategy)


@pytest.mark.skipif(not IS_FINALIZED, reason="pipelines that end backwards came with torch 2.15")
@pytest.mark.parametrize(
    ("kind", "num_calls", "options"),
    [
        (Schedule1F1B, 2, None),
        (ScheduleInterleaved1F1B, 2, None),
        (ScheduleInterleavedZeroBubble, 1, {"defer_reduce_grad_wait": True}),
        (ScheduleInterleaved1F1B, 2, {"defer_reduce_grad_wait": True}),
    ],
    ids=str,
)
def test_pipelines_may_reduce_gradients_later(
    ranks: Ranks, kind: type, num_calls: int, options: dict[str, Any] | None
) -> None:
    """After several calls of a schedule, or while other stages compute."""
    for strategy in STRATEGIES:
        ranks(4).run(_pipelined, kind, strategy, True, num_calls, options)


def _split_backward_alone(strategy: str, by_hand: bool) -> None:
    net = fully_shard(Block(), strategy=strategy)
    stage = PipelineStage(net, 0, 2, torch.device("cpu"))
    stage.has_backward = True
    end = net.finalize_backward if by_hand else partial(stage.perform_reduce_grad, 1)
    x = torch.randn(2, WIDTH, requires_grad=True)
    net.set_is_last_backward(False)
    net.set_manual_backward_finalization(by_hand or IS_FINALIZED)
    net.set_requires_gradient_sync(False)
    out = net(x)
    if strategy == "no_shard":
        stage_backward_input([out], [torch.ones_like(out)], [x], net.parameters())
        with pytest.raises(RuntimeError, match=r"Expected gradients.*got none.*Import torch"):
            end()
    else:
        with pytest.raises(
            NotImplementedError, match=r"'view(_as)?'.*Import torch.distributed.pip"
        ):
            stage_backward_input([out], [torch.ones_like(out)], [x], net.parameters())
    # A whole backward is reduced, by itself or then; a frozen stage has nothing to reduce.
    net.reset_iter_state()
    for is_synced, is_trained in ((False, True), (True, True), (True, False)):
        net.requires_grad_(is_trained)
        net.set_requires_gradient_sync(is_synced)
        net.set_is_last_backward(False)
        net.set_manual_backward_finalization(by_hand or IS_FINALIZED)
        net(x).sum().backward()
        net.set_requires_gradient_sync(True)
        end()
        assert all((p.grad is not None) == is_trained for p in net.parameters())
        net.zero_grad()


def test_a_split_backward_loses_no_gradient_in_silence(ranks: Ranks) -> None:
    """Where pipelining was imported too late: at a view of a weight, or when it is reduced."""
    for strategy in ("optim_grads_params", "no_shard"):
        for by_hand in (False, True):
            ranks(2).run(_split_backward_alone, strategy, by_hand)


def test_a_pipelines_stage_may_be_a_plain_module(ranks: Ranks) -> None:
    """Its layers then reduce in each microbatch, also what the backward of weights leaves."""
    for strategy in STRATEGIES:
        ranks(4).run(_pipelined, ScheduleInterleavedZeroBubble, strategy, False)


class Scorer(nn.Module):
    """Two methods that need the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number a row."""
        return self.head(self.inner(x))

    def score(self, x: torch.Tensor, *, factor: float) -> torch.Tensor:
        """Return the mean of the numbers, by a factor."""
        return self.head(self.inner(x)).mean() * factor


def _forward_method_of_torch() -> None:
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        reference = Scorer()
        net = copy.deepcopy(reference)
        fully_shard(net.inner, strategy=strategy)
        fully_shard(net, strategy=strategy)
        torch_fsdp.register_fsdp_forward_method(net, "score")
        x = torch.randn(3, WIDTH)
        expected, found = reference.score(x, factor=2.0), net.score(x, factor=2.0)
        torch.testing.assert_close(found, expected)
        expected.backward()
        found.backward()
        assert_same_grads(net, reference)
        assert net._fsdp_unit().is_resting


def test_torchs_forward_methods_gather_our_units(ranks: Ranks) -> None:
    """A method registered with torch's function runs as the unit's forward."""
    ranks(2).run(_forward_method_of_torch)


class Pooled(nn.Module):
    """A forward that calls a method of the module, and needs other parameters after it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Block(), nn.Parameter(torch.rand(WIDTH))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of rows."""
        return self.inner(x * self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features by a scale."""
        # A method takes inputs as the forward does, and casts them.
        return self.features(x.float()) * self.scale


METHODS_WITHIN_FORWARDS = pairwise(
    list(
        itertools.product(
            (register_fsdp_forward_method, torch_fsdp.register_fsdp_forward_method),
            STRATEGIES,
            (None, True, False),
            ("root", "inner", "recomputed", "recomputed method"),
            (torch.float32, torch.bfloat16),
        )
    )
)


def _method_within_forward(
    register: Callable[[nn.Module, str], None],
    strategy: str,
    reshard: bool | None,
    place: str,
    dtype: torch.dtype,
) -> None:
    reference = nn.Sequential(Pooled(), Block())
    net = copy.deepcopy(reference)
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32)
    options: dict[str, Any] = {"strategy": strategy, "reshard_after_forward": reshard}
    pooled = fully_shard(net[0], mp_policy=policy, **options)
    register(pooled, "features")
    close = {"rtol": 1e-5, "atol": 1e-6}
    if dtype == torch.bfloat16:
        close = {"rtol": 0.05, "atol": 0.05}
    if place == "root":
        reference, net = reference[0], pooled
    else:
        fully_shard(net, **options)
    if place == "recomputed":
        pooled.forward = partial(checkpoint, pooled.forward, use_reentrant=False)
    elif place == "recomputed method":
        pooled.features = partial(checkpoint, pooled.features, use_reentrant=False)
    x = torch.randn(2, dist.get_world_size(), 3, WIDTH)
    for step in range(2):
        expected = reference(x[step])
        found = net(x[step][dist.get_rank()])
        torch.testing.assert_close(found, expected[dist.get_rank()], **close)
        expected.square().sum(1).mean(0).sum().backward()
        found.square().sum().backward()
        assert_same_grads(net, reference, **close)
        assert pooled._fsdp_unit().is_resting


@pytest.mark.parametrize("case", METHODS_WITHIN_FORWARDS)
def test_a_forward_may_call_a_registered_method(ranks: Ranks, case: tuple[Any, ...]) -> None:
    """What follows in the forward has the full parameters, and gradients are those of one process.

    In every strategy, as the root and below it, and where the module or the method is recomputed.
    """
    ranks(2).run(_method_within_forward, *case)


def _mixed_with_torchs() -> None:
    around = (torch_fsdp.fully_shard, replicate_with_fsdp.replicate)
    for shards in around:
        net = nn.Sequential(Block(), Block())
        fully_shard(net[1])
        before = dict(net.named_parameters())
        with pytest.raises(RuntimeError, match=r"unit of megafsdp at '1'.*megafsdp.fully_shard"):
            shards(net)
        # torch itself takes the unit for one of its own.
        with pytest.raises((AssertionError, RuntimeError), match="fully_shard"):
            shards(net[1])
        assert all(p is before[n] for n, p in net.named_parameters())
        fully_shard(net)(torch.ones(2, WIDTH)).sum().backward()
        # Its own units are torch's business still, and ours around them name the place.
        other = nn.Sequential(Block(), Block())
        shards(other[1])
        for module in (other, other[1]):
            with pytest.raises(ValueError, match=r"at '1?' of .*megafsdp's fully_shard"):
                fully_shard(module)
        assert not isinstance(other, FSDPModule)
        shards(other)
    wrapped = nn.Sequential(Block(), replicate(Block()))
    with pytest.raises(ValueError, match=r"DDPBlock at '1'"):
        fully_shard(wrapped)


def test_units_of_torch_and_ours_do_not_mix(ranks: Ranks) -> None:
    """fully_shard or replicate of torch over ours, or ours over theirs, name the inner unit."""
    ranks(2).run(_mixed_with_torchs)


def _inner_state() -> None:
    _, net = pair(num_blocks=1)
    torch_fsdp.share_comm_ctx([net])
    # torch 2.11 reads more of the state, and 2.12 what both have.
    if "_fsdp_param_groups" in inspect.getsource(torch_fsdp.share_comm_ctx):
        torch_fsdp.share_comm_ctx([net.blocks[0], net])
    else:
        with pytest.raises(NotImplementedError, match="'_fsdp_param_group'"):
            torch_fsdp.share_comm_ctx([net.blocks[0], net])
    net(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    state = net._get_fsdp_state()
    with pytest.raises(AttributeError):
        state._training_state = None
    # A name that a later torch may add and call on units.
    with pytest.raises(NotImplementedError, match="'_set_anything'"):
        state._set_anything()
    # Unsloth asks for what other versions of torch lack; Python itself asks for the last name.
    assert getattr(state, "_auto_reshard_after_forward", None) is None
    assert not hasattr(state, "__length_hint__")


def test_what_torch_wants_of_a_unit_and_ours_has_not_is_refused(ranks: Ranks) -> None:
    """Whatever a later torch reads or sets; share_comm_ctx is served, with nothing to do."""
    ranks(1).run(_inner_state)


def _wrong_calls() -> None:
    _, net = pair(num_blocks=1)
    block, names = net.blocks[0], type(net.norm).__name__
    net(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    calls: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: net.set_modules_to_forward_prefetch([block, net.norm]), ValueError, names),
        (lambda: net.set_modules_to_backward_prefetch([net.norm]), ValueError, names),
        (lambda: net.set_reshard_after_forward(1), ValueError, r"True or False, got 1"),
        (lambda: net.set_reduce_scatter_max_input_buffers(2.5), TypeError, "an int, got 2.5"),
        (lambda: net.set_reduce_scatter_max_input_buffers(True), TypeError, "an int, got True"),
        (lambda: net.set_reduce_scatter_max_input_buffers(0), ValueError, "1 or more"),
        (lambda: net.set_reduce_scatter_divide_factor(0.0), ValueError, "positive factor"),
        (block.reset_iter_state, RuntimeError, r"the root.*got unit 'blocks.0'"),
    ]
    for factor in (2.5, "2", 0):
        make = partial(fully_shard, Block(), reshard_after_forward=factor)
        calls.append((make, ValueError, rf"got {factor!r}. In reshard_after_forward"))
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()
    assert net.set_reduce_scatter_unused_params(False, recurse=False) is None
    net.set_reshard_after_forward(False, False)
    options = net._fsdp_unit().options, block._fsdp_unit().options
    assert [each.reshard_after_forward for each in options] == [False, None]


def test_a_wrong_argument_raises_as_torch_does(ranks: Ranks) -> None:
    """ValueError, TypeError or RuntimeError, and nothing is changed."""
    ranks(2).run(_wrong_calls)


def _not_built() -> None:
    _, net = pair(num_blocks=1)
    event, bare = torch.Event("cpu"), nn.Sequential(fully_shard(Block()))
    kept = fully_shard(Block(), strategy="optim_grads")
    calls: dict[str, Callable[[], object]] = {
        "set_allocate_memory_from_process_group_for_comm": lambda: (
            kept.set_allocate_memory_from_process_group_for_comm(True)
        ),
        "set_symm_mem_for_comm": lambda: net.set_symm_mem_for_comm("NCCL"),
        "set_post_optim_event": lambda: net.set_post_optim_event(event),
        # Of a root that owns no parameter.
        "set_post_optim_event()": lambda: fully_shard(bare).set_post_optim_event(event),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=rf"In {name.rstrip('()')}\(\)\. \w"):
            call()
    net.set_allocate_memory_from_process_group_for_comm(False)
    net(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()


def test_what_torch_has_and_we_have_not_built_is_refused_by_name(ranks: Ranks) -> None:
    """Each with what to do instead; the unit works on."""
    ranks(1).run(_not_built)


def _placements() -> None:
    for placement in (Shard(-1), Shard(0)):
        block = fully_shard(nn.LayerNorm(5), shard_placement_fn=lambda _, p=placement: p)
        assert {p.placements for p in block.parameters()} == {(Shard(0),)}
    fully_shard(nn.Linear(3, 5), shard_placement_fn=lambda p: Shard(-p.ndim))
    words = r"shard_placement_fn for 'weight'.*Return None"
    for placement in (Shard(1), Shard(-1), Replicate(), object()):
        with pytest.raises(NotImplementedError, match=words):
            fully_shard(nn.Linear(3, 5), shard_placement_fn=lambda _, p=placement: p)


def test_a_placement_may_count_from_the_end(ranks: Ranks) -> None:
    """As long as it is dimension 0; any other is refused, none is overlooked."""
    ranks(2).run(_placements)


def _read_states() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plain, block = nn.Linear(2, 2), fully_shard(Block(), mp_policy=policy, offload_policy=None)
    for function in (fully_shard, torch_fsdp.fully_shard):
        assert function.state(plain) is None
        assert function.state(block)._mp_policy is policy
    assert block._get_fsdp_state()._mp_policy.param_dtype == torch.bfloat16


def test_programs_find_out_what_is_a_unit_and_its_policy(ranks: Ranks) -> None:
    """By the function's attribute, as torch's function has it; and without an offload policy."""
    ranks(1).run(_read_states)
