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
    to_end_BGPJCD = k_BGPJCD * (last_BGPJ11 - log_BGPJC1).exp()
    corrected_BGPJCE, states_BGPJDE = _pass_chunks(
        own_BGPJCE, erased_BGPJCD, to_end_BGPJCD, last_BGPJ11.exp()
    )
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


def _pass_chunks(
    own_BGPJCE: Tensor, erased_BGPJCD: Tensor, to_end_BGPJCD: Tensor, kept_BGPJ11: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what the tokens of each chunk write, and the state before each chunk."""
    flat = (x.flatten(0, 2) for x in (own_BGPJCE, erased_BGPJCD, to_end_BGPJCD, kept_BGPJ11))
    written_XJCE, states_XJDE = _Recurrence.apply(*flat)
    lead = own_BGPJCE.shape[:3]
    return written_XJCE.unflatten(0, lead), states_XJDE.unflatten(0, lead)


class _Recurrence(torch.autograd.Function):
    """The states between chunks, from S_0 = 0, whose gradients are such a recurrence backwards.

        written_j = own_j - erased_j S_j
        S_(j+1)   = kept_j S_j + to_end_j^T written_j

    Autograd through the loop would save, and add up, slices step by step.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        own_XJCE: Tensor,
        erased_XJCD: Tensor,
        to_end_XJCD: Tensor,
        kept_XJ11: Tensor,
    ) -> tuple[Tensor, Tensor]:
        num_rows, num_chunks, _, value_width = own_XJCE.shape
        states_XJDE = own_XJCE.new_empty(num_rows, num_chunks, erased_XJCD.shape[-1], value_width)
        written_XJCE = torch.empty_like(own_XJCE)
        states_XJDE[:, 0] = 0
        for j in range(num_chunks):
            state_XDE = states_XJDE[:, j]
            written_XCE = torch.baddbmm(own_XJCE[:, j], erased_XJCD[:, j], state_XDE, alpha=-1)
            written_XJCE[:, j] = written_XCE
            if j + 1 < num_chunks:
                states_XJDE[:, j + 1] = torch.baddbmm(
                    state_XDE * kept_XJ11[:, j], to_end_XJCD[:, j].mT, written_XCE
                )
        ctx.save_for_backward(erased_XJCD, to_end_XJCD, kept_XJ11, written_XJCE, states_XJDE)
        return written_XJCE, states_XJDE

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, written_grad_XJCE: Tensor, state_grad_XJDE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        erased_XJCD, to_end_XJCD, kept_XJ11, written_XJCE, states_XJDE = ctx.saved_tensors  # type: ignore[attr-defined]
        own_grad_XJCE = torch.empty_like(written_grad_XJCE)
        # Of the state after each chunk; no token reads that after the last.
        after_XJDE = torch.empty_like(states_XJDE)
        after_XDE = torch.zeros_like(states_XJDE[:, 0])
        for j in reversed(range(states_XJDE.shape[1])):
            after_XJDE[:, j] = after_XDE
            own_grad_XCE = torch.baddbmm(written_grad_XJCE[:, j], to_end_XJCD[:, j], after_XDE)
            own_grad_XJCE[:, j] = own_grad_XCE
            after_XDE = torch.baddbmm(
                torch.addcmul(state_grad_XJDE[:, j], after_XDE, kept_XJ11[:, j]),
                erased_XJCD[:, j].mT,
                own_grad_XCE,
                alpha=-1,
            )
        return (
            own_grad_XJCE,
            -own_grad_XJCE @ states_XJDE.mT,
            written_XJCE @ after_XJDE.mT,
            (after_XJDE * states_XJDE).sum((-2, -1), keepdim=True),
        )
