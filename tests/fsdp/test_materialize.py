"""Models built on the meta device get the values of the unsharded procedure, a unit at a time."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from megafsdp import (
    MixedPrecisionPolicy,
    checkpoint,
    full_state_dict,
    full_tensor,
    fully_shard,
    fully_shard_model,
    load_full_state_dict,
    mark_main_weights_changed,
    materialize,
)
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.device.memory import Category
from megafsdp.errors import CheckpointError
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.mesh.annotation import ExpertRange, annotate, annotation_of
from megafsdp.models import ModelConfig, build_model, unit_classes
from tests.fsdp.toy import Block, Net, batches, mine, shard
from tests.ranks import Ranks

SEED = 7
MATRIX = pytest.mark.matrix("materialize")


def initialize(module: nn.Module) -> None:
    """Call ``reset_parameters()`` if there is one."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the meta device."""
    with torch.device("meta"):
        return build()


def unsharded(
    build: Callable[[], nn.Module], fill: Callable[[nn.Module], object] = initialize
) -> nn.Module:
    """Build on the meta device and initialise as one process without sharding does."""
    model = on_meta(build)
    # to_empty() with ties kept: the same memory for the same meta tensor.
    originals = [*model.parameters(), *model.buffers()]
    made = {id(t): torch.empty_like(t, device="cpu") for t in originals}
    model._apply(lambda t: made[id(t)])
    torch.manual_seed(SEED)
    with torch.no_grad():
        return model.apply(fill)


def assert_equal_state(model: nn.Module, reference: nn.Module) -> None:
    """Assert that all parameters and buffers are equal, bit for bit, as the model may be used."""
    wanted, found = _tensors(reference), _tensors(model)
    assert list(wanted) == list(found)
    for name, tensor in found.items():
        full = full_tensor(tensor.detach())
        assert torch.equal(full.to(wanted[name].dtype), wanted[name]), name


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    return dict([*parameters, *model.named_buffers(remove_duplicate=False)])


class Residual(Block):
    """A block that rescales one of its children's weights, and sits on further state."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.empty(()))
        self.register_buffer("mask", torch.empty(3, dtype=torch.bool))
        self.register_buffer("angles", torch.empty(4, dtype=torch.complex64), persistent=False)

    def reset_parameters(self) -> None:
        """Draw the scale, rescale a child's weight, fill the buffers."""
        with torch.no_grad():
            self.scale.normal_()
            self.down.weight.mul_(0.5).add_(self.scale)
            self.mask.copy_(torch.rand(3) < 0.5)
            self.angles = torch.polar(torch.ones(4), torch.rand(4))


class Deep(nn.Module):
    """Blocks in stages, and parents that edit and read what was initialised below them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, dtype=dtype)
        self.stages = nn.ModuleList(nn.Sequential(Residual(), Residual()) for _ in range(2))
        self.last = nn.Linear(7, 5, bias=False, dtype=dtype)
        self.shared = self.first

    def reset_parameters(self) -> None:
        """Edit the first and last layers by what the other holds, and replace a parameter."""
        self.first.weight.data.add_(self.last.weight.t())
        self.last.weight = nn.Parameter(self.last.weight + torch.randn(()).to(self.last.weight))


def shard_deep(model: Deep, **options: object) -> Deep:
    """Shard blocks within stages within the model; the last stage's blocks are one unit."""
    for block in model.stages[0]:
        fully_shard(block, **options)
    fully_shard([*model.stages[1]], **options)
    fully_shard(model.stages[0], **options)
    return fully_shard(model, **options)


def _equals_unsharded(strategy: str) -> None:
    reference = unsharded(Net)
    after = torch.get_rng_state()
    net = shard(on_meta(Net), strategy=strategy)
    torch.manual_seed(SEED)
    with record_collectives() as record:
        assert materialize(net) is net
    # The embedding's weight alone is shown again, as the head's, after the blocks.
    is_cut = strategy != "no_shard" and dist.get_world_size() > 1
    assert record.calls["all_gather"] == is_cut
    assert torch.equal(torch.get_rng_state(), after), "the walk draws what apply() draws"
    assert_equal_state(net, reference)
    assert net.head.weight is net.embedding.weight
    tokens, labels = mine(batches(1)[0])
    torch.testing.assert_close(net(tokens, labels), reference(tokens, labels))


