"""Count the floating-point operations that the mathematics of a training step asks for.

Recomputation, optimizer and elementwise work are not counted, so a rate made from this number
compares models and machines, not kernels.
"""

from __future__ import annotations

from megafsdp.models.config import LINEAR_ATTENTION, ModelConfig

# Tokens that the gated delta rule takes at once; published kernels have this length too.
_CHUNK_LENGTH = 64


def flops_per_token(
    config: ModelConfig, sequence_length: int, *, credit_causal_mask: bool = True
) -> float:
    """Count the operations of forward and backward for one token of a sequence.

    A multiply-add is 2 operations, and backward costs twice forward (a gradient for the input and
    one for the weight), hence the leading 3 * 2:

        6 * (sum over layers of (mixer + MLP) + H * V)
        attention        H * (q + 2 * k) + q * H + 2 * q * S      H * 2 * q where it is gated
        linear attention H * (2 * K + 2 * W + 2 * n) + W * H      in and out projection
                         + w * (2 * K + W)                        convolution
                         + n * (3 * d * e + (3 * d + 2 * e) * C)  gated delta rule
        MLP              m * H * F
        mixture          H * E + 3 * H * (t * I + Z) + H          active experts alone; H with Z

    with H hidden, V the padded vocabulary and S the sequence length; q and k the widths of all
    query and all key heads; m = 3 for a gated MLP and 2 else, F its inner width; E experts of inner
    width I, t of them for each token, and a shared one of width Z. Linear attention has K and W as
    the widths of all key and all value heads, n value heads, d and e the widths of one key and one
    value head, w tokens in its convolution, and C tokens in a chunk. The rule reads, corrects and
    writes the d x e state (three products), and within a chunk multiplies keys by keys, queries by
    keys, solves a triangular system of d + e columns, and applies scores to values.

    What a causal mask leaves of a square is credited as in Megatron-LM's
    ``num_floating_point_operations``: half of S, and half of C. torchtitan and older Megatron-LM
    count the whole square. The embedding is a lookup and counts nothing; the output layer counts,
    tied or not.

    Args:
        config: The model.
        sequence_length: Tokens in a sequence.
        credit_causal_mask: False counts the masked halves of the squares too.

    Returns:
        Operations for one token.

    Source: Chowdhery et al., PaLM (arXiv:2204.02311), appendix B, for the rule of counting;
        Megatron-LM, megatron/training/training.py, num_floating_point_operations; Yang et al.,
        Gated Delta Networks (arXiv:2412.06464), section 3.3, for the rule in chunks.
    """
    causal = 0.5 if credit_causal_mask else 1.0
    num_linear = config.layer_types.count(LINEAR_ATTENTION)
    layers = (config.num_layers - num_linear) * _attention(config, causal * sequence_length)
    if num_linear:
        layers += num_linear * _linear_attention(
            config, causal * min(_CHUNK_LENGTH, sequence_length)
        )
    layers += config.num_layers * _mlp(config)
    return 6.0 * (layers + config.hidden_size * config.vocab_size)


def num_idle_parameters(config: ModelConfig) -> int:
    """Return how many parameters of experts a token does not use; 0 without experts."""
    num_idle = config.num_experts - config.num_experts_per_token
    return config.num_layers * num_idle * 3 * config.hidden_size * config.moe_ffn_hidden_size


def _attention(config: ModelConfig, num_attended: float) -> float:
    """Return the multiply-adds of one layer's attention to ``num_attended`` tokens."""
    is_gated = config.architecture == "qwen3_next"
    num_query_rows = (2 if is_gated else 1) * config.query_size
    projections = config.hidden_size * (num_query_rows + 2 * config.key_size + config.query_size)
    return projections + 2 * config.query_size * num_attended


def _linear_attention(config: ModelConfig, num_attended: float) -> float:
    """Return the multiply-adds of linear attention to ``num_attended`` tokens of a chunk."""
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    num_heads = config.linear_num_value_heads
    keys, values = config.linear_num_key_heads * key_dim, num_heads * value_dim
    projections = config.hidden_size * (2 * keys + 3 * values + 2 * num_heads)
    convolution = config.linear_conv_kernel * (2 * keys + values)
    of_state = 3 * key_dim * value_dim
    of_chunk = (3 * key_dim + 2 * value_dim) * num_attended
    return projections + convolution + num_heads * (of_state + of_chunk)


def _mlp(config: ModelConfig) -> int:
    """Return the multiply-adds of one layer's MLP, or of a token's part of a mixture."""
    if not config.has_experts:
        num_matrices = 3 if config.has_gated_mlp else 2
        return num_matrices * config.hidden_size * config.ffn_hidden_size
    shared = config.shared_expert_ffn_hidden_size
    width = config.num_experts_per_token * config.moe_ffn_hidden_size + shared
    num_scores = config.num_experts + (shared > 0)
    return config.hidden_size * (num_scores + 3 * width)
