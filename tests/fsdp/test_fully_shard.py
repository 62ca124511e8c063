"""What fully_shard accepts and refuses, and what optimizers and their steps see."""

from __future__ import annotations

import copy
import pickle
import types
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from megafsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    full_tensor,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    mark_main_weights_changed,
    register_fsdp_forward_method,
)
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.mesh.annotation import FusedParts, annotate, annotation_of
from tests.fsdp.toy import Block, Net, adamw, assert_same_parameters, batches, mine, pair, shard
from tests.ranks import Ranks


def _refused(make: Callable[[], object], error: type[Exception], words: list[str]) -> None:
    with record_collectives() as record, pytest.raises(error) as caught:
        make()
    message = str(caught.value)
    for word in [*words, "Expected", "got"]:
        assert word in message, message
    assert not record.calls, "errors come before the first collective"


def _wrap_twice() -> None:
    net = Net()
    fully_shard(net)
    _refused(lambda: fully_shard(net), ValueError, ["FSDPNet", "once for each unit"])


def _wrong_modules() -> None:
    twice = Block()
    _refused(lambda: fully_shard([twice, twice]), ValueError, ["Block", "more than once"])
    _refused(lambda: fully_shard(()), ValueError, ["an empty list"])
    _refused(lambda: fully_shard(m for m in (twice,)), TypeError, ["a module", "generator"])
    fully_shard(twice)
    pair = (Block(), Block())
    assert fully_shard(pair) is pair and pair[0]._fsdp_unit() is pair[1]._fsdp_unit()
    assert all(isinstance(block, FSDPModule) for block in pair)


def _tied_across_units() -> None:
    net = Net()
    fully_shard(net.embedding)
    words = ["'head.weight'", "'weight' of the unit Embedding", "fully_shard([first, second])"]
    _refused(lambda: fully_shard(net), ValueError, words)


def _wrong_arguments() -> None:
    _refused(lambda: fully_shard(Block(), strategy="zero3"), ValueError, ["'zero3'"])
    _refused(lambda: fully_shard(Block(), strategy=True), ValueError, ["True", "stage 0 to 3"])
    _refused(lambda: fully_shard(Block(), average="mean"), ValueError, ["'mean'", "'token'"])
    _refused(lambda: fully_shard(Block(), prefetch=-1), ValueError, ["prefetch"])
    _refused(lambda: fully_shard(Block(), prefetch=1.5), ValueError, ["whole number", "1.5"])
    _refused(
        lambda: fully_shard(Block(), shard_placement_fn=lambda p: Shard(1)),
        NotImplementedError,
        ["Shard(0)", "shard_placement_fn", "'norm.weight'"],
    )
    fully_shard(Block(), shard_placement_fn=lambda p: None if p.ndim == 1 else Shard(0))


def _wrong_policies() -> None:
    _refused(lambda: fully_shard(Block(), mp_policy="bf16"), TypeError, ["mp_policy", "str"])
    _refused(lambda: fully_shard(Block(), offload_policy=1), TypeError, ["offload_policy"])
    _refused(lambda: MixedPrecisionPolicy(torch.int8), ValueError, ["param_dtype", "torch.int8"])
    world = dist.group.WORLD
    _refused(lambda: fully_shard(Block(), mesh=world), TypeError, ["ProcessGroup", "from_group"])
    names = ["up.weight"]
    _refused(lambda: fully_shard(Block(), ignored_params=names), TypeError, ["'up.weight'"])


def _wrong_parameters() -> None:
    block = Block()
    block.register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    _refused(lambda: fully_shard(block), NotImplementedError, ["'codes'", "ignored_params"])
    fully_shard(block, ignored_params=[block.codes])
    with warnings.catch_warnings():
        # A DeprecationWarning, from torch 2.15 on a FutureWarning.
        warnings.simplefilter("ignore")
        compiled = torch.jit.script(nn.Linear(12, 12))
    net = nn.Sequential(nn.Linear(12, 12), compiled)
    words = ["'1.weight'", "torch.jit", "ignored_params"]
    _refused(lambda: fully_shard(net), NotImplementedError, words)
    _refused(lambda: fully_shard(compiled), NotImplementedError, words[1:])
    fully_shard(net, ignored_params=list(compiled.parameters()))
    assert net(torch.ones(2, 12)).shape == (2, 12)