def _equals_unsharded_deep(strategy: str, dtype: torch.dtype) -> None:
    reference = unsharded(lambda: Deep(dtype))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard_deep(on_meta(lambda: Deep(dtype)), strategy=strategy, mp_policy=policy)
    torch.manual_seed(SEED)
    materialize(model)
    assert_equal_state(model, reference)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.stages[1][0].batch_norm.num_batches_tracked.item() == 0


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        ("optim_grads_params", 1),
        ("optim_grads_params", 3),
        ("optim_grads_params", 4),
        ("optim", 2),
        ("no_shard", 2),
        pytest.param("optim_grads_params", 2, marks=MATRIX),
        *(
            pytest.param(strategy, num_ranks, marks=MATRIX)
            for strategy in ("optim", "no_shard")
            for num_ranks in (1, 3, 4)
        ),
    ],
)
def test_values_are_those_of_the_unsharded_procedure(
    ranks: Ranks, num_ranks: int, strategy: str
) -> None:
    """Bit for bit, whatever the number of ranks and what is divided among them."""
    ranks(num_ranks).run(_equals_unsharded, strategy)


def _equals_unsharded_on_a_2d_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    net = shard(on_meta(Net), mesh=mesh)
    torch.manual_seed(SEED)
    materialize(net)
    assert_equal_state(net, unsharded(Net))


def test_replicas_of_shards_are_equal(ranks: Ranks) -> None:
    """A 2-D mesh: the rows are those of the last axis."""
    ranks(4).run(_equals_unsharded_on_a_2d_mesh)


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        ("optim_grads_params", torch.float32),
        ("optim_grads_params", torch.bfloat16),
        ("no_shard", torch.bfloat16),
        pytest.param("no_shard", torch.float32, marks=MATRIX),
    ],
)
def test_parents_may_edit_what_their_children_drew(
    ranks: Ranks, strategy: str, dtype: torch.dtype
) -> None:
    """Nested units, parameters without dims, replaced ones, buffers of all kinds, and bf16."""
    ranks(3).run(_equals_unsharded_deep, strategy, dtype)


_HYBRID = {
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_ffn_hidden_size": 8,
    "shared_expert_ffn_hidden_size": 8,
    "router_balance": "bias",
    "layer_types": ("linear_attention", "linear_attention", "full_attention"),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}


def _config(architecture: str) -> ModelConfig:
    return ModelConfig(
        **(_HYBRID if architecture == "qwen3_next" else {}),
        architecture=architecture,
        num_layers=3,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2 if architecture == "qwen3" else 4,
        head_dim=4,
        vocab_size=37,
        max_sequence_length=8,
        tie_embeddings=architecture == "gpt",
    )


def _equals_construction(architecture: str) -> None:
    config = _config(architecture)
    torch.manual_seed(SEED)
    reference = build_model(config)
    model = on_meta(lambda: build_model(config))
    fully_shard_model(model, unit_classes(config))
    torch.manual_seed(SEED)
    materialize(model)
    assert_equal_state(model, reference)
    for name, parameter in reference.named_parameters():
        assert annotation_of(model.get_parameter(name)) == annotation_of(parameter)


@pytest.mark.parametrize("architecture", ["gpt", "qwen3", "qwen3_next"])
def test_our_models_get_the_values_of_plain_construction(ranks: Ranks, architecture: str) -> None:
    """Their modules are initialised in the order in which they are built."""
    ranks(2).run(_equals_construction, architecture)


