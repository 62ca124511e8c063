"""Ways in which users drive a model: each gives what the unsharded model gives."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_sequence

import megafsdp
from megafsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    full_tensor,
    fully_shard,
    fully_shard_model,
)
from megafsdp.buffer.dtensor.op_rules import IS_DISPATCH_BYPASSED
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.fsdp.grouping import device_type_of, find_parameters, move_buffers
from megafsdp.fsdp.runtime.autograd_hooks import map_tensors
from tests.fsdp.toy import (
    WIDTH,
    Block,
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
from tests.pairwise import gate_of
from tests.ranks import Ranks


def _shown(module: nn.Module) -> set[str]:
    return {"sharded" if isinstance(p, DTensor) else "full" for p in module.parameters()}


def _own(x: torch.Tensor) -> torch.Tensor:
    return x[dist.get_rank()]


class Flattening(nn.Module):
    """A unit whose output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, seen with one dimension."""
        return self.linear(x).view(-1)


class EditsOutputs(nn.Module):
    """Changes the outputs of its units in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Flattening()
        self.second = Flattening()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the units, each followed by an edit of its output."""
        y = self.first(x)
        y += 1
        z = self.second(y.view_as(x))
        z.mul_(2)
        return z.square().mean()


def _edits_views() -> None:
    torch.manual_seed(0)
    reference = EditsOutputs()
    net = copy.deepcopy(reference)
    for unit in (net.first, net.second):
        fully_shard(unit)
    fully_shard(net)
    x = torch.randn(dist.get_world_size(), 3, 12)
    for needs_grad in (False, True):
        for rows in x:
            inputs = rows.clone().requires_grad_(needs_grad)
            (reference(inputs) / len(x)).backward()
        net(_own(x).clone().requires_grad_(needs_grad)).backward()
        assert_same_grads(net, reference)
        assert _shown(net) == {"sharded"}
        assert not any(u._fsdp_unit().is_unsharded for u in (net, net.first, net.second))


def test_views_that_a_unit_returns_may_be_edited_in_place(ranks: Ranks) -> None:
    """Their backward begins the unit's backward all the same."""
    ranks(2).run(_edits_views)


class _Delegating(nn.Module):
    """Takes attributes that it lacks from the module inside, as adapters do."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.scale = nn.Parameter(torch.full((12,), 0.5))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrapped(x) * self.scale


def _delegates(how: str) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(12, 12), _Delegating(nn.Linear(12, 12)))
    if how == "as the root":
        reference = _Delegating(reference)
    net = copy.deepcopy(reference)
    if how == "by class":
        fully_shard_model(net, [nn.Linear, _Delegating])
        assert isinstance(net[1], FSDPModule)
    else:
        fully_shard(net.wrapped if how == "as the root" else net[1].wrapped)
        fully_shard(net)
    x = torch.randn(dist.get_world_size(), 3, 12)
    reference(x).square().mean().backward()
    net(_own(x)).square().mean().backward()
    assert_same_grads(net, reference)


@pytest.mark.parametrize("how", ["by class", "as the root", "within the root"])
def test_a_wrapper_that_passes_attributes_on_is_no_unit_by_that(ranks: Ranks, how: str) -> None:
    """It may be given to fully_shard() after the module inside, or be a part of the root's unit."""
    ranks(2).run(_delegates, how)


def _edits_inputs() -> None:
    net = nn.Sequential(nn.Linear(12, 12), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(12, 1)))
    fully_shard(net[1])
    fully_shard(net)
    with pytest.raises(RuntimeError, match="view and is being modified inplace"):
        net(torch.ones(2, 12))
    with torch.no_grad():
        net(torch.ones(2, 12))


def test_a_unit_that_edits_its_input_is_refused(ranks: Ranks) -> None:
    """Autograd says so; without a graph it may."""
    ranks(2).run(_edits_inputs)


