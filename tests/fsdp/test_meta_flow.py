"""Models built on the meta device, sharded, emptied, and initialised by their own methods."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megafsdp import MixedPrecisionPolicy, fully_shard, materialize
from megafsdp.buffer.dtensor.op_rules import IS_DISPATCH_BYPASSED
from tests.fsdp.test_materialize import (
    HEADS,
    LLAMA,
    SEED,
    SIZES,
    assert_equal_state,
    initialize,
    on_meta,
)
from tests.fsdp.toy import options_of_strategies
from tests.ranks import Ranks


class Layer(nn.Module):
    """A layer that initialises its weights as models of torchtitan do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9, dtype=dtype)
        self.down = nn.Linear(9, 6, bias=False, dtype=dtype)
        self.gate = nn.Parameter(torch.empty((), dtype=dtype))
        self.experts = nn.Parameter(torch.empty(3, 6, 5, dtype=dtype))
        self.register_buffer("mask", torch.empty(4, dtype=torch.bool))
        self.register_buffer("angles", torch.empty(5), persistent=False)

    def reset_parameters(self) -> None:
        """Draw by several distributions, fill and replace buffers."""
        nn.init.trunc_normal_(self.up.weight, std=0.3, a=-0.2, b=0.4)
        nn.init.trunc_normal_(self.experts, std=0.02, a=0.03, b=0.1)
        nn.init.kaiming_normal_(self.down.weight, mode="fan_out")
        nn.init.uniform_(self.gate)
        self.mask.copy_(torch.rand(4) < 0.5)
        self.angles = torch.polar(torch.ones(5), torch.rand(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use all parameters."""
        return x + self.down(self.up(x)) * self.gate + self.experts[0].sum()


class Model(nn.Module):
    """Layers between an embedding with a padding row and a norm."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6, padding_idx=-2, dtype=dtype)
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(2))
        self.norm = nn.LayerNorm(6, dtype=dtype)
        self.norm_of_batch = nn.BatchNorm1d(6, dtype=dtype)
        self.register_buffer("cache", torch.empty(3))

    def reset_parameters(self) -> None:
        """Edit what children drew, by functions, methods and ``.data``."""
        self.norm.weight.data.normal_(mean=1.0, std=0.1)
        self.norm.bias.data.add_(0.5)
        self.cache.data.fill_(2.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the norm of all layers' outputs."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def _shard(model: Model, **options: object) -> Model:
    fully_shard(model.layers[0], **options)
    return fully_shard(model, **options)


def _initialize_all(model: Model) -> None:
    model.apply(initialize)
    # From outside of the unit, as init_weights() of a whole model does.
    nn.init.xavier_uniform_(model.layers[0].experts, gain=nn.init.calculate_gain("relu"))
    with torch.no_grad():
        model.layers[1].up.weight[3].fill_(0.25)


def _initialized(dtype: torch.dtype) -> tuple[Model, torch.Tensor]:
    reference = on_meta(lambda: Model(dtype)).to_empty(device="cpu")
    torch.manual_seed(SEED)
    _initialize_all(reference)
    return reference, torch.get_rng_state()


def _equals_one_process() -> None:
    # Main weights of a bf16 model are fp32; several steps of one initialiser would differ there.
    for dtype in (torch.float32, torch.bfloat16):
        reference, state = _initialized(dtype)
        for options in options_of_strategies():
            policy = MixedPrecisionPolicy(param_dtype=dtype)
            model = _shard(on_meta(lambda d=dtype: Model(d)), mp_policy=policy, **options)
            assert all(p.is_meta for p in model.parameters())
            assert model.to_empty(device="cpu") is model
            tensors = [*model.parameters(), *model.buffers()]
            assert not any(t.is_meta for t in tensors)
            torch.manual_seed(SEED)
            _initialize_all(model)
            assert torch.equal(torch.get_rng_state(), state), "it draws what one process draws"
            if dtype == torch.float32:
                assert_equal_state(model, reference)
                tokens = torch.arange(13)
                torch.testing.assert_close(model(tokens), reference(tokens))
                continue
            named = dict(model.named_parameters())
            for name in ("layers.0.up.bias", "layers.1.experts", "layers.1.down.weight"):
                full = named[name].detach().full_tensor()
                assert torch.equal(full, reference.get_parameter(name).float()), name
                if options.get("strategy") != "no_shard":
                    assert torch.rand_like(named[name]).dtype == named[name].dtype
            model(torch.arange(13))


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_initialisers_on_sharded_parameters_draw_what_one_process_draws(
    ranks: Ranks, num_ranks: int
) -> None:
    """Bit for bit in every strategy, buffers and the random state after it included."""
    ranks(num_ranks).run(_equals_one_process)


CASES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, **LLAMA, **HEADS, tie_word_embeddings=True)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(**SIZES, n_embd=16, n_layer=2, n_head=4, n_positions=16)
    ),
    "bert": lambda: BertForMaskedLM(
        BertConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
        )
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES,
            **LLAMA,
            **HEADS,
            head_dim=4,
            moe_intermediate_size=8,
            num_experts=4,
            num_experts_per_tok=2,
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, **LLAMA, **HEADS, head_dim=4, pad_token_id=0)
    ),
}


