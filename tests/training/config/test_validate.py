"""Values that cannot be run, and what is said about them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megafsdp.errors import ConfigError
from megafsdp.training.config.validate import split_shares, validate
from tests.training.runs import HYBRID, MIXTURE, tiny


def test_sound_configuration_passes(tmp_path: Path) -> None:
    """The tiny run fits one, two, three and four ranks."""
    for world_size in (1, 2, 3, 4):
        validate(tiny(tmp_path), world_size=world_size)
    validate(tiny(tmp_path, train={"steps": None, "samples": 12}), world_size=4)
    on_host = {"parallel": {"offload_parameters": True}, "optimizer": {"host_threads": 3}}
    validate(tiny(tmp_path, **on_host), world_size=2)


@pytest.mark.parametrize(
    ("section", "values", "what"),
    [
        ("model", {"preset": "qwen3-toi"}, "qwen3-toy"),
        ("model", {"num_query_groups": 3}, "num_query_groups"),
        ("data", {"train": []}, "data.train"),
        ("data", {"train": [], "weights": [1.0]}, "data.train"),
        ("data", {"weights": [1.0, 2.0]}, "data.weights"),
        ("data", {"split": "90,10"}, "either validation prefixes or a split"),
        ("data", {"validation": [], "split": "all"}, "data.split"),
        ("data", {"sequence_length": 17}, "max_sequence_length, 16"),
        ("data", {"sequence_length": 0}, "data.sequence_length"),
        ("data", {"document_mask": True, "tokenizer": None}, "a tokenizer, whose end-of-document"),
        ("optimizer", {"lr": 0.0}, "optimizer.lr"),
        ("optimizer", {"lr": float("inf")}, "optimizer.lr"),
        ("optimizer", {"betas": [0.9, 1.0]}, "optimizer.betas"),
        ("optimizer", {"clip_norm": 0.0}, "optimizer.clip_norm"),
        ("optimizer", {"weight_decay": float("nan")}, "optimizer.weight_decay"),
        ("schedule", {"warmup_samples": -1}, "schedule.warmup_samples"),
        ("schedule", {"decay_samples": 0}, "schedule.decay_samples"),
        ("schedule", {"min_lr_ratio": 1.5}, "schedule.min_lr_ratio"),
        ("train", {"steps": None}, "either steps or samples"),
        ("train", {"samples": 120}, "either steps or samples"),
        ("train", {"steps": None, "samples": 11}, "train.samples"),
        ("train", {"global_batch_size": 13}, "multiple of the 2 data-parallel ranks"),
        ("train", {"micro_batch_size": 4}, "divisor of the 6 samples"),
        ("parallel", {"dp_shard": 3}, "world size 2"),
        ("parallel", {"dp_outer": 4}, "world size 2"),
        ("parallel", {"outer_strategy": "optim"}, "dp_outer above 1 for optim, got 1"),
        (
            "parallel",
            {"dp_outer": 2, "outer_strategy": "optim", "strategy": "optim_grads"},
            "optim_grads_params for optim, got optim_grads",
        ),
        ("parallel", {"ep": 4}, "axis 'ep'"),
        (
            "parallel",
            {"reshard_after_forward": 3},
            "divisor of the 2 ranks of dp_shard x cp, got 3",
        ),
        ("parallel", {"reshard_after_forward": 0}, "parallel.reshard_after_forward"),
        ("parallel", {"reshard_after_forward": -2}, "parallel.reshard_after_forward"),
        (
            "parallel",
            {"dp_outer": 2, "reshard_after_forward": 2},
            "divisor of the 1 ranks of dp_shard",
        ),
        ("parallel", {"prefetch": -1}, "parallel.prefetch"),
        (
            "parallel",
            {"nccl_user_buffers": True, "strategy": "optim_grads"},
            "false with the parallel.strategy optim_grads, got True",
        ),
        ("activation_checkpointing", {"mode": "full", "every": 0}, "checkpointing.every"),
        (
            "activation_checkpointing",
            {"mode": "selective", "use_reentrant": True},
            "activation_checkpointing.use_reentrant",
        ),
        ("optimizer", {"kind": "sgd", "implementation": "megafsdp"}, "fused or foreach or loop"),
        ("optimizer", {"kind": "muon", "implementation": "fused"}, "null or megafsdp for muon"),
        (
            "optimizer",
            {"exp_avg_dtype": "bf16", "implementation": "fused"},
            "fp32 for adamw in its fused",
        ),
        ("optimizer", {"exp_avg_sq_dtype": "fp8", "kind": "muon"}, "fp32 for muon"),
        ("optimizer", {"exp_avg_dtype": "fp16", "kind": "sgd"}, "fp32 for sgd"),
        ("optimizer", {"store_param_remainders": True}, "got fp32 with adamw in the megafsdp"),
        ("optimizer", {"offload_fraction": 1.5}, "at most 1 or auto, got 1.5"),
        ("optimizer", {"offload_fraction": "auto", "kind": "adam"}, "auto with adam in"),
        ("optimizer", {"speculate": True}, "optimizer.speculate"),
        (
            "optimizer",
            {"speculate": True, "offload_fraction": 1.0, "offload_overlap": False},
            "got true with 1.0 and offload_overlap False",
        ),
        ("optimizer", {"host_threads": 4}, "null without an offload_fraction .*, got 4"),
        (
            "optimizer",
            {"host_threads": 0, "offload_fraction": 0.5},
            "host_threads .*0 or null, got 0",
        ),
        ("optimizer", {"offload_fraction": 0.5, "kind": "adam"}, "0.5 with adam in"),
        ("optimizer", {"offload_fraction": 0.5, "implementation": "fused"}, "the fused form"),
        ("optimizer", {"offload_fraction": 0.5, "exp_avg_dtype": "bf16"}, "states in bf16 and"),
        (
            "optimizer",
            {"lr_multipliers": {"*emb*": -1.0}},
            r"lr_multipliers .*, got the mapping .*emb.*-1",
        ),
        (
            "optimizer",
            {"lr_multipliers": {"*norm*": 2.0, "*emb": 2.0}},
            "'[*]emb'. that match none",
        ),
        ("compile", {"layers": True, "backend": "xla"}, "one of .*, inductor, .*, got 'xla'"),
        ("muon", {"ns_steps": 3}, "optimizer.kind muon"),
        ("muon", {"momentum": 1.0}, "muon.momentum"),
        ("muon", {"ns_steps": 0}, "muon.ns_steps"),
        ("loss_scale", {"window": 5}, "param_dtype fp16, got fp32"),
        ("checkpoint", {"keep_last": 0}, "checkpoint.keep_last"),
        ("logging", {"interval_steps": 0}, "logging.interval_steps"),
        ("run", {"seed": -1}, "run.seed .* of at least 0 and below .*, got -1"),
        ("run", {"seed": 2**64 - 1}, "at most 18446744073709551614 for 2 data-parallel ranks, got"),
        ("run", {"seed": 2**64}, "run.seed to .* below 18,446,744,073,709,551,616, got"),
        ("run", {"timeout_s": 1e15}, "run.timeout_s .* at most 1,000,000,000, got"),
        ("data", {"seed": -1}, "data.seed to .*at least 0 and .*, got -1"),
        ("data", {"seed": 2**32}, "data.seed to .* below 4,294,967,296, got"),
        ("evaluation", {"sample_temperature": -0.5}, "evaluation.sample_temperature"),
        ("evaluation", {"sample_temperature": float("nan")}, "evaluation.sample_temperature"),
        ("evaluation", {"sample_temperature": float("inf")}, "evaluation.sample_temperature"),
    ],
)
def test_value_that_cannot_be_run_is_refused(
    tmp_path: Path, section: str, values: dict[str, Any], what: str
) -> None:
    """The message names the field or the bound, and says how to mend it."""
    with pytest.raises(ConfigError, match=what):
        validate(tiny(tmp_path, **{section: values}), world_size=2)


def test_a_value_given_by_code_is_checked_too(tmp_path: Path) -> None:
    """Sections are plain dataclasses, whose values nothing checks before validate()."""
    config = tiny(tmp_path)
    config = replace(config, optimizer=replace(config.optimizer, lr=-1.0))
    with pytest.raises(ConfigError, match=r"optimizer.lr to be a number above 0, got -1\.0"):
        validate(config, world_size=2)


def test_largest_seeds_pass(tmp_path: Path) -> None:
    """Each data-parallel rank adds its number to the run's seed; the last one has a generator."""
    sections = {"run": {"seed": 2**64 - 2}, "data": {"seed": 2**32 - 1}}
    config = tiny(tmp_path, **sections)
    validate(config, world_size=2)
    torch.Generator().manual_seed(config.run.seed + 1)
    np.random.RandomState(config.data.seed)


