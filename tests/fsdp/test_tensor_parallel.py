"""torch's tensor-parallel models under our engine: values, gradients, collectives, states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from megafsdp import (
    full_state_dict,
    full_tensor,
    fully_shard,
    fully_shard_model,
    load_full_state_dict,
    mark_main_weights_changed,
    materialize,
    summon_full_params,
)
from megafsdp.buffer.comm.collectives import CollectiveRecord, record_collectives
from tests.fsdp.llama import VOCABULARY, Llama, batches, parallelize
from tests.ranks import Ranks

# In fp64 the sides differ by the order of sums alone.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}
HUGGING_FACE_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
}


def _grid(*shape: int) -> DeviceMesh:
    names = ("outer", "inner", "tp")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _shard(model: Llama, shard: Callable[..., object], **options: object) -> Llama:
    for block in model.blocks:
        shard(block, **options)
    shard(model, **options)
    return model


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def _counts(record: CollectiveRecord, unit: str) -> list[str]:
    """Return the kinds of a unit's collectives, in their order."""
    return [kind for kind, label in record.events if label == unit]


def _three_ways() -> None:
    grid = _grid(2, 2)
    mesh, tp = grid["inner"], grid["tp"]
    reference = Llama().double()
    ours, theirs = (parallelize(copy.deepcopy(reference), tp) for _ in range(2))
    _shard(ours, fully_shard, mesh=mesh)
    _shard(theirs, torch_fully_shard, mesh=mesh)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert own.placements == other.placements and own.shape == other.shape
    before = [p.detach().clone() for p in reference.parameters()]
    optimizers = [_adamw(model) for model in (reference, ours, theirs)]
    own_rows = slice(2 * mesh.get_local_rank(), 2 * mesh.get_local_rank() + 2)
    for step, (tokens, labels) in enumerate(batches(2, 4)):
        wanted = reference(tokens, labels)
        wanted.backward()
        with record_collectives() as record:
            loss = ours(tokens[own_rows], labels[own_rows])
            loss.backward()
        other = theirs(tokens[own_rows], labels[own_rows])
        other.backward()
        losses = torch.stack([loss.detach(), other.detach()])
        dist.all_reduce(losses, group=mesh.get_group(), op=dist.ReduceOp.SUM)
        torch.testing.assert_close(losses / 2, wanted.detach().expand(2), **TOLERANCE)
        torch.testing.assert_close(loss, other, **TOLERANCE)
        models = (reference, ours, theirs)
        for p, q, r in zip(*(m.parameters() for m in models), strict=True):
            torch.testing.assert_close(full_tensor(q.grad), p.grad, **TOLERANCE)
            torch.testing.assert_close(r.grad.full_tensor(), p.grad, **TOLERANCE)
        # The last block and the root stay gathered for backward; the sum over tp comes before the
        # reduction reads it.
        units = {"blocks.1": 1 + (step == 0), "blocks.0": 2, "Llama": 1}
        for unit, num_gathers in units.items():
            wanted_kinds = ["all_gather"] * num_gathers + ["all_reduce", "reduce_scatter"]
            assert _counts(record, unit) == wanted_kinds, unit
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for old, p, q in zip(before, reference.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(q.detach()), p.detach(), **TOLERANCE)
        assert not torch.equal(old, p), "every parameter moved"


def test_a_model_of_torchs_plan_equals_fsdp2_and_one_process(ranks: Ranks) -> None:
    """Losses, every gradient and two steps; one gather, one reduction and one sum a unit."""
    ranks(4).run(_three_ways)


def _compiled(way: str) -> None:
    grid = _grid(1, 2)
    reference = Llama().double()
    models = eager, compiled = [parallelize(copy.deepcopy(reference), grid["tp"]) for _ in range(2)]
    torch.compiler.reset()
    for block in compiled.blocks:
        block.compile(backend="aot_eager")
    [batch] = batches(1, 2)
    for model in models:
        if way == "one unit":
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
            fully_shard([model.embedding, *model.blocks], mesh=grid["inner"])
            fully_shard(model, mesh=grid["inner"])
        else:
            _shard(model, fully_shard, mesh=grid["inner"])
        if way == "checkpointed":
            model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
        model(*batch).backward()
    for (name, own), other in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        found, wanted = full_tensor(own.grad), full_tensor(other.grad)
        torch.testing.assert_close(found, wanted, **TOLERANCE, msg=name)


# The tracer asks every input for .grad, and torch warns where it is not a leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("way", ["units", "checkpointed", "one unit"])
def test_compiled_blocks_have_the_gradients_of_eager_ones(ranks: Ranks, way: str) -> None:
    """Also the embedding, whose sum over tp the first block is given while it may still run."""
    ranks(2).run(_compiled, way)