def _wrong_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("outer", "inner", "tp"))
    words = ["(2, 1, 1)", "mesh['dp_outer', 'dp_shard']"]
    _refused(lambda: fully_shard(Block(), mesh=mesh), ValueError, words)
    nameless = init_device_mesh("cpu", (2, 1))
    _refused(lambda: fully_shard(Block(), mesh=nameless), ValueError, ["two named", "None"])


def _different_models() -> None:
    net = fully_shard(Block(12 + 4 * dist.get_rank()))
    with pytest.raises(ValueError, match="same parameters, shapes, dtypes and recipes on all"):
        net(torch.ones(1, 12 + 4 * dist.get_rank()))


@pytest.mark.parametrize(
    "body",
    [
        _wrap_twice,
        _wrong_modules,
        _tied_across_units,
        _wrong_arguments,
        _wrong_policies,
        _wrong_parameters,
        _wrong_mesh,
        _different_models,
    ],
)
def test_what_cannot_be_right_is_refused_on_all_ranks(ranks: Ranks, body: object) -> None:
    """Each error says what, where and how to mend, before the first collective."""
    ranks(2).run(body)


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    """A lone process is told to initialise torch.distributed."""
    with pytest.raises(RuntimeError, match="init_process_group"):
        fully_shard(Block())


def _conversions() -> None:
    _, net = pair()
    before = {n: p for n, p in net.named_parameters()}
    values = {n: p.local.clone() for n, p in before.items()}
    for same in (lambda: net.to(torch.float32), lambda: net.to("cpu"), net.float):
        assert same() is net
    leaf = fully_shard(nn.BatchNorm1d(3))
    for change in (
        *(net.half, net.double, net.blocks[0].half, leaf.half),
        *(lambda: net.to(torch.bfloat16), lambda: net.to("meta"), lambda: leaf.to("meta")),
    ):
        _refused(change, RuntimeError, ["before fully_shard()", "MixedPrecisionPolicy"])
    leaf.running_mean = leaf.running_mean.double()
    _refused(leaf.float, RuntimeError, ["'running_mean'", "before fully_shard()"])
    assert isinstance(leaf.weight, UnevenDTensor) and leaf.weight.dtype == torch.float32
    for copier in (lambda: copy.deepcopy(net), lambda: pickle.dumps(net)):
        _refused(copier, RuntimeError, ["full_state_dict"])
    # Copies, so that parameters stay what they are.
    net.load_state_dict(net.state_dict(), assign=True)
    parameter = next(iter(net.parameters()))
    with pytest.raises(RuntimeError, match=r"parameter\.copy_"):
        parameter.data = torch.zeros(1)
    for name, after in net.named_parameters():
        assert after is before[name]
        assert torch.equal(after.local, values[name])


def test_conversions_copies_and_assignments_lose_nothing(ranks: Ranks) -> None:
    """What changes nothing passes; the rest raises before touching a parameter."""
    ranks(2).run(_conversions)


def _wrapping_facts() -> None:
    reference, net = pair()
    assert isinstance(net, FSDPModule) and isinstance(net, Net)
    assert type(net).__name__ == "FSDPNet"
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in reference.named_parameters()]
    assert net.head.weight is net.embedding.weight
    for name, parameter in net.named_parameters():
        wanted = dict(reference.named_parameters())[name]
        assert isinstance(parameter, UnevenDTensor) and isinstance(parameter, nn.Parameter)
        assert parameter.shape == wanted.shape and parameter.dtype == torch.float32
        assert torch.equal(full_tensor(parameter.detach()), wanted.detach())
    locals_ = [p.local.shape[0] for p in net.parameters()]
    assert 0 in locals_ or dist.get_world_size() == 1, "some rank holds no row of something"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_sharding_keeps_names_ties_and_values(ranks: Ranks, num_ranks: int) -> None:
    """In place, no key prefix, values equal, some shards empty."""
    ranks(num_ranks).run(_wrapping_facts)