@pytest.mark.parametrize(
    "values",
    [
        {"dp_outer": 2},
        {"dp_outer": 2, "outer_strategy": "optim"},
        {"dp_outer": 4, "outer_strategy": "optim", "dp_shard": 1},
        {"reshard_after_forward": True},
        {"reshard_after_forward": 2},
        {"dp_outer": 2, "reshard_after_forward": 2},
        {"reshard_after_forward": False, "strategy": "optim_grads"},
    ],
)
def test_sound_way_to_divide_passes(tmp_path: Path, values: dict[str, Any]) -> None:
    """Each of these is a way of dividing the model among four ranks."""
    validate(tiny(tmp_path, parallel=values), world_size=4)


@pytest.mark.parametrize(
    ("section", "values", "known"),
    [
        ("parallel", {"strategy": "zero"}, "no_shard"),
        ("parallel", {"outer_strategy": "optim_grads"}, "no_shard"),
        ("parallel", {"reshard_after_forward": "often"}, "reshard_after_forward"),
        ("precision", {"main_params_dtype": "fp8"}, "bf16"),
        ("precision", {"main_grads_dtype": "fp64"}, "bf16"),
        ("activation_checkpointing", {"mode": "some"}, "selective"),
        ("optimizer", {"offload_fraction": "most"}, "auto"),
        ("optimizer", {"speculate": "maybe"}, "auto"),
    ],
)
def test_unknown_choice_is_refused(
    tmp_path: Path, section: str, values: dict[str, Any], known: str
) -> None:
    """A name that no choice has is an error, with the known ones or the field listed."""
    with pytest.raises(ConfigError, match=known):
        tiny(tmp_path, **{section: values})


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        (
            {
                "precision": {"main_params_dtype": "bf16"},
                "optimizer": {"store_param_remainders": True, "implementation": "loop"},
            },
            "got bf16 with adamw in the loop form",
        ),
        (
            {
                "precision": {"main_params_dtype": "bf16"},
                "optimizer": {"offload_fraction": 0.5},
            },
            "states in fp32 and fp32, weights in bf16",
        ),
        (
            {
                "parallel": {"offload_parameters": True},
                "optimizer": {"offload_fraction": 0.5},
            },
            "Choose one of the two",
        ),
    ],
)
def test_values_of_two_sections_that_contradict_each_other_are_refused(
    tmp_path: Path, sections: dict[str, Any], what: str
) -> None:
    """Each of them would do without the other."""
    with pytest.raises(ConfigError, match=what):
        validate(tiny(tmp_path, **sections), world_size=2)