class _Attention(nn.Module):
    """A layer of torch whose attention has ``_reset_parameters()`` alone."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.cross = nn.MultiheadAttention(8, 2, add_bias_kv=True, **sizes)
        self.out = nn.Linear(8, 8)


def _attention_of_torch(sizes: dict[str, int]) -> None:
    torch.manual_seed(SEED)
    reference = _Attention(**sizes)
    for units in ([nn.TransformerEncoderLayer], [nn.MultiheadAttention], [nn.Linear]):
        model = fully_shard_model(on_meta(lambda: _Attention(**sizes)), units)
        torch.manual_seed(SEED)
        assert_equal_state(materialize(model), reference)


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 10}])
def test_attention_of_torch_gets_the_values_of_construction(
    ranks: Ranks, sizes: dict[str, int]
) -> None:
    """By its ``_reset_parameters()``, also where its last layer is a unit by itself."""
    ranks(2).run(_attention_of_torch, sizes)


SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}


def _hugging_face(name: str) -> PreTrainedModel:
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**SIZES, **GPT2))
    is_tied = name == "llama-tied"
    return LlamaForCausalLM(LlamaConfig(**SIZES, **LLAMA, **HEADS, tie_word_embeddings=is_tied))


def _equals_hugging_face(name: str) -> None:
    model = on_meta(lambda: _hugging_face(name))
    reference = unsharded(lambda: _hugging_face(name), model._init_weights)
    fully_shard_model(model)
    torch.manual_seed(SEED)
    materialize(model, model._init_weights)
    assert_equal_state(model, reference)
    model.eval()
    reference.eval()
    tokens = torch.arange(8).unsqueeze(0)
    torch.testing.assert_close(model(tokens).logits, reference(tokens).logits)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_hugging_face_models_are_filled_by_their_own_initialiser(ranks: Ranks, name: str) -> None:
    """``_init_weights`` is a function of one module, as ``initialize`` is."""
    ranks(2).run(_equals_hugging_face, name)


def _peak() -> None:
    net = shard(on_meta(lambda: Net(num_blocks=4)))
    units = list(units_below([net]).values())
    nbytes = [sum(4 * p.shape.numel() for g in u.groups for p in g.parameters) for u in units]
    alive: list[tuple[int, int]] = []
    seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def observe(module: nn.Module) -> None:
        initialize(module)
        plain = [p for p in module.parameters() if not hasattr(p, "local")]
        seen.update({id(p): weakref.ref(p) for p in plain})
        full = [p for p in (r() for r in seen.values()) if p is not None]
        counted = sum(u.ledger.live[Category.UNSHARDED] for u in units)
        alive.append((sum(p.nbytes for p in full), counted))

    materialize(net, observe)
    assert all(held == counted for held, counted in alive)
    assert max(held for held, _ in alive) == max(nbytes)
    assert max(nbytes) < sum(nbytes) / 3, "one unit is less than the model"
    assert all(u.ledger.live[Category.UNSHARDED] == 0 for u in units)
    assert all(r() is None for r in seen.values())


def test_full_parameters_of_one_unit_exist_at_a_time(ranks: Ranks) -> None:
    """Those that the ledger counts, and those that anything holds."""
    ranks(2).run(_peak)


def _unfilled(directory: Path) -> None:
    def fill_some(module: nn.Module) -> None:
        if not isinstance(module, nn.LayerNorm | nn.BatchNorm1d):
            initialize(module)
        if isinstance(module, Residual):
            module.mask = torch.empty(3, dtype=torch.bool, device="meta")

    model = shard_deep(on_meta(Deep))
    torch.manual_seed(SEED)
    with pytest.raises(RuntimeError, match="initialize=") as caught:
        materialize(model, fill_some)
    for name in ("0.norm.weight", "0.batch_norm.running_mean", "0.batch_norm.num_batches_tracked"):
        assert f"stages.0.{name}'" in str(caught.value)
    assert "'stages.0.0.mask'" in str(caught.value)
    assert "up.weight" not in str(caught.value)
    assert all(buffer.is_meta for buffer in model.buffers())
    with pytest.raises(RuntimeError, match=r"materialize\(model\)"):
        model(torch.ones(1, 5))
    with pytest.raises(CheckpointError, match=r"without values.*materialize\(model\)"):
        checkpoint.save(directory, step=1, model=model)
    torch.manual_seed(SEED)
    materialize(model)
    assert_equal_state(model, unsharded(Deep))


def test_what_is_not_filled_is_named_and_another_call_begins_afresh(
    ranks: Ranks, tmp_path: Path
) -> None:
    """All names at once; buffers whose dtype has no NaN too; nothing of it is saved."""
    ranks(2).run(_unfilled, tmp_path)


def _different_seeds() -> None:
    net = shard(on_meta(Net))
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ValueError, match=r"random state.*torch\.manual_seed"):
        materialize(net)


def _loads_on_one_rank() -> None:
    net = shard(on_meta(Net))
    if dist.get_rank() == 0:
        net.norm.weight.copy_from_full_(torch.ones(net.norm.weight.shape))
    torch.manual_seed(SEED)
    with pytest.raises(ValueError, match="parameters, shapes and dtypes on all ranks"):
        materialize(net)


def _fails_on_one_rank() -> None:
    net = shard(on_meta(Net))
    torch.manual_seed(SEED)

    def fill(module: nn.Module) -> None:
        initialize(module)
        if module is net.blocks[0].up and dist.get_rank() == 1:
            raise KeyError("broken")

    with pytest.raises((KeyError, RuntimeError), match="broken"):
        materialize(net, fill)
    torch.manual_seed(SEED)
    materialize(net)
    assert_equal_state(net, unsharded(Net))


def _fails_beside_experts_of_one_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "alone"))
    net = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    for parameter in net[0].parameters():
        annotate(parameter, is_expert=True, experts=ExpertRange(dist.get_rank(), 1, 2))
    for layer in net:
        fully_shard(layer, mesh=mesh["all"], expert_mesh=mesh["alone"])

    def fill(module: nn.Module) -> None:
        initialize(module)
        if dist.get_rank() == 1:
            raise KeyError("broken")

    torch.manual_seed(SEED)
    with pytest.raises((KeyError, RuntimeError), match="broken"):
        materialize(net, fill)


@pytest.mark.parametrize(
    "body",
    [
        _different_seeds,
        _loads_on_one_rank,
        _fails_on_one_rank,
        _fails_beside_experts_of_one_rank,
    ],
)
def test_ranks_that_differ_raise_together(ranks: Ranks, body: Callable[[], None]) -> None:
    """No rank waits in a collective for one that raised."""
    ranks(2).run(body)


def _too_early() -> None:
    net = shard(on_meta(Net))
    batch = mine(batches(1)[0])
    for use in (lambda: net(*batch), lambda: net.unshard(), lambda: full_state_dict(net)):
        with (
            record_collectives() as record,
            pytest.raises(RuntimeError, match=r"'embedding.weight', 'blocks.0.*materialize"),
        ):
            use()
        assert not record.calls
    with pytest.raises(ValueError, match="outermost module"):
        materialize(net.norm)
    with pytest.raises(ValueError, match="got none"):
        materialize(on_meta(Net))
    materialize(net)
    net(*batch).backward()
    before = full_state_dict(net)
    with record_collectives() as record:
        assert materialize(net) is net
    assert not record.calls
    assert all(torch.equal(before[n], t) for n, t in full_state_dict(net).items())


def test_use_before_values_is_refused(ranks: Ranks) -> None:
    """A forward or a state dict of what nobody filled, and a call on a part of a unit."""
    ranks(2).run(_too_early)


def _load_full() -> None:
    reference = unsharded(Deep)
    model = shard_deep(on_meta(Deep))
    load_full_state_dict(model, reference.state_dict())
    # The state dict has no non-persistent buffers.
    with pytest.raises(RuntimeError, match=r"got 'stages\.0\.0\.angles', 'stages.0.1.angles', "):
        full_state_dict(model)
    materialize(model)
    assert all(m.angles.abs().allclose(torch.ones(4)) for m in model.stages[0])
    for name, block in model.named_modules():
        if isinstance(block, Residual):
            block.angles = reference.get_submodule(name).angles
    assert_equal_state(model, reference)


def _load_sharded() -> None:
    source, net = shard(Net(seed=5)), shard(on_meta(Net))
    state = source.state_dict()
    missing = state.pop("norm.bias")
    net.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=r"got 'norm\.bias' without"):
        full_state_dict(net)
    net.load_state_dict({**state, "norm.bias": missing})
    assert_equal_state(net, Net(seed=5))
    net(*mine(batches(1)[0]))
    deep, wanted = shard_deep(on_meta(Deep)), shard_deep(unsharded(Deep))
    deep.load_state_dict(wanted.state_dict())
    for name, block in deep.named_modules():
        if isinstance(block, Residual):
            block.angles = wanted.get_submodule(name).angles
    assert_equal_state(deep, unsharded(Deep))


def _load_some_and_initialise_the_rest() -> None:
    trained = Net(seed=5)
    net = shard(on_meta(Net), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for block, source in zip(net.blocks, trained.blocks, strict=True):
        load_full_state_dict(block, source.state_dict())
    torch.manual_seed(SEED)
    called = []
    materialize(net, lambda m: (called.append(m), initialize(m)))
    assert net.blocks[1].up not in called
    for ours, theirs in zip(net.blocks, trained.blocks, strict=True):
        assert_equal_state(ours, theirs)
    torch.manual_seed(SEED)
    nn.Embedding(37, 12)
    drawn_last = nn.Linear(12, 37, bias=False).weight
    assert torch.equal(full_tensor(net.embedding.weight), drawn_last)


def _set_some_of_the_full_state() -> None:
    trained = Net(seed=5)
    given = {n: t for n, t in trained.state_dict().items() if n.startswith("blocks.")}
    strategies = ("optim_grads_params", "no_shard")
    for broadcast_from_rank0, strategy in itertools.product((False, True), strategies):
        net = shard(on_meta(Net), strategy=strategy)
        set_model_state_dict(
            net,
            dict(given),
            options=StateDictOptions(
                full_state_dict=True, broadcast_from_rank0=broadcast_from_rank0, strict=False
            ),
        )
        with pytest.raises(RuntimeError, match=r"'norm\.weight'.* without"):
            net(*mine(batches(1)[0]))
        with pytest.raises(RuntimeError, match=r"'norm\.weight'.* without"):
            full_state_dict(net)
        torch.manual_seed(SEED)
        materialize(net, initialize)
        for ours, theirs in zip(net.blocks, trained.blocks, strict=True):
            assert_equal_state(ours, theirs)
        assert full_tensor(net.norm.weight.detach()).eq(1).all()
        assert full_tensor(net.head.weight.detach()).isfinite().all()


def _mark() -> None:
    for names_them in (False, True):
        net = shard(on_meta(Net))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.to_local().fill_(0.25)
        mark_main_weights_changed(net, net.parameters() if names_them else None)
        net(*mine(batches(1)[0])).backward()


@pytest.mark.parametrize(
    "body",
    [
        _load_full,
        _load_sharded,
        _load_some_and_initialise_the_rest,
        _set_some_of_the_full_state,
        _mark,
    ],
)
def test_loading_counts_as_initialising(ranks: Ranks, body: Callable[[], None]) -> None:
    """What was loaded needs no initialiser; what was not is still missed."""
    ranks(2).run(body)


def _load_checkpoint(directory: Path) -> None:
    with_buffers = shard_deep(on_meta(Deep))
    with pytest.raises(RuntimeError, match="without values"):
        checkpoint.save(directory, step=1, model=with_buffers)
    torch.manual_seed(SEED)
    materialize(with_buffers)
    checkpoint.save(directory, step=1, model=with_buffers)
    model = shard_deep(on_meta(Deep))
    ignored = ["model.first.bias", "model.shared.bias", "*.running_mean"]
    checkpoint.load(directory, model=model, ignore=ignored)
    with pytest.raises(RuntimeError) as caught:
        full_state_dict(model)
    assert "got 'first.bias', 'stages.0.0.angles', 'stages.0.0.batch_norm.running_mean', " in str(
        caught.value
    )
    checkpoint.load(directory, model=model)
    for name, block in model.named_modules():
        if isinstance(block, Residual):
            block.angles = with_buffers.get_submodule(name).angles
    assert_equal_state(model, unsharded(Deep))


def test_a_checkpoint_counts_for_what_it_holds(ranks: Ranks, tmp_path: Path) -> None:
    """Keys that kept their own values have none, if they had none before; saves refuse them."""
    ranks(2).run(_load_checkpoint, tmp_path)


def _bits_of_real_parameters_survive() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3, device="meta"))
    fully_shard(model)
    with torch.no_grad():
        model[0].weight.add_(1e-4)  # Below the precision of bf16, in which it is shown.
    before = full_tensor(model[0].weight).clone()
    counts = model[0].counts = nn.Buffer(torch.arange(3))

    def fill(module: nn.Module) -> None:
        initialize(module)
        if module is model:
            assert torch.equal(module[0].weight, before.bfloat16())
            module[0].bias.fill_(2.0)
            module[0].weight.zero_()
            module[0].counts.zero_()
            module[0].counts = torch.ones(3)

    def fail(module: nn.Module) -> None:
        raise ValueError("no values")

    with pytest.raises(ValueError, match="no values"):
        materialize(model, fail)  # What had values has them in the next call, too.
    materialize(model, fill)
    assert torch.equal(full_tensor(model[0].weight), before)
    assert not torch.equal(before, before.bfloat16().float())
    assert model[0].counts is counts
    assert counts.tolist() == [0, 1, 2]


def test_parameters_with_values_keep_their_bits(ranks: Ranks) -> None:
    """A parent's initialiser sees them in their own dtype; what it writes there is dropped."""
    ranks(2).run(_bits_of_real_parameters_survive)


