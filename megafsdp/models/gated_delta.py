"""The gated delta rule: the recurrence that defines it, and its form by chunks of the sequence.

A head has a state S of D x E, which each token decays, corrects along its key, and reads:

    S <- exp(log_decay) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q

Queries and keys are L2-normalised here, and queries scaled by 1 / sqrt(D). All is computed in fp32
at least. The recurrence has T steps, each of which reads and writes the state. By chunks of C
tokens, the corrections of a chunk solve one triangular system, and only the states between chunks
are in sequence; both forms give the same numbers up to rounding. On CUDA the kernel of
flash-linear-attention runs where it is installed.

Shape suffixes: B batch, T sequence, G key heads, N value heads, P value heads of one key head,
D width of a key head, E of a value head; J chunks, C tokens of a chunk.

Source: Yang et al., Gated Delta Networks (arXiv:2412.06464), section 3; Yang et al., Parallelizing
Linear Transformers with the Delta Rule over Sequence Length (arXiv:2406.06484), section 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megafsdp.models.linear_attention_kernels import rule_kernel_for

# Tokens of a chunk, the fastest of 16, 32 and 64 on a CPU for narrow heads; and from which width of
# heads on a longer chunk is, since a state between chunks then costs more than its tokens.
_CHUNK = 32
_WIDE_HEAD, _CHUNK_OF_WIDE_HEADS = 64, 64
# Under the root of a head's norm, as in the released models.
_NORM_EPS = 1e-6


def gated_delta_rule(
    q_BTGD: Tensor,
    k_BTGD: Tensor,
    v_BTNE: Tensor,
    *,
    log_decay_BTN: Tensor,
    beta_BTN: Tensor,
) -> Tensor:
    """Attend by the gated delta rule from an empty state, by the fastest form there is.

    Args:
        q_BTGD: Queries, not normalised.
        k_BTGD: Keys, not normalised.
        v_BTNE: Values; G divides N, and each key head serves N / G successive value heads.
        log_decay_BTN: At most 0: what each token's decay of the state is the exponential of.
        beta_BTN: 0 to 1: how much of its error a token corrects.

    Returns:
        (B, T, N, E) in the dtype of the values.
    """
    kernel = rule_kernel_for(v_BTNE)
    if kernel is None:
        return chunked_gated_delta_rule(
            q_BTGD, k_BTGD, v_BTNE, log_decay_BTN=log_decay_BTN, beta_BTN=beta_BTN
        )
    out_BTNE, _ = kernel(
        q_BTGD, k_BTGD, v_BTNE, log_decay_BTN, beta_BTN, use_qk_l2norm_in_kernel=True
    )
    return out_BTNE


def chunked_gated_delta_rule(
    q_BTGD: Tensor,
    k_BTGD: Tensor,
    v_BTNE: Tensor,
    *,
    log_decay_BTN: Tensor,
    beta_BTN: Tensor,
    chunk_size: int | None = None,
) -> Tensor:
    """Attend by the gated delta rule, in chunks of the sequence.

    Args:
        q_BTGD: As for :func:`gated_delta_rule`, and so are the others.
        k_BTGD: Keys.
        v_BTNE: Values.
        log_decay_BTN: Logarithms of decays.
        beta_BTN: Factors of corrections.
        chunk_size: Tokens of a chunk, which need not divide T; None chooses.

    Returns:
        (B, T, N, E) in the dtype of the values. Autograd saves a few tensors of (B, T, N, C),
        (B, T, N, D) and (B, N, J, D, E) in fp32, or in fp64.
    """
    dtype = torch.promote_types(v_BTNE.dtype, torch.float32)
    length, num_groups, width = k_BTGD.shape[1:]
    value_width = v_BTNE.shape[-1]
    if chunk_size is None:
        chunk_size = _CHUNK if width < _WIDE_HEAD else _CHUNK_OF_WIDE_HEADS
    chunk_size = min(chunk_size, length)

    def in_chunks(x_BTNX: Tensor) -> Tensor:
        return _in_chunks(x_BTNX.to(dtype), chunk_size, num_groups)

    q_BGPJCD = in_chunks(_unit(q_BTGD.to(dtype)) * width**-0.5)
    k_BGPJCD = in_chunks(_unit(k_BTGD.to(dtype)))
    v_BGPJCE = in_chunks(v_BTNE)
    beta_BGPJC1 = in_chunks(beta_BTN.unsqueeze(-1))
    # The logarithm of the decay from a chunk's start up to each of its tokens.
    log_BGPJC1 = in_chunks(log_decay_BTN.unsqueeze(-1)).cumsum(-2)
    decay_BGPJC1 = log_BGPJC1.exp()
    last_BGPJ11 = log_BGPJC1[..., -1:, :]

    # Decays between two tokens of a chunk. Masked before the exponential: upwards it overflows.
    later_CC = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=v_BTNE.device).triu(1)
    between_BGPJCC = (log_BGPJC1 - log_BGPJC1.mT).masked_fill(later_CC, -torch.inf).exp()
    # What each token writes: the first E columns as far as it depends on the chunk, the others as
    # factor of the state before it. Each correction takes those of the tokens before into account.
    system_BGPJCC = (k_BGPJCD @ k_BGPJCD.mT) * between_BGPJCC * beta_BGPJC1
    right_BGPJCX = torch.cat(
        (v_BGPJCE * beta_BGPJC1, k_BGPJCD * (beta_BGPJC1 * decay_BGPJC1)), dim=-1
    )
    written_BGPJCX = torch.linalg.solve_triangular(
        system_BGPJCC, right_BGPJCX, upper=False, unitriangular=True
    )
    own_BGPJCE, erased_BGPJCD = written_BGPJCX.split((value_width, width), dim=-1)

    # From the state before a chunk to that after it: one matrix, and one addend.
    to_end_BGPJCD = k_BGPJCD * (last_BGPJ11 - log_BGPJC1).exp()
    added_BGPJDE, removed_BGPJDD = (to_end_BGPJCD.mT @ written_BGPJCX).split(
        (value_width, width), dim=-1
    )
    kept_BGPJDD = torch.diag_embed(last_BGPJ11.exp().squeeze(-1).expand(removed_BGPJDD.shape[:-1]))
    states_BGPJDE = _states(kept_BGPJDD - removed_BGPJDD, added_BGPJDE)

    corrected_BGPJCE = own_BGPJCE - erased_BGPJCD @ states_BGPJDE
    scores_BGPJCC = (q_BGPJCD @ k_BGPJCD.mT) * between_BGPJCC
    out_BGPJCE = (q_BGPJCD * decay_BGPJC1) @ states_BGPJDE + scores_BGPJCC @ corrected_BGPJCE
    out_BTNE = out_BGPJCE.flatten(1, 2).flatten(2, 3).transpose(1, 2)
    return out_BTNE[:, :length].to(v_BTNE.dtype)


def recurrent_gated_delta_rule(
    q_BTGD: Tensor,
    k_BTGD: Tensor,
    v_BTNE: Tensor,
    *,
    log_decay_BTN: Tensor,
    beta_BTN: Tensor,
) -> Tensor:
    """Attend by the gated delta rule token by token: what :func:`gated_delta_rule` must equal.

    Takes and returns the same. Autograd saves the state of every token.
    """
    dtype = torch.promote_types(v_BTNE.dtype, torch.float32)
    heads_per_group = v_BTNE.shape[2] // k_BTGD.shape[2]
    q_BTND, k_BTND = (
        _unit(x_BTGD.to(dtype)).repeat_interleave(heads_per_group, dim=2)
        for x_BTGD in (q_BTGD, k_BTGD)
    )
    q_BTND = q_BTND * k_BTGD.shape[-1] ** -0.5
    state_BNDE = q_BTND.new_zeros(*q_BTND[:, 0].shape, v_BTNE.shape[-1])
    outs_BNE = []
    for t in range(v_BTNE.shape[1]):
        state_BNDE = state_BNDE * log_decay_BTN[:, t, :, None, None].to(dtype).exp()
        k_BND1 = k_BTND[:, t].unsqueeze(-1)
        error_BNE = v_BTNE[:, t].to(dtype) - (state_BNDE * k_BND1).sum(-2)
        correction_BNE = error_BNE * beta_BTN[:, t, :, None].to(dtype)
        state_BNDE = state_BNDE + k_BND1 * correction_BNE.unsqueeze(-2)
        outs_BNE.append((state_BNDE * q_BTND[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outs_BNE, dim=1).to(v_BTNE.dtype)


def _unit(x: Tensor) -> Tensor:
    """Divide the vectors of the last dim by their lengths."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def _in_chunks(x_BTNX: Tensor, chunk_size: int, num_groups: int) -> Tensor:
    """Lay (B, T, N, X) out as (B, G, P, J, C, X), with zeros after the last token.

    A token of zeros neither decays nor writes.
    """
    missing = -x_BTNX.shape[1] % chunk_size
    if missing:
        x_BTNX = F.pad(x_BTNX, (0, 0, 0, 0, 0, missing))
    x_BJCNX = x_BTNX.unflatten(1, (-1, chunk_size))
    return x_BJCNX.movedim(3, 1).contiguous().unflatten(1, (num_groups, -1))