def _replicated_facts() -> None:
    _, net = pair(strategy="no_shard")
    for parameter in net.parameters():
        assert isinstance(parameter, DTensor) and parameter.placements == (Replicate(),)
        assert isinstance(parameter, nn.Parameter)
        for value in (torch.zeros_like(parameter), torch.zeros(parameter.shape)):
            with pytest.raises(RuntimeError, match=r"parameter\.copy_"):
                parameter.data = value


def test_no_shard_parameters_are_replicated_dtensors(ranks: Ranks) -> None:
    """Under no_shard every rank holds all of each parameter."""
    ranks(2).run(_replicated_facts)


def _annotated() -> None:
    block = Block()
    annotate(block.up.weight, tp_dim=0, fused=FusedParts(("gate", "up"), (30, 30)))
    annotation = annotation_of(block.up.weight)
    fully_shard(block)
    assert annotation_of(block.up.weight) == annotation != annotation_of(block.down.weight)


def test_annotations_survive_sharding(ranks: Ranks) -> None:
    """What a layer declared on its parameter stands on the sharded one."""
    ranks(2).run(_annotated)


class _Scaled(nn.Linear):
    """A linear that reads a mark of its weight, as muP's readout does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.weight.multiplier


def _marked(options: dict[str, object]) -> None:
    layer = _Scaled(32, 32)
    layer.weight.multiplier, layer.weight.codes = 2.0, "the user's"
    plain = _Scaled(32, 32)
    plain.load_state_dict(layer.state_dict())
    plain.weight.multiplier = 1.0
    for each in (layer, plain):
        fully_shard(each, **options)
    x = torch.ones(1, 32)
    y = layer(x)
    assert y.count_nonzero()
    assert torch.equal(y, plain(x) * 2.0)
    assert (layer.weight.multiplier, layer.weight.codes) == (2.0, "the user's")


@pytest.mark.parametrize(
    "options", [{}, {"strategy": "no_shard"}, {"mp_policy": MixedPrecisionPolicy(recipe="mxfp8")}]
)
def test_forwards_read_attributes_that_users_wrote_on_parameters(
    ranks: Ranks, options: dict[str, object]
) -> None:
    """They stand on both forms of a parameter; a quantized one still computes with its codes."""
    ranks(2).run(_marked, options)


def _model_call() -> None:
    assert len(units_below([fully_shard_model(Net(), [Net])])) == 1
    by_class = fully_shard_model(Net(), [Net, Block])
    by_name = fully_shard_model(Net(), ["Block"])
    by_dotted = fully_shard_model(Net(), ["tests.fsdp.toy.Block"])
    named = Net()
    named._no_split_modules = ["Block"]
    fully_shard_model(named)
    for net in (by_class, by_name, by_dotted, named):
        assert all(isinstance(m, FSDPModule) for m in (net, *net.blocks))
        assert not isinstance(net.blocks[0].up, FSDPModule)
    _refused(
        lambda: fully_shard_model(Net(), ["Layer"]), ValueError, ["'Layer'", "Block", "Embedding"]
    )
    _refused(lambda: fully_shard_model(Net()), ValueError, ["Block"])
    _refused(lambda: fully_shard_model(Net(), "Block"), TypeError, ["Write ['Block']"])
    _refused(lambda: fully_shard_model(Net(), Block), TypeError, ["a list of classes"])


def test_a_whole_model_is_sharded_by_class_or_name(ranks: Ranks) -> None:
    """Classes, plain and dotted names and _no_split_modules work; wrong names list right ones."""
    ranks(2).run(_model_call)


def _optimizers() -> None:
    net = Net()
    early = torch.optim.SGD(net.parameters(), lr=0.1)
    shard(net)
    _refused(lambda: fully_shard_optimizer(early), ValueError, ["SGD", "after fully_shard()"])
    late = adamw(net)
    assert fully_shard_optimizer(late) is late


def test_an_optimizer_built_too_early_is_found(ranks: Ranks) -> None:
    """fully_shard_optimizer() checks parameters and returns the optimizer itself."""
    ranks(2).run(_optimizers)


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw_foreach": lambda m: adamw(m, foreach=True),
    "adamw_loop": lambda m: adamw(m, foreach=False),
    "adamw_fused": lambda m: adamw(m, fused=True),
    "adamw_amsgrad": lambda m: adamw(m, amsgrad=True),
    "sgd_momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "sgd_fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, fused=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, eps=1e-4),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2, eps=1e-5),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=1e-2, eps=1e-5),
}


def _optimizer_steps(name: str) -> None:
    reference, net = pair(num_blocks=1)
    optimizers = [MAKERS[name](reference), MAKERS[name](net)]
    start = copy.deepcopy(reference)
    for step in range(2):
        batch = batches(1, seed=step)[0]
        reference(*batch).backward()
        net(*mine(batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(net, reference, rtol=1e-4, atol=2e-5)
    assert not torch.equal(start.head.weight, reference.head.weight)


@pytest.mark.parametrize("name", MAKERS)
def test_any_torch_optimizer_steps_sharded_parameters(ranks: Ranks, name: str) -> None:
    """No adapter: elementwise optimizers give the unsharded trajectory."""
    ranks(2).run(_optimizer_steps, name)


def _fused_sgd_of_narrow_weights(dtype: torch.dtype) -> None:
    net = shard(Net(num_blocks=1), mp_policy=MixedPrecisionPolicy(main_params_dtype=dtype))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, fused=True)
    net(*mine(batches(1)[0])).backward()
    _refused(optimizer.step, NotImplementedError, ["SGD(fused=True)", str(dtype), "fused=False"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_sgd_of_narrow_weights_is_refused_on_a_cpu(ranks: Ranks, dtype: torch.dtype) -> None:
    """Torch's kernel would step only the last few elements of them, without a word."""
    ranks(2).run(_fused_sgd_of_narrow_weights, dtype)