def _gradients_of_inputs() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(12, 12), Block(), nn.Linear(12, 1))
    net = copy.deepcopy(reference)
    fully_shard(net[1])
    fully_shard(net)
    x = torch.randn(dist.get_world_size(), 3, 12)
    inputs = _own(x).clone().requires_grad_()
    wanted = torch.autograd.grad(reference(inputs).mean(), inputs)[0]
    assert torch.equal(torch.autograd.grad(net(inputs).mean(), inputs)[0], wanted)
    net(inputs).mean().backward(inputs=[inputs])
    assert torch.equal(inputs.grad, wanted)
    assert all(p.grad is None for p in net.parameters())
    reference(x).mean().backward()
    net(_own(x)).mean().backward()
    assert_same_grads(net, reference)


def test_gradients_of_inputs_alone_leave_parameters_without_any(ranks: Ranks) -> None:
    """autograd.grad and backward(inputs=...) of inputs are right, as is the next backward."""
    ranks(2).run(_gradients_of_inputs)


def _engine_options(strategy: str) -> dict[str, object]:
    if strategy != "hfsdp":
        return {"strategy": strategy}
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_outer", "dp_shard"))
    return {"mesh": mesh, "outer_strategy": "optim"}


def _inference_first_in_bf16(strategy: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options = _engine_options(strategy)
    wanted, net = (pair(num_blocks=1, mp_policy=policy, **options)[1] for _ in range(2))
    optimizers = [fused_adamw(wanted), fused_adamw(net)]
    for step in range(2):
        batch = mine(batches(1, seed=step)[0])
        with torch.inference_mode():
            net(*batch)
        for model, optimizer in zip((wanted, net), optimizers, strict=True):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    for found, parameter in zip(net.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(found.detach().to_local(), parameter.detach().to_local())


def _inference_first(strategy: str) -> None:
    reference, net = pair(num_blocks=1, **_engine_options(strategy))
    with torch.inference_mode():
        batch = batches(1)[0]
        logits = net(mine(batch)[0])
        torch.testing.assert_close(logits, reference(mine(batch)[0]))
    train_both(reference, net, num_steps=1, make_optimizer=fused_adamw)
    with torch.inference_mode():
        batch = batches(1)[0]
        logits = net(mine(batch)[0])
        wanted = reference(mine(batch)[0])
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    train_both(reference, net, num_steps=1, make_optimizer=fused_adamw)
    assert_same_parameters(net, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "strategy", ["optim_grads_params", "optim_grads", "optim", "no_shard", "hfsdp"]
)
@pytest.mark.parametrize("body", [_inference_first, _inference_first_in_bf16])
def test_inference_mode_may_come_first(ranks: Ranks, body: object, strategy: str) -> None:
    """A forward in inference mode before and between steps changes nothing for training."""
    ranks(2).run(body, strategy)


def _wrapped_after_inner_forward() -> None:
    torch.manual_seed(0)
    reference = Net()
    net = copy.deepcopy(reference)
    fully_shard(net.blocks[1])
    x = torch.randn(2, 12)
    for _ in range(2):
        for model in (reference, net):
            model.blocks[1](x).square().mean().backward()
    fully_shard(net.blocks[0])
    fully_shard(net)
    batch = batches(1)[0]
    reference(*batch).backward()
    net(*mine(batch)).backward()
    assert_same_grads(net, reference)
    for model in (reference, net):
        model.zero_grad()
    train_both(reference, net, num_steps=2, make_optimizer=fused_adamw)
    assert_same_parameters(net, reference, rtol=1e-4, atol=1e-5)


def test_a_root_may_be_wrapped_after_its_inner_unit_ran(ranks: Ranks) -> None:
    """The inner unit, a root until then, becomes one of the new root's units."""
    ranks(2).run(_wrapped_after_inner_forward)


def _part_first() -> None:
    reference, net = pair()
    x = torch.randn(2, 12)
    for model in (reference, net):
        model.blocks[1](x).sum().backward()
    assert_same_grads(net.blocks[1], reference.blocks[1])
    for model in (reference, net):
        model.zero_grad()
    train_both(reference, net, num_steps=2, make_optimizer=fused_adamw)
    assert_same_parameters(net, reference, rtol=1e-4, atol=1e-5)


def test_an_inner_unit_may_run_and_learn_before_the_root(ranks: Ranks) -> None:
    """The root's first forward takes it over."""
    ranks(2).run(_part_first)


def _forward_hooks() -> None:
    net = Net()
    block = net.blocks[0]
    seen: list[tuple[str, set[str]]] = []

    def note(name: str) -> object:
        return lambda *_: seen.append((name, _shown(block)))

    block.register_forward_pre_hook(note("pre before"))
    block.register_forward_hook(note("post before"))
    shard(net)
    block.register_forward_pre_hook(note("pre after"))
    block.register_forward_hook(note("post after"))
    block.register_full_backward_hook(note("backward"))
    reference = Net()
    batch = batches(1)[0]
    reference(*batch).backward()
    net(*mine(batch)).backward()
    assert_same_grads(net, reference)
    assert [name for name, _ in seen] == [
        "pre before",
        "pre after",
        "post before",
        "post after",
        "backward",
    ]
    shown = dict(seen)
    assert shown["pre before"] == shown["pre after"] == shown["post before"] == {"full"}
    assert shown["post after"] == {"sharded"}


def test_forward_hooks_of_the_user_run_once_and_see_what_is_documented(ranks: Ranks) -> None:
    """Full parameters, save in hooks after the unit's own post-forward."""
    ranks(2).run(_forward_hooks)


class Normed(nn.Module):
    """Linear, batch norm, and a module without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12)
        self.activation = nn.Sequential(nn.Tanh())
        self.out = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number a row."""
        return self.out(self.activation(self.norm(self.linear(x))))


def _buffers_and_parameterless() -> None:
    torch.manual_seed(0)
    reference = Normed()
    net = copy.deepcopy(reference)
    for unit in (net.linear, net.norm, net.activation):
        fully_shard(unit)
    fully_shard(net)
    x = torch.randn(8, 12)
    for _ in range(2):
        # All ranks see the same rows, hence the same statistics as one process.
        for model in (reference, net):
            model(x).square().mean().backward()
    assert_same_grads(net, reference)
    for name, buffer in reference.named_buffers():
        assert torch.equal(net.get_buffer(name), buffer), name
    assert net.norm.num_batches_tracked == 2
    for model in (reference, net):
        model.eval()
    torch.testing.assert_close(net(x), reference(x))


def test_buffers_stay_each_ranks_own_and_units_may_have_no_parameters(ranks: Ranks) -> None:
    """Batch norm's statistics follow the rank's rows; a parameterless unit passes gradients."""
    ranks(2).run(_buffers_and_parameterless)


class _Routed(nn.Module):
    """A block between buffers, beside a parameter that is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.BatchNorm1d(WIDTH), Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.block.register_buffer("shift", self.shift)

    def forward(self, x: torch.Tensor, *others: object, **named: object) -> torch.Tensor:
        """Return the block's output."""
        return self.block(self.norm(x)) + self.shift


def _host_to_device() -> None:
    # The meta device stands for one that is not the host.
    mesh = init_device_mesh("meta", (dist.get_world_size(),))
    with torch.device("meta"):
        net = _Routed()
    net.scale = nn.Parameter(torch.ones(WIDTH))
    fully_shard(net.block, mesh=mesh)
    fully_shard(net, mesh=mesh, ignored_params=[net.scale])
    assert net.scale.device.type == "cpu"

    seen: list[tuple[tuple[object, ...], dict[str, object]]] = []
    for module in (net, net.block):
        module.register_forward_pre_hook(lambda _, *inputs: seen.append(inputs), with_kwargs=True)
    x, packed = torch.ones(3, WIDTH), pack_sequence([torch.ones(2), torch.ones(1)])
    with torch.no_grad():
        net(x, [x, "text"], packed=packed, mask={"rows": x})
        (moved, (items, text), *_), named = seen[0]
        assert moved.is_meta and items.is_meta and text == "text"
        assert named["mask"]["rows"].is_meta and named["packed"].data.is_meta
        assert named["packed"].batch_sizes.device.type == "cpu"
    # A root of no parameters has the device of the units below it.
    bare = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH, device="meta")), mesh=mesh)
    bare = fully_shard(nn.Sequential(bare), mesh=mesh)
    with torch.no_grad():
        assert bare(x).is_meta
    # Inner units take what the model gives them: one that runs under a root moves nothing.
    context = net._fsdp_unit().require_context()
    inner = net.block._fsdp_unit()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "is_without_root", lambda _: False)
        assert inner.prepare_inputs((x,), {})[0][0] is x