@pytest.mark.parametrize(
    "split", ["1", "0,1", "1,0", "-1,1", "1,1,-1", "1,1,inf", "nan,1", "1,nan", "1,1,1,1"]
)
def test_split_without_two_positive_shares_is_refused(split: str) -> None:
    """A third share, which nothing reads, may be 0."""
    assert split_shares("99,1") == [99.0, 1.0]
    assert split_shares("8,1,0") == [8.0, 1.0, 0.0]
    with pytest.raises(ConfigError, match=f"shares for training and validation, got '{split}'"):
        split_shares(split)


def test_fused_steps_need_gradients_of_the_weights_dtype(tmp_path: Path) -> None:
    """SGD in its other forms takes any."""
    precision = {"main_grads_dtype": "bf16"}
    fused, loop = (
        tiny(tmp_path, precision=precision, optimizer={"kind": "sgd", "implementation": form})
        for form in ("fused", "loop")
    )
    validate(loop, world_size=2)
    with pytest.raises(ConfigError, match="sgd in its fused form"):
        validate(fused, world_size=2)


@pytest.mark.parametrize(
    ("sections", "is_sound"),
    [
        ({}, True),
        ({"parallel": {"strategy": "no_shard"}}, False),
        ({"precision": {"main_params_dtype": "bf16"}}, False),
        ({"precision": {"main_params_dtype": "bf16"}, "run": {"device": "cuda"}}, True),
        (
            {
                "precision": {"main_params_dtype": "bf16"},
                "run": {"device": "cuda"},
                "parallel": {"offload_parameters": True},
            },
            False,
        ),
    ],
)
def test_fused_sgd_is_refused_where_torchs_is_missing_or_wrong(
    tmp_path: Path, sections: dict[str, Any], is_sound: bool
) -> None:
    """For replicated weights, and for narrow ones on a CPU; null is no fused form anywhere."""
    sgd: dict[str, Any] = {"kind": "sgd", "implementation": "fused"}
    fused, free = (tiny(tmp_path, optimizer=s, **sections) for s in (sgd, {"kind": "sgd"}))
    validate(free, world_size=2)
    if is_sound:
        validate(fused, world_size=2)
        return
    with pytest.raises(ConfigError, match="Expected null, foreach or loop"):
        validate(fused, world_size=2)