def _outside_of_units() -> None:
    def build() -> nn.Module:
        unit, ignoring, plain, tied = Block(), nn.Linear(3, 4), nn.Linear(5, 5), nn.Linear(5, 5)
        tied.weight = plain.weight
        return nn.ModuleDict({"unit": unit, "ignoring": ignoring, "plain": plain, "tied": tied})

    model = on_meta(build)
    model["ignoring"].bias.note = "kept"
    model["ignoring"].bias.requires_grad_(False)
    fully_shard(model["unit"])
    fully_shard(model["ignoring"], ignored_params=[model["ignoring"].bias])
    torch.manual_seed(SEED)
    materialize(model)
    assert_equal_state(model, unsharded(build))
    assert model["tied"].weight is model["plain"].weight
    bias = model["ignoring"].bias
    assert (bias.note, bias.requires_grad, bias.device.type) == ("kept", False, "cpu")


def test_what_units_do_not_own_is_made_plain(ranks: Ranks) -> None:
    """Ignored parameters and modules beside the units keep their attributes."""
    ranks(2).run(_outside_of_units)


class DrawsItsChildren(nn.Module):
    """Draws its layers' weights anew once they have been drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def reset_parameters(self) -> None:
        """Draw them smaller."""
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.02)


def _draws_into_shards() -> str:
    model = on_meta(DrawsItsChildren)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    torch.manual_seed(0)
    with pytest.raises(Exception, match="got 'normal_'") as caught:
        materialize(model)
    materialize(model, lambda m: isinstance(m, nn.Linear) and m.reset_parameters())
    nn.init.normal_(model.layers[0].weight)
    return str(caught.value)


def test_a_parent_does_not_draw_into_the_shards_of_its_children(ranks: Ranks) -> None:
    """Ranks of one random state would draw the same rows: refused, and to be tried again."""
    for message in ranks(2).run(_draws_into_shards):
        assert "its own initializer" in message