def _hugging_face() -> None:
    for name, build in CASES.items():
        models = [on_meta(build), on_meta(build)]
        ends = ("DecoderLayer", "BertLayer", "GPT2Block")
        layers = [m for m in models[1].modules() if type(m).__name__.endswith(ends)]
        assert len(layers) == 2
        for layer in layers:
            fully_shard(layer)
        fully_shard(models[1])
        for model in models:
            model.to_empty(device="cpu")
            # Sharded parameters are tied still, and no bias may be padded by nothing.
            if name != "bert" or model is models[0]:
                model.tie_weights()
            torch.manual_seed(SEED)
            # As transformers calls them: a row taken while gradients are recorded is refused with
            # torch 2.11 and 2.12.
            with torch.no_grad():
                model.apply(model._init_weights)
            model.eval()
        assert_equal_state(models[1], models[0])
        tokens = torch.arange(8).unsqueeze(0)
        with torch.no_grad():
            found, wanted = (model(tokens).logits for model in reversed(models))
        torch.testing.assert_close(found, wanted, msg=lambda m, n=name: f"{n}: {m}")


def test_hugging_face_models_are_initialised_by_their_own_rules(ranks: Ranks) -> None:
    """Embeddings with a padding row, stacks of experts, tied heads and tables of angles."""
    ranks(2).run(_hugging_face)


def _unwritten() -> None:
    for options in options_of_strategies():
        model = _shard(on_meta(Model), **options).to_empty(device="cpu")
        torch.manual_seed(SEED)
        for module in model.modules():
            if module not in (model, model.norm):
                initialize(module)
        with pytest.raises(RuntimeError) as caught:
            model(torch.arange(3))
        assert "got 'norm.weight', 'norm.bias', 'cache' without values" in str(caught.value)
        # What was written stays, what was not is drawn.
        before = model.layers[1].up.weight.detach().full_tensor()
        torch.manual_seed(SEED + 1)
        materialize(model)
        assert torch.equal(model.layers[1].up.weight.detach().full_tensor(), before)
        model(torch.arange(3))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_was_not_written_is_named(ranks: Ranks, num_ranks: int) -> None:
    """Parameters and buffers that were emptied alone, and materialize() for the rest."""
    ranks(num_ranks).run(_unwritten)


def _parts() -> None:
    model = _shard(on_meta(Model))
    model.layers[0].up.to("cpu")
    assert all(p.is_meta for p in model.parameters()), "nothing has changed"
    model.layers[0].to_empty(device="cpu")
    model.norm_of_batch.to_empty(device="cpu")
    emptied = {n for n, t in [*model.named_parameters(), *model.named_buffers()] if not t.is_meta}
    assert emptied == {
        *(f"layers.0.{n}" for n in ("up.weight", "up.bias", "down.weight", "gate", "experts")),
        *("layers.0.mask", "layers.0.angles"),
        *(f"norm_of_batch.{n}" for n in ("weight", "bias", "running_mean", "running_var")),
        "norm_of_batch.num_batches_tracked",
    }
    kept = model.layers[0].up.weight
    with torch.no_grad():
        kept.copy_(torch.zeros_like(kept))
    model.to_empty(device="cpu")
    assert not kept.detach().full_tensor().any(), "what has values keeps them"
    with pytest.raises(RuntimeError, match=r"to stay torch\.float32"):
        model.to_empty(device="cpu").double()


