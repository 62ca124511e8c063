"""How many floating-point operations the mathematics of a training step asks for.

Recomputation, optimizer and elementwise work are not counted, so a rate made from this number
compares models and machines, not kernels.
"""

from __future__ import annotations

from megafsdp.models.config import ModelConfig


def flops_per_token(
    config: ModelConfig, sequence_length: int, *, credit_causal_mask: bool = True
) -> float:
    """Count the operations of forward and backward for one token of a sequence.

    A multiply-add is 2 operations, and backward costs twice forward (a gradient for the input and
    one for the weight), hence the leading 3 * 2:

        6 * (L * (H * (q + 2 * k) + q * H + m * H * F + attention) + H * V)
        attention = 2 * q * S, or half of it where the causal mask is credited

    with L layers, H hidden, q and k the widths of all query and all key heads, m = 3 for a gated
    MLP and 2 else, F its inner width, V the padded vocabulary and S the sequence length. The
    embedding is a lookup and counts nothing; the output layer counts, tied or not.

    The mask is credited as in Megatron-LM's ``num_floating_point_operations``: a token attends to
    S / 2 others on average. torchtitan and older Megatron-LM count the whole square.

    Args:
        config: The model.
        sequence_length: Tokens in a sequence.
        credit_causal_mask: False counts the masked half of the attention square too.

    Returns:
        Operations for one token.

    Source: Megatron-LM, megatron/training/training.py, num_floating_point_operations.
    """
    projections = config.hidden_size * (2 * config.query_size + 2 * config.key_size)
    num_mlp_matrices = 3 if config.has_gated_mlp else 2
    mlp = num_mlp_matrices * config.hidden_size * config.ffn_hidden_size
    attended = sequence_length / 2 if credit_causal_mask else sequence_length
    attention = 2 * config.query_size * attended
    output = config.hidden_size * config.vocab_size
    return 6.0 * (config.num_layers * (projections + mlp + attention) + output)