class _BesidePlain(nn.Module):
    """A layer that the plan cuts, a plain parameter beside it, and a plain layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut, self.plain = nn.Linear(6, 4).double(), nn.Linear(6, 6).double()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square."""
        return (self.scale * self.cut(self.plain(x))).square().mean()


def _torchs_clip(degree: int) -> None:
    grid = _grid(2 // degree, degree)
    reference = _BesidePlain()
    net = copy.deepcopy(reference)
    parallelize_module(net, grid["tp"], {"cut": ColwiseParallel(output_layouts=Replicate())})
    for module in (net.plain, net):
        fully_shard(module, mesh=grid["inner"])
    x = torch.arange(12, dtype=torch.float64).view(2, 6)
    reference(x).backward()
    net(x.chunk(2 // degree)[grid["inner"].get_local_rank()]).backward()
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (net, reference)]
    torch.testing.assert_close(full_tensor(norms[0]), norms[1], **TOLERANCE)
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(p.grad), q.grad, **TOLERANCE)


@pytest.mark.parametrize("degree", [1, 2])
def test_torchs_clip_takes_plain_parameters_beside_those_of_a_plan(
    ranks: Ranks, degree: int
) -> None:
    """All gradients are on one mesh, at a degree of one too."""
    ranks(2).run(_torchs_clip, degree)


def _on_meta(tp: DeviceMesh) -> Llama:
    with torch.device("meta"):
        return parallelize(Llama(), tp)


def _draw(module: nn.Module) -> None:
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()


def _materialized() -> None:
    for shape in ((2, 2), (1, 4)):
        grid = _grid(*shape)
        model = _shard(_on_meta(grid["tp"]), fully_shard, mesh=grid["inner"])
        emptied = _shard(_on_meta(grid["tp"]), fully_shard, mesh=grid["inner"], strategy="optim")
        emptied.to_empty(device="cpu")
        reference = Llama()
        draws = (lambda m: m.apply(_draw), materialize, lambda m: m.apply(_draw))
        for net, draw in zip((reference, model, emptied), draws, strict=True):
            torch.manual_seed(3)
            draw(net)
        for net in (model, emptied):
            full = full_state_dict(net)
            assert full.keys() == reference.state_dict().keys()
            for name, value in reference.state_dict().items():
                assert torch.equal(full[name], value), name
            assert torch.isfinite(net(*batches(1, 1)[0]))
    # Parts of one tensor must come from one draw.
    model = _shard(_on_meta(grid["tp"]), fully_shard, mesh=grid["inner"])
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ValueError, match="the same random state on all ranks"):
        materialize(model)


def test_initial_values_do_not_depend_on_the_tensor_parallel_degree(ranks: Ranks) -> None:
    """Each rank draws whole tensors and takes its rows of its part, from one random state."""
    ranks(4).run(_materialized)


def _states(directory: str) -> None:
    grid = _grid(2, 2)
    mesh, tp = grid["inner"], grid["tp"]
    reference, other = Llama().double(), Llama().double()
    for p in other.parameters():
        p.data.mul_(-0.5)
    wanted = {name: value.clone() for name, value in other.state_dict().items()}
    for strategy in ("optim_grads_params", "no_shard"):
        model = parallelize(copy.deepcopy(reference), tp)
        _shard(model, fully_shard, mesh=mesh, strategy=strategy)

        def assert_loaded(model: nn.Module = model) -> None:
            for name, value in full_state_dict(model).items():
                assert torch.equal(value, wanted[name]), name
            batch = batches(1, 2)[0]
            torch.testing.assert_close(model(*batch), other(*batch), **TOLERANCE)
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            mark_main_weights_changed(model)

        load_full_state_dict(model, wanted)
        copied = {n: copy.deepcopy(p) for n, p in model.named_parameters()}
        with summon_full_params(model):
            for name, shown in model.named_parameters():
                assert type(shown) is DTensor and torch.equal(shown.full_tensor(), wanted[name])
        with (
            pytest.raises(RuntimeError, match="writes to those of the units"),
            summon_full_params(model),
            torch.no_grad(),
        ):
            next(model.parameters()).zero_()
        if strategy == "no_shard":
            load_full_state_dict(model, wanted)  # There they are the main weights.
        path = f"{directory}/{strategy}"
        dcp.save(model.state_dict(), checkpoint_id=path)
        assert_loaded()
        # Any reader finds whole tensors in the files, one of them where several ranks have copies.
        plain = {name: torch.empty_like(value) for name, value in wanted.items()}
        dcp.load(plain, checkpoint_id=path)
        assert all(torch.equal(plain[name], value) for name, value in wanted.items())
        state = model.state_dict()
        dcp.load(state, checkpoint_id=path)
        assert_loaded()
        # Cut over tp alone, as the same plan cuts it without an engine.
        model.load_state_dict(parallelize(copy.deepcopy(other), tp).state_dict())
        assert_loaded()
        options = StateDictOptions(full_state_dict=True)
        # torch writes what it makes of it into the dict that it is given.
        set_model_state_dict(model, dict(wanted), options=options)
        assert_loaded()
        for name, p in copied.items():
            assert torch.equal(full_tensor(p.detach()), wanted[name]), name