def test_inputs_of_the_root_are_moved_to_the_device_of_the_mesh(ranks: Ranks) -> None:
    """Ignored parameters stay where they are."""
    ranks(1).run(_host_to_device)


def test_buffers_are_moved_to_the_device_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay the same objects, as tied ones have to; those on the meta device stay there."""
    net = _Routed()
    net.register_buffer("later", torch.empty(2, device="meta"))
    before = dict(net.named_buffers())
    # A copy that can be told from the buffer stands for one on another device.
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor.clone() + 7)
    move_buffers([net], torch.device("cuda", 0))
    assert dict(net.named_buffers()) == before and net.block.shift is net.shift
    assert (net.shift == 7).all() and net.norm.num_batches_tracked == 7 and net.later.is_meta
    move_buffers([net], torch.device("cpu"))
    assert (net.shift == 7).all()


def _device_of_default_mesh() -> None:
    modules = {device: nn.Linear(3, 3, device=device) for device in ("cpu", "meta")}
    found = {d: find_parameters([m], (), MixedPrecisionPolicy()) for d, m in modules.items()}
    for config, on_host in (
        ("cuda:nccl", "cuda"),
        ("cpu:gloo", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_backend_config", lambda *_, config=config: config)
            assert device_type_of(found["cpu"]) == on_host
            if "," not in config:
                assert device_type_of(found["meta"]) == config.partition(":")[0]


def test_the_default_mesh_is_of_the_only_device_that_the_process_group_serves(
    ranks: Ranks,
) -> None:
    """NCCL alone serves no host; where both are served the parameters decide."""
    ranks(1).run(_device_of_default_mesh)


def _all_frozen() -> None:
    reference, net = pair()
    for model in (reference, net):
        model.requires_grad_(False)
    batch = batches(1)[0]
    for _ in range(2):
        torch.testing.assert_close(net(mine(batch)[0]), reference(mine(batch)[0]))
    assert _shown(net) == {"sharded"}
    for model in (reference, net):
        model.requires_grad_(True)
    reference(*batch).backward()
    net(*mine(batch)).backward()
    assert_same_grads(net, reference)


def test_a_model_frozen_whole_runs_and_may_be_thawed(ranks: Ranks) -> None:
    """Without trainable parameters there is no backward; with them again there is."""
    ranks(2).run(_all_frozen)


class _Indexed(nn.Module):
    """A block whose rows are permuted by a frozen integer parameter, and masked by another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.order = nn.Parameter(torch.tensor([2, 0, 1, 5, 4, 3]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False] * 3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[:, self.order] * self.mask


def _integer_parameters(strategy: str, root: Path) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(_Indexed(), _Indexed())
    net = copy.deepcopy(reference)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in net:
        fully_shard(block, strategy=strategy, mp_policy=policy)
    fully_shard(net, strategy=strategy, mp_policy=policy)
    x = torch.randn(4, 6)
    net(x).float().square().sum().backward()
    optimizer = megafsdp.FusedAdam(net.parameters(), lr=0.1)
    optimizer.step()
    wanted = reference.to(torch.bfloat16)
    torch.testing.assert_close(net[0].order.full_tensor(), wanted[0].order, rtol=0, atol=0)
    megafsdp.checkpoint.save(root, step=1, model=net, optimizer=optimizer)
    with torch.no_grad():
        net[1].order.to_local().zero_()
    megafsdp.checkpoint.load(root, model=net, optimizer=optimizer)
    assert net[1].order.full_tensor().tolist() == [2, 0, 1, 5, 4, 3]
    assert net[1].mask.full_tensor().tolist() == [True, False] * 3
    assert net[0].order.grad is None
    assert net[0].order.to_local().shape == (6,), "whole on every rank"


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim", "no_shard"])
def test_frozen_integer_parameters_stay_as_they_are(
    ranks: Ranks, strategy: str, tmp_path: Path
) -> None:
    """Used as an index and a mask under bf16, stepped over, saved and loaded."""
    ranks(2).run(_integer_parameters, strategy, tmp_path)


class WritesPastAutograd(torch.optim.Optimizer):
    """Gradient descent that writes through ``.data``, which counts no writes."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: None = None) -> None:
        """Descend."""
        for param_group in self.param_groups:
            for parameter in param_group["params"]:
                if parameter.grad is not None:
                    own = local_tensor(parameter).data
                    own.sub_(local_tensor(parameter.grad), alpha=param_group["lr"])


def _optimizer_swapped(strategy: str) -> None:
    reference, net = pair(num_blocks=1, strategy=strategy)
    for make_optimizer in (
        adamw,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        lambda m: WritesPastAutograd(m.parameters()),
        adamw,
    ):
        train_both(reference, net, num_steps=1, make_optimizer=make_optimizer)
    assert_same_parameters(net, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_the_optimizer_may_be_swapped(ranks: Ranks, strategy: str) -> None:
    """A new optimizer over the same parameters goes on from where they are."""
    ranks(2).run(_optimizer_swapped, strategy)


class _Halves(torch.optim.Optimizer):
    """Halves weights by address, with or without a gradient, as an average of weights might."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter_group in self.param_groups:
            for parameter in parameter_group["params"]:
                local_tensor(parameter).data.mul_(0.5)


def _stepped_without_gradients(strategy: str) -> None:
    reference, net = pair(num_blocks=1, strategy=strategy)
    tokens = batches(1)[0][0]
    with torch.no_grad():
        net(mine((tokens, tokens))[0])
        _Halves(net.parameters()).step()
        for parameter in reference.parameters():
            parameter.mul_(0.5)
        torch.testing.assert_close(net(tokens), reference(tokens))


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_a_step_counts_without_gradients(ranks: Ranks, strategy: str) -> None:
    """The next forward reads what an optimizer wrote to weights that had none."""
    ranks(2).run(_stepped_without_gradients, strategy)


def _halve_in_lists(tensors: Iterable[torch.Tensor]) -> None:
    torch._foreach_mul_(list(tensors), 0.5)


def _halve(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.mul_(0.5)


def _rename(
    module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: object
) -> None:
    state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")


# Of 0-dim parameters torch does not count writes to entries, and 2.11 none of lists of aliases.
UNCOUNTED = ("state dict", *(("data", "detached") if IS_DISPATCH_BYPASSED else ()))
EDITS: dict[str, Callable[[nn.Module], None]] = {
    "parameters": lambda net: _halve_in_lists(net.parameters()),
    "data": lambda net: _halve_in_lists(p.data for p in net.parameters()),
    "detached": lambda net: _halve_in_lists(p.detach() for p in net.parameters()),
    "one by one": lambda net: _halve(p.data for p in net.parameters()),
    "state dict": lambda net: _halve(net.state_dict().values()),
    "rows of the state dict": lambda net: _halve(map(local_tensor, net.state_dict().values())),
}


class _Scaled(nn.Linear):
    """A layer with a 0-dim parameter, of which every rank has the whole."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        self.scale = nn.Parameter(torch.tensor(0.75))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scaled outputs."""
        return super().forward(x) * self.scale


def _edited(strategy: str, edit: str, dtypes: tuple[torch.dtype | None, ...]) -> None:
    for dtype in dtypes:
        torch.manual_seed(0)
        layer_class = nn.Linear if edit in UNCOUNTED else _Scaled
        reference = nn.Sequential(layer_class(4, 8), layer_class(8, 4))
        for layer in reference:
            layer.register_state_dict_post_hook(_rename)
        net = copy.deepcopy(reference)
        for layer in net:
            fully_shard(layer, strategy=strategy, mp_policy=MixedPrecisionPolicy(dtype))
        fully_shard(net, strategy=strategy, mp_policy=MixedPrecisionPolicy(dtype))
        reference.to(dtype)
        x = torch.ones(2, 4, dtype=dtype)
        with torch.no_grad():
            assert torch.equal(net(x), reference(x))
            for model in (net, reference):
                EDITS[edit](model)
            assert torch.equal(net(x), reference(x)), dtype


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim", "no_shard"])
def test_the_next_forward_sees_edits_by_hand(ranks: Ranks, strategy: str, edit: str) -> None:
    """Of aliases, by lists, as an evaluation of averages makes them, and of renamed entries."""
    # What torch counts of replicated parameters: no lists of only these, no entries.
    has_cast = strategy != "no_shard" or edit == "one by one"
    ranks(2).run(_edited, strategy, edit, (None, torch.bfloat16) if has_cast else (None,))


def _forward_without_backward() -> None:
    reference, net = pair()
    batch = batches(1)[0]
    net(*mine(batch))
    net(*mine(batch))
    assert _shown(net) == {"sharded"}
    early = adamw(net)
    reference(*batch).backward()
    net(*mine(batch)).backward()
    assert_same_grads(net, reference)
    for optimizer in (early, adamw(reference)):
        optimizer.step()
    assert_same_parameters(net, reference, rtol=1e-4, atol=1e-5)


def test_an_optimizer_built_after_a_forward_without_backward_holds_the_model(ranks: Ranks) -> None:
    """Parameters are listed sharded between forward and backward."""
    ranks(2).run(_forward_without_backward)


class _Written(nn.Module):
    """One unit, in whose forward one weight is written after others were saved for backward."""

    def __init__(self, write: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write = write
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.embedding = nn.Embedding(10, 8, max_norm=1.0 if write == "max_norm" else None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss of two tokens."""
        x = self.first(self.first.weight[:2]).tanh() @ self.first.weight
        if self.write == "in place":
            with torch.no_grad():
                self.last.weight.clamp_(-0.1, 0.1)
        elif self.write == "parametrization":
            # As PEFT does around a layer whose parameters it adapts; torch assigns their data.
            parametrize.register_parametrization(self.last, "weight", nn.Tanh())
        x = self.last(x)
        if self.write == "parametrization":
            parametrize.remove_parametrizations(self.last, "weight", leave_parametrized=False)
        return (x + self.embedding(tokens)).square().mean()


def _written_in_forward(strategy: str, write: str) -> None:
    reference = _Written(write)
    net = fully_shard(copy.deepcopy(reference), strategy=strategy)
    tokens = torch.arange(2 * dist.get_world_size()).view(-1, 2) % 10
    for row in tokens:
        (reference(row) / len(tokens)).backward()
    net(_own(tokens)).backward()
    assert_same_grads(net, reference)


WRITES = list(
    itertools.product(
        ("optim_grads_params", "optim_grads", "optim", "no_shard"),
        ("in place", "parametrization", "max_norm"),
        (1, 2),
    )
)


@pytest.mark.parametrize(("strategy", "write", "num_ranks"), gate_of(WRITES, "writes"))
def test_a_weight_may_be_written_in_forward(
    ranks: Ranks, strategy: str, write: str, num_ranks: int
) -> None:
    """Autograd counts writes of each parameter by itself, as it does in plain torch."""
    ranks(num_ranks).run(_written_in_forward, strategy, write)


def _submodule_loaded(strategy: str) -> None:
    _, net = pair(strategy=strategy, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    tokens = mine(batches(1)[0])[0]
    with torch.no_grad():
        before = net(tokens)
        part = net.blocks[1].down
        part.load_state_dict({name: 3 * value for name, value in part.state_dict().items()})
        after = net(tokens)
        net.load_state_dict(net.state_dict())
        assert torch.equal(after, net(tokens))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim", "no_shard"])
def test_loading_a_part_of_a_unit_counts(ranks: Ranks, strategy: str) -> None:
    """load_state_dict() of a plain submodule refreshes compute weights."""
    ranks(2).run(_submodule_loaded, strategy)


def _tiny_parameters() -> None:
    torch.manual_seed(0)

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((1,), 1.5))
            self.shift = nn.Parameter(torch.zeros(1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.scale * x + self.shift).square().mean()

    reference = Tiny()
    net = fully_shard(copy.deepcopy(reference))
    numels = torch.tensor(sum(p.detach().to_local().numel() for p in net.parameters()))
    dist.all_reduce(numels)
    assert numels == 2
    x = torch.randn(dist.get_world_size(), 3)
    for _ in range(2):
        for model, rows in ((reference, x), (net, _own(x))):
            model(rows).backward()
        assert_same_grads(net, reference)
    for model in (reference, net):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_same_parameters(net, reference, rtol=1e-5, atol=1e-6)


def test_parameters_of_one_element_lie_on_one_rank(ranks: Ranks) -> None:
    """Other ranks hold nothing of them and still get their values."""
    ranks(3).run(_tiny_parameters)


def _post_accumulate_once() -> None:
    _, net = pair()
    calls: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: calls.append(n))
    names = sorted(n for n, _ in net.named_parameters())
    for batch in batches(2):
        net(*mine(batch)).backward()
        assert sorted(calls) == names
        calls.clear()
    assert all(g is not None for g in full_grads(net).values())


def test_post_accumulate_hooks_fire_once_a_backward(ranks: Ranks) -> None:
    """Tied parameters too."""
    ranks(2).run(_post_accumulate_once)


def _sparse_gradients() -> None:
    reference = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    net = fully_shard(copy.deepcopy(reference))
    tokens = torch.arange(6).view(dist.get_world_size(), -1)
    for sync in (False, True, True):
        net.set_requires_gradient_sync(sync)
        reference(tokens).square().sum().div(dist.get_world_size()).backward()
        net(_own(tokens)).square().sum().backward()
    reference[0].weight.grad = reference[0].weight.grad.to_dense()
    assert_same_grads(net, reference)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sparse_gradients_are_summed_densely(ranks: Ranks, num_ranks: int) -> None:
    """Those of an embedding, added up and packed."""
    ranks(num_ranks).run(_sparse_gradients)


class Named(dict):
    """A batch whose entries are attributes too."""

    def __getattr__(self, name: str) -> object:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Output(dict):
    """What a model returns; like those of transformers it refuses update()."""

    def update(self, *args: object, **kwargs: object) -> None:
        """Refuse."""
        raise TypeError("no update()")


class Labelled(list):
    """A list that knows what it is."""

    def __init__(self, items: list[torch.Tensor], label: str) -> None:
        super().__init__(items)
        self.label = label


def test_outputs_that_refuse_update_are_replaced_entry_by_entry() -> None:
    """Casting an output changes its tensors alone, in an object of its own."""
    x = torch.ones(2)
    given = Output(loss=x, cache=None)
    changed = map_tensors(given, lambda t: t.to(torch.bfloat16))
    assert type(changed) is Output and list(changed) == ["loss", "cache"]
    assert changed["loss"].dtype == torch.bfloat16 and given["loss"] is x


class Pair(NamedTuple):
    """Fields of a tuple."""

    x: torch.Tensor
    n: int


class PairOfOne(Pair):
    """A named tuple that is made from one value."""

    def __new__(cls, x: torch.Tensor) -> PairOfOne:
        """Make the second field from the first."""
        return super().__new__(cls, x, x.numel())


def test_named_tuples_with_a_constructor_of_their_own_stay_what_they_are() -> None:
    """Their fields are replaced, not made again."""
    changed = map_tensors(PairOfOne(torch.ones(2)), lambda t: 2 * t)
    assert type(changed) is PairOfOne and changed.x.tolist() == [2, 2] and changed.n == 2


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_containers_of_inputs_stay_what_they_are(kind: str) -> None:
    """Subclasses keep their type and attributes where a tensor in them is replaced."""
    x = torch.ones(2, requires_grad=True)
    given = Named(x=x, n=1) if kind == "dict" else Labelled([x], "inputs")
    changed = map_tensors(given, lambda t: 2 * t)
    assert type(changed) is type(given)
    if kind == "dict":
        assert torch.equal(changed.x, 2 * x) and changed.n == 1 and given.x is x
    else:
        assert changed.label == "inputs" and torch.equal(changed[0], 2 * x) and given[0] is x


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Changes what it is given, and finds the rest by itself."""

    y: torch.Tensor
    total: torch.Tensor = dataclasses.field(init=False)

    @functools.cached_property
    def double(self) -> torch.Tensor:
        """Return twice the tensor, computed once."""
        return 2 * self.y

    def __post_init__(self) -> None:
        object.__setattr__(self, "y", 2 * self.y)
        object.__setattr__(self, "total", self.y.sum())


def test_dataclasses_are_not_made_anew() -> None:
    """Fields that the class fills are kept, and replaced; what was cached is computed anew."""
    given = Scaled(torch.ones(2))
    assert given.double.dtype == torch.float32
    changed = map_tensors(given, lambda t: t.to(torch.bfloat16))
    assert type(changed) is Scaled and given.y.dtype == torch.float32
    assert torch.equal(changed.y, torch.full((2,), 2.0, dtype=torch.bfloat16))
    assert torch.equal(changed.total, torch.tensor(4.0, dtype=torch.bfloat16))
    assert changed.double.dtype == torch.bfloat16 and given.double.dtype == torch.float32
    assert map_tensors(given, lambda t: t) is given


def _saved_after_an_error() -> None:
    reference, net = pair(num_blocks=1)

    def broken(grad: torch.Tensor) -> None:
        raise ValueError("broken")

    def breaks(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(broken)

    hook = net.blocks[0].register_forward_hook(breaks)
    with pytest.raises(ValueError, match="broken"):
        net(*mine(batches(1)[0])).backward()
    hook.remove()
    with pytest.raises(RuntimeError, match=r"after an exception .* reset_iter_state\(\)"):
        net.state_dict()
    net.reset_iter_state()
    assert _shown(net) == {"sharded"}
    assert_same_parameters(net, reference, rtol=0, atol=0)


def test_a_save_after_an_exception_says_how_to_come_to_rest(ranks: Ranks) -> None:
    """A loop that catches it and saves is at no fault of its own."""
    ranks(2).run(_saved_after_an_error)


class _ClearsAlone(Block):
    def zero_grad(self) -> None:  # type: ignore[override]
        for parameter in self.parameters():
            parameter.grad = None


def _clears_alone() -> None:
    net = fully_shard(_ClearsAlone())
    net(torch.ones(2, WIDTH)).sum().backward()
    net.zero_grad()
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_class_may_clear_gradients_in_its_own_way(ranks: Ranks) -> None:
    """Its method without a parameter is called as it is."""
    ranks(2).run(_clears_alone)


class Tied(nn.Module):
    """A block that ignores two weights, of which one is tied to a layer outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.block[2].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the head's outputs."""
        return self.head(self.block(x))


def _ignored_within() -> None:
    torch.manual_seed(0)
    reference = Tied()
    net = copy.deepcopy(reference)
    own, tied = net.block[1].weight, net.block[2].weight
    fully_shard(net.block, ignored_params={own, tied})
    fully_shard(net)
    # As in torch, an outer unit leaves alone what an inner one ignores; but a tie stays one.
    assert net.block[1].weight is own
    assert net.head.weight is net.block[2].weight is not tied
    x = torch.randn(dist.get_world_size(), 3, 4)
    reference(x).sum().backward()
    net(x[dist.get_rank()]).sum().backward()
    others = copy.deepcopy(reference)
    others.zero_grad()
    others(x[dist.get_rank()]).sum().backward()
    torch.testing.assert_close(own.grad, others.block[1].weight.grad)
    for name, parameter in reference.named_parameters():
        if name != "block.1.weight":
            found = full_tensor(net.get_parameter(name).grad) * dist.get_world_size()
            torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-6)


def test_an_outer_unit_leaves_alone_what_an_inner_one_ignores(ranks: Ranks) -> None:
    """Its gradient is the rank's own. What the outer unit has by a tie is sharded everywhere."""
    ranks(2).run(_ignored_within)