def _states(step_BGPJDD: Tensor, added_BGPJDE: Tensor) -> Tensor:
    """Return the state before each chunk: S_0 = 0, S_(j+1) = step_j S_j + added_j."""
    states_XJDE = _Recurrence.apply(step_BGPJDD.flatten(0, 2), added_BGPJDE.flatten(0, 2))
    return states_XJDE.view(added_BGPJDE.shape)


class _Recurrence(torch.autograd.Function):
    """A linear recurrence of matrices, whose gradient is the same one backwards.

    Autograd through the loop would save and add up slices step by step.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, step_XJDD: Tensor, added_XJDE: Tensor) -> Tensor:
        states_XJDE = torch.empty_like(added_XJDE)
        states_XJDE[:, 0] = 0
        for j in range(states_XJDE.shape[1] - 1):
            _add_product(
                added_XJDE[:, j], step_XJDD[:, j], states_XJDE[:, j], states_XJDE[:, j + 1]
            )
        ctx.save_for_backward(step_XJDD, states_XJDE)
        return states_XJDE

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_XJDE: Tensor) -> tuple[Tensor, Tensor]:
        step_XJDD, states_XJDE = ctx.saved_tensors  # type: ignore[attr-defined]
        # Of the state after each chunk: none reads that after the last.
        after_XJDE = torch.empty_like(states_XJDE)
        after_XJDE[:, -1] = 0
        for j in range(states_XJDE.shape[1] - 1, 0, -1):
            _add_product(
                grad_XJDE[:, j], step_XJDD[:, j].mT, after_XJDE[:, j], after_XJDE[:, j - 1]
            )
        return after_XJDE @ states_XJDE.mT, after_XJDE


def _add_product(a: Tensor, b: Tensor, c: Tensor, out: Tensor) -> None:
    torch.baddbmm(a, b, c, out=out)
