"""Refusals on sharded parameters name what works instead, by the operation and by its caller."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import CodeType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from transformers import LlamaConfig, LlamaForCausalLM

import megafsdp
from megafsdp import FusedAdam, full_state_dict, full_tensor, fully_shard_model
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.op_rules import IS_DISPATCH_BYPASSED
from megafsdp.buffer.dtensor.uneven import local_tensor
from tests.fsdp.toy import WIDTH, Net, batches, mine, options_of_strategies, pair, shard
from tests.ranks import Ranks

SHARDED = ("optim", "optim_grads", "optim_grads_params")


def _refused(call: Callable[[], object], *words: str) -> None:
    with record_collectives() as record, pytest.raises((NotImplementedError, ValueError)) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value
    assert not record.calls


def _operations(strategy: str) -> None:
    _, net = pair(1, strategy=strategy)
    net(*mine(batches(1)[0])).backward()
    block, x = net.blocks[0], torch.ones(2, WIDTH)
    weight = block.up.weight
    gathers = ("is not gathered", "register_fsdp_forward_method", "summon_full_params")
    for call in (
        lambda: block.up(x),
        lambda: x @ weight.t(),
        lambda: net.embedding(torch.tensor([1])),
        lambda: F.layer_norm(x, (WIDTH,), block.norm.weight, block.norm.bias),
        lambda: weight.view(-1),
        lambda: weight[1:3],
        lambda: list(weight),
        lambda: weight.reshape(-1, 2),
    ):
        _refused(call, "unevenly sharded", *gathers)
    # A norm multiplies by its weight; where no graph is made, it is rather an optimizer.
    reason = "within autograd" if IS_DISPATCH_BYPASSED else "operands cut like the first"
    _refused(lambda: x * block.norm.weight, reason, *gathers)
    if IS_DISPATCH_BYPASSED:
        with pytest.raises(RuntimeError, match=r"torch\.compile\(\) traces it: torch 2\.12"):
            torch.compile(torch.square, backend="eager")(weight)
    with torch.no_grad():
        _refused(lambda: weight.mul_(torch.ones(5 * WIDTH, WIDTH)), "copy_from_full_()")
    # A gradient is of no unit to be gathered.
    _refused(lambda: weight.grad.view(-1), "Call full_tensor() first")
    _refused(lambda: parameters_to_vector(net.parameters()), "the full_tensor() of each")
    with megafsdp.summon_full_params(net):
        block.up(x)


def test_operations_of_a_forward_name_the_unit_that_is_not_gathered(ranks: Ranks) -> None:
    """Matmul, view and indexing of a sharded parameter."""
    for strategy in SHARDED:
        ranks(2).run(_operations, strategy)


def _of_transformers(path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    reference = copy.deepcopy(model)
    fully_shard_model(model)
    _refused(lambda: model.save_pretrained(path), "export_hf()", "full_state_dict(model)")
    _refused(lambda: model.resize_token_embeddings(40), "before fully_shard()")
    # What the error names.
    model.save_pretrained(path, state_dict=full_state_dict(model))
    dist.barrier()
    back = LlamaForCausalLM.from_pretrained(path)
    for wanted, found in zip(reference.parameters(), back.parameters(), strict=True):
        assert torch.equal(found, wanted)


# transformers asks for the storage of each tensor.
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_methods_of_transformers_name_what_to_call_instead(ranks: Ranks, tmp_path: Path) -> None:
    """The cure is the caller's: none of them asks for the view in which it fails."""
    ranks(2).run(_of_transformers, tmp_path)


def _called_from(package: str, name: str) -> Callable[..., object]:
    """Return a function of a package that calls what it is given."""
    scope: dict[str, object] = {"__name__": f"{package}.module"}
    code: CodeType = compile(f"def {name}(call):\n    return call()", package, "exec")
    exec(code, scope)
    function = scope[name]
    assert callable(function)
    return function


def _callers() -> None:
    _, net = pair(1)
    weight = net.blocks[0].up.weight
    for package, name, word in (
        ("transformers", "generate", "register_fsdp_forward_method(model, 'generate')"),
        ("peft", "merge_and_unload", "Merge before fully_shard()"),
        ("accelerate", "save_model", "export_hf()"),
        ("safetensors", "save_file", "full_state_dict(model)"),
    ):
        _refused(partial(_called_from(package, name), lambda: weight.view(-1)), word)
    save_state = _called_from("accelerate", "save_state")
    with pytest.raises(RuntimeError, match=r"megafsdp\.checkpoint\.save\(\)"):
        save_state(lambda: pickle.dumps(weight))
    prepare = _called_from("accelerate", "prepare_model")
    _refused(
        lambda: prepare(lambda: nn.parallel.DistributedDataParallel(net)),
        "Give prepare() the optimizer",
    )


def test_callers_of_other_packages_are_known_by_package_and_function(ranks: Ranks) -> None:
    """The same operation has another cure in each of them."""
    ranks(2).run(_callers)


def _state_of(net: nn.Module) -> list[torch.Tensor]:
    return [local_tensor(p).clone() for p in net.parameters()]


class OwnMuon(torch.optim.Muon):
    """A subclass of the user's."""


