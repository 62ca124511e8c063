"""What shapes tell of a model's arguments, in Megatron-LM's words, and the other way about."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megafsdp.checkpoint.megatron.names import EMBEDDING, OUTPUT, TheirNames
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.mesh.fused_parts import FusedParts

_POSITIONS = "embedding.position_embeddings.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\..*")
_QKV = re.compile(r".*self_attention\.linear_qkv\.(?:weight|bias)")
_QKV_PARTS = ("query", "key", "value")


def query_groups(
    name: str, shape: tuple[int, ...], args: Mapping[str, object]
) -> FusedParts | None:
    """Return the query groups inside a weight or bias; None if it has none that args explain.

    Args:
        name: Our name.
        shape: The stored tensor's.
        args: The job's arguments.
    """
    heads = args.get("num_attention_heads")
    if not _QKV.fullmatch(name) or not isinstance(heads, int):
        return None
    groups = args.get("num_query_groups") if args.get("group_query_attention") else heads
    hidden, head_dim = args.get("hidden_size"), args.get("kv_channels")
    if head_dim is None and isinstance(hidden, int):
        head_dim = hidden // heads
    if not (isinstance(groups, int) and isinstance(head_dim, int) and groups and head_dim):
        return None
    parts = FusedParts(_QKV_PARTS, (heads // groups * head_dim, head_dim, head_dim), 0, groups)
    return parts if parts.extent == shape[0] else None


def derived_args(ours: CheckpointReader, names: TheirNames) -> dict[str, object]:
    """Return the arguments of the job that would have saved a checkpoint of ours.

    Args:
        ours: The checkpoint.
        names: Its names, and how the job will run.
    """
    manifest = ours.manifest
    args: dict[str, object] = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "ckpt_format": "fsdp_dtensor",
        "use_megatron_fsdp": True,
        "use_distributed_optimizer": True,
        "transformer_impl": names.transformer_impl,
        "bf16": names.precision == "bf16",
        "fp16": names.precision == "fp16",
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    layers = {int(found[1]) for name in names.names if (found := _LAYER.fullmatch(name))}
    if layers:
        args["num_layers"] = max(layers) + 1
    if EMBEDDING in names.names:
        rows, args["hidden_size"] = ours.shape(f"model.{EMBEDDING}")
        args["padded_vocab_size"] = rows
        args["untie_embeddings_and_output_weights"] = f"model.{OUTPUT}" not in manifest.aliases
        args["add_position_embedding"] = _POSITIONS in names.names
        kind = "learned_absolute" if _POSITIONS in names.names else "rope"
        args["position_embedding_type"] = kind
    if _POSITIONS in names.names:
        args["max_position_embeddings"] = ours.shape(f"model.{_POSITIONS}")[0]
    first = "decoder.layers.0"
    if f"{first}.mlp.linear_fc2.weight" in names.names:
        args["ffn_hidden_size"] = ours.shape(f"model.{first}.mlp.linear_fc2.weight")[1]
        fc1 = f"model.{first}.mlp.linear_fc1.weight"
        args["swiglu"] = fc1 not in manifest.tensors
        args["add_bias_linear"] = f"{first}.mlp.linear_fc2.bias" in names.names
    qkv = manifest.tensors.get(f"model.{first}.self_attention.linear_qkv.weight")
    if qkv is not None and qkv.fused is not None and qkv.fused.names == _QKV_PARTS:
        query_rows, head_dim, _ = qkv.fused.sizes
        heads = query_rows // head_dim * qkv.fused.num_groups
        args |= {"num_attention_heads": heads, "kv_channels": head_dim}
        args["group_query_attention"] = heads != qkv.fused.num_groups
        args["num_query_groups"] = qkv.fused.num_groups
        args["qk_layernorm"] = f"{first}.self_attention.q_layernorm.weight" in names.names
        args["normalization"] = (
            "LayerNorm" if f"{first}.input_layernorm.bias" in names.names else "RMSNorm"
        )
    return args