def _edited_in_place(param_dtype: torch.dtype | None, strategy: str) -> None:
    reference, net = pair(
        num_blocks=1, mp_policy=MixedPrecisionPolicy(param_dtype), strategy=strategy
    )
    batch = batches(1)[0]
    with torch.no_grad():
        net(*mine(batch))
        net.unshard()
        net.reshard()
        for model in (reference, net):
            for parameter in model.parameters():
                parameter.mul_(2.0)
        mark_main_weights_changed(net)
        loss = net(*mine(batch))
        rank = dist.get_rank()
        wanted = reference(*[t[2 * rank : 2 * rank + 2] for t in batch])
    torch.testing.assert_close(loss, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_edits_count_after_mark_main_weights_changed(
    ranks: Ranks, param_dtype: torch.dtype | None, strategy: str
) -> None:
    """In-place edits of sharded parameters reach the next forward."""
    ranks(2).run(_edited_in_place, param_dtype, strategy)


def _policies() -> None:
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4)
            self.register_buffer("table", torch.ones(4))
            self.seen: dict[str, torch.dtype] = {}

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            weights = {"linear": self.linear.weight, "norm": self.norm.weight}
            self.seen = {k: w.dtype for k, w in weights.items()}
            self.seen |= {"x": x.dtype, "index": index.dtype, "table": self.table.dtype}
            return self.norm(self.linear(x).float()).to(x.dtype)

    bf16, fp32 = torch.bfloat16, torch.float32
    policy = MixedPrecisionPolicy(bf16, output_dtype=fp32, keep_fp32=("LayerNorm",))
    probe = fully_shard(Probe(), mp_policy=policy)
    out = probe(torch.ones(2, 4), torch.ones(2, dtype=torch.int64))
    out.sum().backward()
    assert out.dtype == fp32
    assert probe.seen == {
        "linear": bf16,
        "norm": fp32,
        "x": bf16,
        "index": torch.int64,
        "table": fp32,
    }
    assert (
        {p.dtype for p in probe.parameters()}
        == {fp32}
        == {p.grad.dtype for p in probe.parameters()}
    )
    theirs = TorchMixedPrecisionPolicy(param_dtype=bf16, cast_forward_inputs=False)
    probe = fully_shard(Probe().double(), mp_policy=theirs)
    assert {p.dtype for p in probe.parameters()} == {torch.float64}
    with pytest.raises(RuntimeError):
        probe(torch.ones(2, 4), torch.ones(2, dtype=torch.int64))
    assert probe.seen["linear"] == bf16 and probe.seen["x"] == fp32