def _optimizers(strategy: str) -> None:
    scope: dict[str, object] = {"__name__": "torchao.optim.adam", "SGD": torch.optim.SGD}
    exec("class AdamW8bit(SGD):\n    pass", scope)
    scope["__name__"] = "heavyball"
    exec("class ForeachSOAP(SGD):\n    pass", scope)
    others = {
        torch.optim.Muon: "megafsdp.Muon",
        OwnMuon: "megafsdp.Muon",
        torch.optim.LBFGS: "FusedAdam",
        torch.optim.Rprop: "FusedAdam",
        torch.optim.Adafactor: "FusedAdam(exp_avg_dtype=",
        scope["AdamW8bit"]: "FusedAdam(exp_avg_dtype=",
        scope["ForeachSOAP"]: "FusedAdam",
    }
    for cls, cure in others.items():
        net = shard(Net(1), strategy=strategy)
        batch = mine(batches(1)[0])
        net(*batch).backward()
        optimizer = cls([p for p in net.parameters() if p.ndim == 2])
        before = _state_of(net)

        def closure(net: Net = net) -> torch.Tensor:
            raise AssertionError("called before anything is refused")

        given = (closure,) if cls is torch.optim.LBFGS else ()
        _refused(lambda o=optimizer, g=given: o.step(*g), cls.__name__, cure)
        assert not optimizer.state
        assert all(map(torch.equal, before, _state_of(net)))
        # Other parameters are not ours to refuse.
        plain = nn.Linear(3, 3, bias=False)
        plain(torch.ones(3)).sum().backward()
        free = cls(plain.parameters())
        free.step(lambda p=plain: p(torch.ones(3)).sum()) if given else free.step()


def test_optimizers_that_cannot_step_rows_are_named_at_their_first_step(ranks: Ranks) -> None:
    """Before a parameter moved, and not where they have plain parameters."""
    for strategy in SHARDED:
        ranks(2).run(_optimizers, strategy)


class ByRows(torch.optim.SGD):
    """Needs one number of each row."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Step by the norms of rows."""
        for parameter in self.param_groups[0]["params"]:
            parameter.div_(parameter.norm(dim=1, keepdim=True))


def _of_unknown_optimizers() -> None:
    net = shard(Net(1))
    net(*mine(batches(1)[0])).backward()
    optimizer = ByRows([p for p in net.parameters() if p.ndim == 2])
    _refused(optimizer.step, "of each row", "an optimizer that steps each element by itself")


def test_an_operation_of_a_step_names_other_optimizers(ranks: Ranks) -> None:
    """What a forward or a program would call instead is of no use there."""
    ranks(2).run(_of_unknown_optimizers)


def _grads_of_another_dtype() -> None:
    policy = megafsdp.MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)
    fused = partial(torch.optim.SGD, lr=0.1, fused=True)
    refused = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")
    for cls in [*(getattr(torch.optim, name) for name in refused), fused]:
        net = shard(Net(1), mp_policy=policy)
        net(*mine(batches(1)[0])).backward()
        optimizer = cls(net.parameters())
        before = _state_of(net)
        _refused(optimizer.step, "torch.bfloat16, the main_grads_dtype", "megafsdp.FusedAdam")
        assert not optimizer.state
        assert all(map(torch.equal, before, _state_of(net)))
        # Gradients that the loop has cast are none to refuse.
        for parameter in net.parameters():
            parameter.grad = parameter.grad.float()
        optimizer.step()
        assert not any(map(torch.equal, before, _state_of(net)))


def test_optimizers_that_need_gradients_of_one_dtype_are_named_before_their_first_step(
    ranks: Ranks,
) -> None:
    """Before a parameter moved, with what takes them."""
    ranks(1).run(_grads_of_another_dtype)


def test_the_named_optimizer_takes_the_named_options() -> None:
    """The cure of low-precision optimizers is a call that works."""
    weight = nn.Parameter(torch.ones(8, 8))
    weight.grad = torch.ones(8, 8)
    FusedAdam([weight], exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.float16).step()


def _pickled_in_every_strategy() -> list[int]:
    return [_pickled(options) for options in options_of_strategies()]


def _pickled(options: dict[str, object]) -> int:
    net = shard(Net(1), **options)
    optimizer = FusedAdam(net.parameters(), lr=1e-2)
    net(*mine(batches(1)[0])).backward()
    optimizer.step()
    num_refused = 0
    states = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    for parameter in net.parameters():
        values = [parameter, parameter.grad, optimizer.state[parameter]["exp_avg"]]
        assert all(isinstance(value, DTensor) for value in values)
        for value in values:
            if local_tensor(value).numel() == value.numel():
                back = pickle.loads(pickle.dumps(value))
                assert torch.equal(local_tensor(back), local_tensor(value))
                continue
            num_refused += 1
            with pytest.raises(RuntimeError, match=r"megafsdp\.checkpoint\.save\(\)"):
                torch.save({"deep": [value]}, io.BytesIO())
        whole = full_tensor(parameter.detach())
        assert torch.equal(full_tensor(copy.deepcopy(parameter).detach()), whole)
    if num_refused:
        for state in states.values():
            with pytest.raises(RuntimeError, match=r"pickle or torch\.save"):
                torch.save(state, io.BytesIO())
    copied = copy.deepcopy(states)
    for name, tensor in copied["model"].items():
        wanted = local_tensor(states["model"][name])
        assert torch.equal(local_tensor(tensor), wanted)
        for value in (states["model"][name], net.get_parameter(name)):
            sent = pickle.loads(ForkingPickler.dumps(value))
            assert torch.equal(local_tensor(sent), wanted)
    return num_refused


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_a_plain_pickle_of_some_rows_is_refused_and_copies_are_not(
    ranks: Ranks, num_ranks: int
) -> None:
    """Rank 0's file would have rank 0's rows alone; deepcopy and copies to processes keep them."""
    for found in ranks(num_ranks).run(_pickled_in_every_strategy):
        # Three strategies that cut, or HSDP and HFSDP over axes of which one or both are longer.
        num_cutting = sum(num > 0 for num in found)
        assert num_cutting == {1: 0, 3: 5, 4: 2}[num_ranks], found
