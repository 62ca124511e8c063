"""Models of transformers train, generate and are saved as they are."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from megafsdp import (
    MixedPrecisionPolicy,
    checkpoint,
    full_state_dict,
    fully_shard_model,
    materialize,
    register_fsdp_forward_method,
    summon_full_params,
)
from megafsdp.integrations.transformers import initializer_of
from tests.ecosystem.models import (
    MODELS,
    ROWS_PER_RANK,
    adamw,
    build,
    global_batch,
    own_rows,
    train_beside,
)
from tests.fsdp.toy import assert_same_grads, assert_same_parameters
from tests.ranks import Ranks

# transformers warns of its own future.
pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]


def _train(name: str) -> None:
    reference = build(name)
    model = fully_shard_model(copy.deepcopy(reference))
    if hasattr(reference.config, "num_experts"):
        _require_idle_experts(reference)
    train_beside(reference, model)


def _require_idle_experts(model: PreTrainedModel) -> None:
    """Assert that this rank's rows use fewer experts than the rows of all ranks do."""
    counts = []
    for rows in (own_rows(global_batch(0)), global_batch(0)):
        net = copy.deepcopy(model)
        net(**rows).loss.backward()
        experts = [p.grad for n, p in net.named_parameters() if ".experts." in n]
        # One tensor of all experts, or one for each; a row of zeros or None is an idle one.
        used = [
            grad.flatten(1).any(1) if grad.dim() == 3 else grad.any()
            for grad in experts
            if grad is not None
        ]
        counts.append(sum(int(each.sum()) for each in used))
    assert 0 < counts[0] < counts[1], counts


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_one_process(ranks: Ranks, name: str) -> None:
    """Units come from _no_split_modules; losses, gradients and parameters are those of one."""
    ranks(2).run(_train, name)


def _train_checkpointed(use_reentrant: bool) -> None:
    reference = build("qwen3")
    model = copy.deepcopy(reference)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert model.is_gradient_checkpointing
    train_beside(reference, fully_shard_model(model))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_activations_change_no_result(ranks: Ranks, use_reentrant: bool) -> None:
    """Trained with gradient_checkpointing_enable(), in both its forms."""
    ranks(2).run(_train_checkpointed, use_reentrant)


def _train_bf16() -> None:
    reference = build("qwen3")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard_model(copy.deepcopy(reference), mp_policy=policy)
    optimizers = [adamw(reference), adamw(model)]
    for step in range(3):
        batch = global_batch(step)
        for start in range(0, len(batch["labels"]), ROWS_PER_RANK):
            # What one rank does, in one process: its rows in bf16, its gradients added in fp32.
            narrow = copy.deepcopy(reference)
            for parameter in narrow.parameters():
                parameter.data = parameter.data.bfloat16()
            rows = {
                name: all_rows[start : start + ROWS_PER_RANK] for name, all_rows in batch.items()
            }
            narrow(**rows).loss.backward()
            for own, cast in zip(reference.parameters(), narrow.parameters(), strict=True):
                share = cast.grad.float() / dist.get_world_size()
                own.grad = share if own.grad is None else own.grad + share
        model(**own_rows(batch)).loss.backward()
        # The two run the same kernels on the same numbers.
        assert_same_grads(model, reference, rtol=0, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference, rtol=0, atol=0)


def _outputs_in_fp32(name: str) -> None:
    reference = build(name)
    rows = own_rows(global_batch(0))
    # This router converts itself to fp32 in each forward, where a part of a unit cannot be changed.
    kept = ("*.router",) if name == "switch" else ()
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32, keep_fp32=kept)
    model = fully_shard_model(copy.deepcopy(reference), mp_policy=policy)
    for key, parameter in reference.named_parameters():
        if ".router." not in key or not kept:
            parameter.data = parameter.data.bfloat16()
    wanted, output = reference(**rows), model(**rows)
    assert type(output) is type(wanted) and output.keys() == wanted.keys()
    assert output.loss.dtype == output["logits"].dtype == torch.float32
    assert torch.equal(output.logits, wanted.logits.float())
    output.loss.backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_outputs_may_be_fp32_where_weights_are_bf16(ranks: Ranks, name: str) -> None:
    """A ModelOutput stays one; what is no unit computes in bf16 like the others, or is kept."""
    ranks(2).run(_outputs_in_fp32, name)