def test_a_policy_decides_dtypes_and_torchs_own_is_accepted(ranks: Ranks) -> None:
    """Compute weights, inputs and outputs are cast, integers and buffers are not."""
    ranks(2).run(_policies)


def _output_of_a_model() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    # Also if the model's own class is named beside that of its units.
    for classes in ([Block], [Net, Block]):
        net = fully_shard_model(Net(), classes, mp_policy=policy)
        seen = []
        net.norm.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].dtype))
        tokens, _ = mine(batches(1)[0])
        assert net(tokens).dtype == torch.float32 and seen == [torch.bfloat16]


def test_the_output_dtype_of_a_model_is_not_that_of_its_units(ranks: Ranks) -> None:
    """A layer of the model itself computes in bf16 what units below have made."""
    ranks(2).run(_output_of_a_model)


def _own_dtype() -> None:
    net = shard(Net().bfloat16())
    with torch.no_grad():
        assert net(mine(batches(1)[0])[0]).dtype == torch.bfloat16
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_parameters_compute_in_their_own_dtype_without_a_policy(ranks: Ranks) -> None:
    """Main weights are fp32 all the same."""
    ranks(2).run(_own_dtype)


def _other_method() -> None:
    class Scorer(Block):
        def score(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.norm(x)).sum()

    torch.manual_seed(0)
    reference = Scorer()
    net = fully_shard(copy.deepcopy(reference))
    register_fsdp_forward_method(net, "score")
    x = torch.ones(2, 12)
    reference.score(x).backward()
    net.score(x).backward()
    grad = net.up.weight.grad
    torch.testing.assert_close(full_tensor(grad), reference.up.weight.grad)
    with pytest.raises(TypeError):
        net.score("no tensor")
    assert net._fsdp_unit().is_resting
    assert isinstance(net.up.weight, UnevenDTensor)
    with pytest.raises(ValueError, match="'rate'"):
        register_fsdp_forward_method(net, "rate")


def test_another_method_may_run_as_forward(ranks: Ranks) -> None:
    """A registered method sees gathered parameters and gives gradients; it may raise."""
    ranks(2).run(_other_method)


class Kinds(Block):
    """A block with a static method and a class method."""

    @staticmethod
    def double(x: torch.Tensor) -> torch.Tensor:
        """Return twice the input."""
        return 2 * x

    @classmethod
    def name(cls, x: torch.Tensor) -> tuple[str, torch.Tensor]:
        """Return the name of the class, and the input."""
        return cls.__name__, x


def _kinds_of_methods() -> None:
    def score(self: Block, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x)).sum()

    torch.manual_seed(0)
    reference, x = Kinds(), torch.ones(2, 12)
    score(reference, x).backward()
    net = copy.deepcopy(reference)
    net.zero_grad()
    # Two of the instance: a bound method, and a function that knows the module.
    net.bound, net.plain = types.MethodType(score, net), partial(score, net)
    fully_shard(net)
    for name in ("bound", "plain", "double", "name"):
        register_fsdp_forward_method(net, name)
    for name in ("bound", "plain"):
        getattr(net, name)(x).backward()
        grad = net.up.weight.grad
        torch.testing.assert_close(full_tensor(grad), reference.up.weight.grad)
        assert net._fsdp_unit().is_resting
        net.zero_grad()
    assert torch.equal(net.double(x), 2 * x) and net.name(x)[0].startswith("FSDPKinds")
    with pytest.raises(ValueError, match="'up'"):
        register_fsdp_forward_method(net, "up")


def test_a_registered_method_may_be_of_any_kind(ranks: Ranks) -> None:
    """Of the instance, static or of the class; a submodule is no method."""
    ranks(2).run(_kinds_of_methods)