def test_states_are_those_of_the_whole_model(ranks: Ranks, tmp_path: Path) -> None:
    """Full dicts, summoned parameters, copies, torch's checkpoints and dicts cut over tp alone."""
    ranks(4).run(_states, str(tmp_path))


class Parts(nn.Module):
    """Parameters whose parts are unequal, or empty on the last ranks of tp."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Parameter(torch.randn(9, 4))
        self.columns = nn.Parameter(torch.randn(4, 5))
        self.one = nn.Parameter(torch.randn(1, 4))
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use all of them."""
        terms = [(p * p * x).sum() for p in self.parameters()]
        return torch.stack([t.full_tensor() if isinstance(t, DTensor) else t for t in terms]).sum()


def _unequal_parts(strategy: str) -> None:
    for shape in ((2, 2), (1, 4)):
        grid = _grid(*shape)
        tp = grid["tp"]
        reference = Parts().double()
        net = copy.deepcopy(reference)
        for name, dim in (("rows", 0), ("columns", 1), ("one", 0)):
            cut = distribute_tensor(getattr(net, name).detach(), tp, [Shard(dim)])
            setattr(net, name, nn.Parameter(cut))
        net.scale = nn.Parameter(distribute_tensor(net.scale.detach(), tp, [Replicate()]))
        fully_shard(net, mesh=grid["inner"], strategy=strategy)
        optimizers = [_adamw(reference), _adamw(net)]
        for step in range(2):
            x = torch.tensor(1.0 + step, dtype=torch.float64)
            wanted, found = reference(x), net(DTensor.from_local(x, tp, [Replicate()]))
            for loss in (wanted, found):
                loss.backward()
            torch.testing.assert_close(found, wanted, **TOLERANCE)
            for p, q in zip(net.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(full_tensor(p.grad), q.grad, **TOLERANCE)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, value in full_state_dict(net).items():
            torch.testing.assert_close(value, reference.state_dict()[name], **TOLERANCE)


def test_parts_may_be_unequal_or_empty(ranks: Ranks) -> None:
    """9 rows, 5 columns and 1 row on tp 2 and tp 4; a scalar that all ranks have."""
    for strategy in ("optim_grads_params", "no_shard"):
        ranks(4).run(_unequal_parts, strategy)


def _hugging_face_plan() -> None:
    grid = _grid(2, 2)
    mesh, tp = grid["inner"], grid["tp"]
    config = Qwen3Config(**HUGGING_FACE_SIZES, tie_word_embeddings=True)
    torch.manual_seed(0)
    reference = Qwen3ForCausalLM(config).double()
    net = copy.deepcopy(reference)
    plan, _, _ = net._resolve_parallel_plans(DistributedConfig(tp_size=2))
    # Tied: the embedding's rule cuts it as the head's does.
    plan.pop("lm_head.weight")
    apply_tensor_parallelism(net, tp, plan)
    net.lm_head.weight = net.model.embed_tokens.weight
    fully_shard_model(net, mesh=mesh)
    optimizers = [_adamw(reference), _adamw(net)]
    own_rows = slice(2 * mesh.get_local_rank(), 2 * mesh.get_local_rank() + 2)
    for tokens, _ in batches(2, 4):
        for model, rows in ((reference, tokens), (net, tokens[own_rows])):
            model(input_ids=rows, labels=rows).loss.backward()
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full_tensor(p.grad), q.grad, **TOLERANCE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_state_dict(net).items():
        torch.testing.assert_close(value, reference.state_dict()[name], **TOLERANCE)


def test_a_transformers_model_takes_its_own_plan(ranks: Ranks) -> None:
    """Plain norms beside DTensors, some with hooks of the library that sum over tp themselves."""
    if not hasattr(Qwen3ForCausalLM, "_resolve_parallel_plans"):
        pytest.skip("this version of transformers does not resolve its plans by itself")
    ranks(4).run(_hugging_face_plan)