def test_bf16_weights_train_as_the_same_casts_in_one_process(ranks: Ranks) -> None:
    """Compute weights and gradients of bf16 over main weights of fp32."""
    ranks(2).run(_train_bf16)


def _generate() -> None:
    reference = build("qwen3").eval()
    model = fully_shard_model(copy.deepcopy(reference)).eval()
    # Of another length on each rank: with full parameters shown, ranks need not run alike.
    prompt = torch.arange(3, 8 + dist.get_rank())[None]
    options = {"do_sample": False, "attention_mask": torch.ones_like(prompt)}
    wanted = reference.generate(prompt, max_new_tokens=6 + dist.get_rank(), **options)
    with summon_full_params(model):
        written = model.generate(prompt, max_new_tokens=6 + dist.get_rank(), **options)
    assert torch.equal(written, wanted)
    assert wanted.shape[1] > prompt.shape[1]
    register_fsdp_forward_method(model, "generate")
    wanted = reference.generate(prompt, max_new_tokens=6, min_new_tokens=6, **options)
    assert torch.equal(
        model.generate(prompt, max_new_tokens=6, min_new_tokens=6, **options), wanted
    )
    # Of another number of steps on each rank, and with one rank alone under full parameters.
    options["max_new_tokens"] = 3 + 2 * dist.get_rank()
    wanted = reference.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, **options), wanted)
    with summon_full_params(model):
        if dist.get_rank() == 0:
            assert torch.equal(model.generate(prompt, **options), wanted)
    assert torch.equal(model.generate(prompt, **options), wanted)


def test_generate_writes_what_one_process_writes(ranks: Ranks) -> None:
    """Under summon_full_params(), and as a registered forward method that gathers each unit.

    Ranks whose texts end earlier go on with the others.
    """
    ranks(2).run(_generate)


def _save(name: str, directory: Path) -> None:
    model = fully_shard_model(build(name))
    checkpoint.export_hf(model, directory / "exported")
    state = full_state_dict(model)
    if dist.get_rank() == 0:
        model.save_pretrained(directory / "saved", state_dict=state)
    other = build(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other = fully_shard_model(other)
    checkpoint.import_hf(other, directory / "exported")
    loaded = full_state_dict(other)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())
    with pytest.raises(NotImplementedError, match="full_"):
        model.save_pretrained(directory / "refused")


@pytest.mark.parametrize("name", MODELS)
def test_saved_models_are_read_by_from_pretrained(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """By export_hf(), and by save_pretrained() with a full state; its own state is refused."""
    ranks(2).run(_save, name, tmp_path)
    wanted = build(name).state_dict()
    for kind in ("exported", "saved"):
        model, report = MODELS[name][0].from_pretrained(tmp_path / kind, output_loading_info=True)
        assert not any(report.values()), report
        found = model.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items()), kind


def _composite(name: str) -> PreTrainedModel:
    """Build a model whose vision tower is a model with an initialiser of its own."""
    width = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    width["num_attention_heads"] = 4
    vision = {**width, "image_size": 16, "patch_size": 8}
    if name == "llava":
        vision["model_type"] = "clip_vision_model"
        text = {**width, "vocab_size": 96, "model_type": "llama"}
        config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=9)
        return LlavaForConditionalGeneration(config)
    text = {"vocab_size": 96, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "word_embed_proj_dim": 32, "model_type": "opt"}
    between = {**width, "vocab_size": 96, "encoder_hidden_size": 32}
    config = Blip2Config(
        vision_config=vision, qformer_config=between, text_config=text, num_query_tokens=4
    )
    return Blip2ForConditionalGeneration(config)


def _initialize(name: str) -> None:
    with torch.device("meta"):
        reference, model = _composite(name), fully_shard_model(_composite(name))
    reference.to_empty(device="cpu")
    reference.tie_weights()
    for module in reference.modules():
        # transformers draws once; on the meta device that stored nothing.
        module.__dict__.pop("_is_hf_initialized", None)
    torch.manual_seed(3)
    reference.initialize_weights()
    torch.manual_seed(3)
    materialize(model, initializer_of(model))
    wanted, found = reference.state_dict(), full_state_dict(model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


@pytest.mark.parametrize("name", ["llava", "blip2"])
def test_models_within_a_model_draw_their_own_weights(ranks: Ranks, name: str) -> None:
    """On the meta device, by initializer_of(); each has the bits that transformers draws."""
    ranks(2).run(_initialize, name)