def test_parts_of_a_model_may_be_emptied(ranks: Ranks) -> None:
    """A unit, a module within one, and what has values already."""
    ranks(2).run(_parts)


class Whole(nn.Module):
    """Parameters for initialisers that look at all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(6, 6))
        self.kernel = nn.Parameter(torch.ones(6, 3, 2))


def _refused() -> list[str]:
    messages = []
    for options in options_of_strategies():
        if options.get("strategy") == "no_shard":
            continue
        model = fully_shard(Whole(), **options)
        calls = {
            "linalg_qr": lambda m=model: nn.init.orthogonal_(m.matrix),
            "eye": lambda m=model: nn.init.eye_(m.matrix),
            "select": lambda m=model: nn.init.sparse_(m.kernel[0], 0.5),
        }
        for operation, call in calls.items():
            with pytest.raises(NotImplementedError, match=rf"got '{operation}.*materialize") as e:
                call()
            messages.append(str(e.value))
        assert model.matrix.detach().full_tensor().eq(1).all(), "nothing was written"
    return messages


def test_initialisers_of_the_whole_are_refused(ranks: Ranks) -> None:
    """On all ranks alike, with the way to run them."""
    first, *others = ranks(3).run(_refused)
    assert all(other == first for other in others)


def _dirac() -> None:
    wanted = nn.init.dirac_(torch.empty(6, 3, 2))
    for options in options_of_strategies():
        model = fully_shard(Whole(), **options)
        if IS_DISPATCH_BYPASSED and options.get("strategy") != "no_shard":
            with pytest.raises(NotImplementedError, match=r"'__setitem__'.*materialize"):
                nn.init.dirac_(model.kernel)
            continue
        nn.init.dirac_(model.kernel)
        assert torch.equal(model.kernel.detach().full_tensor(), wanted), options


def test_single_elements_may_be_written(ranks: Ranks) -> None:
    """As dirac_ does, on whichever rank has them."""
    ranks(3).run(_dirac)


def _other_draws() -> None:
    full = Whole()
    torch.manual_seed(SEED)
    for options in options_of_strategies():
        reference, model = copy.deepcopy(full), fully_shard(copy.deepcopy(full), **options)
        results = []
        for net in (reference, model):
            generator = torch.Generator().manual_seed(SEED)
            torch.manual_seed(SEED)
            with torch.no_grad():
                net.matrix.normal_(generator=generator)
                net.kernel.bernoulli_(0.3).mul_(2.0)
                net.matrix.data.exponential_().clamp_(max=2.0)
            results.append([net.matrix, net.kernel])
        for own, wanted in zip(results[1], results[0], strict=True):
            assert torch.equal(own.detach().full_tensor(), wanted.detach()), options


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_noise_is_that_of_one_process(ranks: Ranks, num_ranks: int) -> None:
    """Draws in place, with a generator and through ``.data`` too."""
    ranks(num_ranks).run(_other_draws)


def _different_states() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    for options in ({"strategy": "no_shard"}, {"mesh": mesh}):
        model = fully_shard(Whole(), **options)
        torch.manual_seed(dist.get_rank())
        for draw in (nn.init.normal_, nn.init.trunc_normal_):
            with pytest.raises(ValueError, match=r"same random state.*torch\.manual_seed"):
                draw(model.matrix)
        assert model.matrix.detach().full_tensor().eq(1).all()
        # A given generator is the one that counts.
        for draw in (nn.init.normal_, nn.init.trunc_normal_):
            generator = torch.Generator().manual_seed(dist.get_rank())
            with pytest.raises(ValueError, match=r"same random state.*of the generator"):
                draw(model.matrix, generator=generator)
            draw(model.matrix, generator=generator.manual_seed(SEED))
            wanted = torch.empty(model.matrix.shape)
            draw(wanted, generator=generator.manual_seed(SEED))
            assert torch.equal(model.matrix.detach().full_tensor(), wanted)


def test_replicas_are_never_drawn_differently(ranks: Ranks) -> None:
    """Ranks of other random states would have other values of the same rows."""
    ranks(2).run(_different_states)
