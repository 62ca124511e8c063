"""Settings of the bridged libraries that are not translated: refused by name, with a hint."""

from __future__ import annotations

from collections.abc import Mapping

from megafsdp.errors import expected

_ONE_ENGINE = "Leave it out, and start by torchrun or a plain accelerate launch"

# The values that are translated, and what to do instead of the others.
_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    # accelerate's plugin, and options beside it.
    "fsdp_version": (
        (2,),
        "Give fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), or set it by accelerate "
        "config",
    ),
    "auto_wrap_policy": (
        (None, "transformer_auto_wrap_policy"),
        "Use TRANSFORMER_BASED_WRAP with transformer_cls_names_to_wrap, or NO_WRAP",
    ),
    "activation_checkpointing": (
        (False,),
        "Call model.gradient_checkpointing_enable() before prepare()",
    ),
    "cpu_ram_efficient_loading": (
        (False,),
        "Build the model within accelerate.init_empty_weights(), then call model.tie_weights(), "
        "prepare() and megafsdp.checkpoint.import_hf(), in which each rank reads its own rows",
    ),
    "dynamo_backend": (("NO",), "Compile the layers by layer.compile() before prepare()"),
    # Arguments of a Trainer, of transformers and of Lightning.
    "fp16": (
        (False,),
        "Use bf16=True, or a loop of your own with megafsdp.LossScaler in place of torch's "
        "GradScaler",
    ),
    "torch_compile": (
        (False,),
        "Override shard_model(), and call layer.compile() on each layer before the model is "
        "sharded",
    ),
    "bf16_full_eval": (
        (False,),
        "Use bf16=True, which evaluates by bf16 copies of fp32 weights too",
    ),
    "fp16_full_eval": ((False,), "Use bf16=True, which evaluates in bf16 too"),
    # TRL's.
    "sync_ref_model": (
        (False,),
        "Leave it out: the reference model is whole on each rank, and a callback of your own may "
        "change it by megafsdp.full_state_dict(model)",
    ),
    "fsdp": ((False,), _ONE_ENGINE),
    "deepspeed": ((False,), _ONE_ENGINE),
    "gradient_clip_algorithm": (
        (None, "norm"),
        "Override configure_gradient_clipping() with torch.nn.utils.clip_grad_value_()",
    ),
    "precision": (
        ("32-true", "bf16-mixed"),
        "Use precision='bf16-mixed', or override shard_model() with an mp_policy of "
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16): main weights stay in fp32",
    ),
    # Ray's storage.
    "file system of storage_path": (
        ("local",),
        "Use a folder that all workers mount, and copy finished checkpoints elsewhere",
    ),
}


def check_settings(given: Mapping[str, object], where: str) -> None:
    """Check that settings of a library ask for nothing that its bridge does not translate.

    Raises:
        NotImplementedError: One does; the error says what to do.
    """
    for name, value in given.items():
        accepted, hint = _ONLY[name]
        if value not in accepted:
            what = f"{name} to be {' or '.join(map(repr, accepted))}"
            raise NotImplementedError(expected(what, repr(value), where=where, hint=hint))