@pytest.mark.parametrize("field", ["keep_fp32", "keep_unquantized"])
@pytest.mark.parametrize("name", ["*typo_norm*", "final_layernorm", "LayerNorm", "decoder.layers"])
def test_kept_name_that_matches_nothing_is_refused(tmp_path: Path, name: str, field: str) -> None:
    """Beside one that does; a module of modules is a name."""
    config = tiny(tmp_path, precision={"recipe": "fp8_block", field: ["embedding", name]})
    if name == "decoder.layers":
        validate(config, world_size=2)
        return
    with pytest.raises(ConfigError, match=rf"got \['{re.escape(name)}'\].*{field} .* precision"):
        validate(config, world_size=2)


def test_a_recipe_has_what_belongs_to_it_alone(tmp_path: Path) -> None:
    """Choices of a recipe need one, and quantized weights stay on the device."""
    given = {"recipe": "mxfp8", "keep_unquantized": ["output_layer"], "quantize_activations": False}
    validate(tiny(tmp_path, precision=given), world_size=2)
    for name in ("keep_unquantized", "quantize_activations"):
        config = tiny(tmp_path, precision={name: given[name]})
        with pytest.raises(ConfigError, match=rf"precision\.recipe is null.*precision\.{name}"):
            validate(config, world_size=2)
    on_host = {"parallel": {"offload_parameters": True}}, {"optimizer": {"offload_fraction": 0.5}}
    for section in on_host:
        config = tiny(tmp_path, precision={"recipe": "mxfp8"}, **section)
        with pytest.raises(ConfigError, match=r"got mxfp8.*Leave out the recipe"):
            validate(config, world_size=2)
    with pytest.raises(ConfigError, match=r"fp8_block, mxfp8 or nvfp4 or null, got the text 'fp9'"):
        tiny(tmp_path, precision={"recipe": "fp9"})


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_torchs_adam_needs_gradients_of_the_weights_dtype(tmp_path: Path, kind: str) -> None:
    """Our own forms take any."""
    precision = {"main_grads_dtype": "bf16"}
    torchs, ours, muon = (
        tiny(tmp_path, precision=precision, optimizer=section)
        for section in ({"kind": kind, "implementation": "loop"}, {"kind": kind}, {"kind": "muon"})
    )
    validate(ours, world_size=2)
    validate(muon, world_size=2)
    with pytest.raises(ConfigError, match=f"main_params_dtype, fp32, for {kind} in its loop form"):
        validate(torchs, world_size=2)


@pytest.mark.parametrize(
    "section", [{"hysteresis": 0}, {"initial": 0.5}, {"constant": -1.0}, {"window": 0}]
)
def test_loss_scale_that_cannot_work_is_refused(tmp_path: Path, section: dict[str, float]) -> None:
    """What the rule of the scale refuses is an error of the configuration."""
    precision = {"param_dtype": "fp16"}
    validate(tiny(tmp_path, precision=precision), world_size=2)
    config = tiny(tmp_path, precision=precision, loss_scale=section)
    with pytest.raises(ConfigError, match="0 < min_scale"):
        validate(config, world_size=2)


def test_heads_of_linear_attention_are_shared_out_over_cp_and_tp(tmp_path: Path) -> None:
    """Attention's are not: ranks gather its keys, so any degree of cp suits other models."""
    hybrid = HYBRID | {"linear_num_key_heads": 4, "num_query_groups": 2}
    for model, parallel in ((hybrid, {"cp": 2, "tp": 2}), (hybrid, {"cp": 4}), ({}, {"cp": 4})):
        validate(tiny(tmp_path, model=model, parallel=parallel), world_size=4)
    config = tiny(tmp_path, model=hybrid, parallel={"cp": 4, "tp": 2})
    what = r"parallel\.tp 2 divides model\.linear_num_key_heads, 4, got 4.*parallel\.cp\."
    with pytest.raises(ConfigError, match=what):
        validate(config, world_size=8)
    # Neighbours of a slice are ranks of cp too.
    slices = {"cp": 2, "reshard_after_forward": 4}
    validate(tiny(tmp_path, parallel=slices), world_size=4)
    with pytest.raises(ConfigError, match=r"divisor of the 4 ranks of dp_shard x cp, got 3"):
        validate(tiny(tmp_path, parallel=slices | {"reshard_after_forward": 3}), world_size=4)


_WIDE = {"num_attention_heads": 4, "num_query_groups": 4, "head_dim": 8}


def test_batches_and_seeds_go_by_data_parallel_ranks(tmp_path: Path) -> None:
    """Twelve samples suit 16 ranks of which 4 share each layer out; thirteen name the 4 others."""
    sections: dict[str, Any] = {"model": _WIDE, "parallel": {"dp_outer": 2, "tp": 4}}
    seed = {"seed": 2**64 - 4}
    validate(tiny(tmp_path, **sections, run=seed), world_size=16)
    with pytest.raises(ConfigError, match=r"for 4 data-parallel ranks, got 18446744073709551613"):
        validate(tiny(tmp_path, **sections, run={"seed": 2**64 - 3}), world_size=16)
    with pytest.raises(ConfigError, match=r"multiple of the 4 data-parallel ranks.*Use 16, or"):
        validate(tiny(tmp_path, **sections, train={"global_batch_size": 13}), world_size=16)
    with pytest.raises(ConfigError, match=r"divisor of the 3 samples of a data-parallel rank"):
        validate(tiny(tmp_path, **sections, train={"micro_batch_size": 2}), world_size=16)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"num_query_groups": 2}, r"num_query_groups, 2, got 4"),
        ({"ffn_hidden_size": 50}, r"ffn_hidden_size, 50, got 4"),
        ({"vocab_size": 322}, r"vocab_size, 322, got 4"),
    ],
)
def test_layers_are_shared_out_in_equal_parts(
    tmp_path: Path, values: dict[str, int], what: str
) -> None:
    """The message names the model's value and parallel.tp, before anything is built."""
    config = tiny(tmp_path, model=_WIDE | values, parallel={"tp": 4})
    with pytest.raises(ConfigError, match=rf"divisor of model\.{what}.*parallel\.tp"):
        validate(config, world_size=4)


def test_experts_are_shared_out_in_equal_parts(tmp_path: Path) -> None:
    """Over ranks of dp_shard and tp alike; what does not divide is named, before it is built."""
    six = MIXTURE | {"num_experts": 6, "num_query_groups": 2}
    for tp, ep, world_size in ((1, 2, 2), (1, 3, 3), (2, 2, 2), (2, 6, 12), (2, 1, 4)):
        validate(tiny(tmp_path, model=six, parallel={"tp": tp, "ep": ep}), world_size=world_size)
    for model, parallel, what in (
        (six, {"ep": 4}, r"divisor of model\.num_experts, 6, got 4"),
        ({}, {"ep": 2}, r"1 for the architecture qwen3, which has no experts, got 2"),
        (six, {"dp_outer": 2, "ep": 3}, r"divisor of dp_shard x cp x tp = 2, got 3"),
        (six | {"num_experts_per_token": 7}, {}, r"at most the 6 experts of a layer, got 7"),
    ):
        with pytest.raises(ConfigError, match=what):
            validate(tiny(tmp_path, model=model, parallel=parallel), world_size=4)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"num_query_groups": 1}, r"model\.num_query_groups, 1"),
        ({"shared_expert_ffn_hidden_size": 15}, r"model\.shared_expert_ffn_hidden_size, 15"),
        ({"linear_num_key_heads": 3, "linear_num_value_heads": 6}, r"linear_num_key_heads, 3"),
    ],
)
def test_layers_of_a_hybrid_are_shared_out_in_equal_parts(
    tmp_path: Path, values: dict[str, int], what: str
) -> None:
    """A width that mixtures do not read, and experts, which tp does not cut, may be odd."""
    odd = {"ffn_hidden_size": 49, "moe_ffn_hidden_size": 13, "num_query_groups": 2}
    parallel = {"tp": 2}
    validate(tiny(tmp_path, model=HYBRID | odd, parallel=parallel), world_size=2)
    with pytest.raises(ConfigError, match=f"divisor of .*{what}, got 2"):
        validate(tiny(tmp_path, model=HYBRID | odd | values, parallel=parallel), world_size=2)
