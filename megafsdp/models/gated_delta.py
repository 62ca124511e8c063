"""The gated delta rule: the recurrence that defines it, and its form by chunks of the sequence.

A head has a state S of D x E, which each token decays, corrects along its key, and reads:

    S <- exp(log_decay) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q

Queries and keys are L2-normalised here, and queries scaled by 1 / sqrt(D). All is computed in fp32
at least. The recurrence has T steps, each of which reads and writes the state. By chunks of C
tokens, the corrections of a chunk solve one triangular system, and only the states between chunks
are in sequence. Both forms give the same numbers up to rounding, except after very strong decays:
chunks take decays from differences of summed logarithms, so a log decay of -L gives later decays
in its chunk a relative error of about 1e-7 L (a percent at -1e5), and -inf makes them NaN. On CUDA
the kernel of flash-linear-attention runs if it is installed.

Shape suffixes: B batch, T sequence, G key heads, N value heads, P value heads of one key head,
D width of a key head, E of a value head; J chunks, C tokens of a chunk. Chunks are the first dim,
so that the heads of one chunk are one batch of matrices. 1 in place of P marks tensors that the
value heads of a key head share.

Source: Yang et al., Gated Delta Networks (arXiv:2412.06464), section 3; Yang et al., Parallelizing
Linear Transformers with the Delta Rule over Sequence Length (arXiv:2406.06484), section 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megafsdp.device.autograd import check_no_second_backward
from megafsdp.models.linear_attention_kernels import rule_kernel_for

# Tokens of a chunk, the fastest of 16, 32 and 64 on a CPU. From _WIDE_HEAD on longer chunks are
# faster, since states between chunks cost more than products of a chunk's tokens.
_CHUNK = 16
_WIDE_HEAD, _CHUNK_OF_WIDE_HEADS = 64, 32
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
        log_decay_BTN: Logarithm of each token's decay of the state, at most 0.
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
    """Attend by the gated delta rule, in chunks of the sequence; differentiable once.

    Args:
        q_BTGD: As for :func:`gated_delta_rule`; so are the other inputs.
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
    if chunk_size is None:
        chunk_size = _CHUNK if width < _WIDE_HEAD else _CHUNK_OF_WIDE_HEADS
    chunk_size = min(chunk_size, length)

    def in_chunks(x_BTNX: Tensor) -> Tensor:
        return _in_chunks(x_BTNX.to(dtype), chunk_size, num_groups)

    q_JBG1CD = _Unit.apply(in_chunks(q_BTGD), width**-0.5)
    k_JBG1CD = _Unit.apply(in_chunks(k_BTGD), 1.0)
    v_JBGPCE = in_chunks(v_BTNE)
    beta_JBGPC1 = in_chunks(beta_BTN.unsqueeze(-1))
    # The logarithm of the decay from a chunk's start up to each of its tokens.
    log_JBGPC1 = in_chunks(log_decay_BTN.unsqueeze(-1)).cumsum(-2)
    decay_JBGPC1 = log_JBGPC1.exp()
    last_JBGP11 = log_JBGPC1[..., -1:, :]

    # Decays between two tokens of a chunk. Masked before the exponential, as the upper half would
    # overflow.
    later_CC = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=v_BTNE.device).triu(1)
    between_JBGPCC = (log_JBGPC1 - log_JBGPC1.mT).masked_fill(later_CC, -torch.inf).exp()
    # Each correction takes into account those of earlier tokens in the chunk: row i of the inverse
    # combines what tokens up to i would write by themselves into what token i writes.
    system_JBGPCC = (k_JBG1CD @ k_JBG1CD.mT) * between_JBGPCC * beta_JBGPC1
    identity_CC = torch.eye(chunk_size, dtype=dtype, device=v_BTNE.device)
    writes_JBGPCC = beta_JBGPC1.mT * torch.linalg.solve_triangular(
        system_JBGPCC, identity_CC.expand_as(system_JBGPCC), upper=False, unitriangular=True
    )
    # One product for all value heads of a key head, which share its keys.
    erased_JBGPCD = _stacked_product(writes_JBGPCC * -decay_JBGPC1.mT, k_JBG1CD)
    written_JBGPCE, states_JBGPDE = _Recurrence.apply(
        writes_JBGPCC @ v_JBGPCE,
        erased_JBGPCD,
        k_JBG1CD * (last_JBGP11 - log_JBGPC1).exp(),
        last_JBGP11.exp(),
    )
    scores_JBGPCC = (q_JBG1CD @ k_JBG1CD.mT) * between_JBGPCC
    out_JBGPCE = (q_JBG1CD * decay_JBGPC1) @ states_JBGPDE + scores_JBGPCC @ written_JBGPCE
    out_BTNE = out_JBGPCE.flatten(2, 3).permute(1, 0, 3, 2, 4).flatten(1, 2)
    return out_BTNE[:, :length].to(v_BTNE.dtype)


def recurrent_gated_delta_rule(
    q_BTGD: Tensor,
    k_BTGD: Tensor,
    v_BTNE: Tensor,
    *,
    log_decay_BTN: Tensor,
    beta_BTN: Tensor,
) -> Tensor:
    """Attend by the gated delta rule token by token; :func:`gated_delta_rule` must equal this.

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
    """Rearrange (B, T, N, X) as (J, B, G, P, C, X), with zeros after the last token.

    A token of zeros neither decays nor writes.
    """
    missing = -x_BTNX.shape[1] % chunk_size
    if missing:
        x_BTNX = F.pad(x_BTNX, (0, 0, 0, 0, 0, missing))
    x_BJCNX = x_BTNX.unflatten(1, (-1, chunk_size))
    return x_BJCNX.permute(1, 0, 3, 2, 4).contiguous().unflatten(2, (num_groups, -1))


def _stacked_product(a_JBGPCC: Tensor, b_JBG1CD: Tensor) -> Tensor:
    """Multiply the matrices of a key head's value heads, stacked as one, by the key head's."""
    rows_JBGXD = a_JBGPCC.flatten(3, 4) @ b_JBG1CD.squeeze(3)
    return rows_JBGXD.unflatten(3, a_JBGPCC.shape[3:5])


class _Unit(torch.autograd.Function):
    """Vectors of the last dim over their lengths, times a factor."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, factor: float) -> Tensor:
        inverse = torch.rsqrt(_dot(x, x) + _NORM_EPS)
        unit = x * (inverse * factor)
        ctx.save_for_backward(unit, inverse)
        ctx.factor = factor  # type: ignore[attr-defined]
        return unit

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        _check_once()
        unit, inverse = ctx.saved_tensors  # type: ignore[attr-defined]
        factor: float = ctx.factor  # type: ignore[attr-defined]
        # The gradient without its component along the vector.
        along = _dot(grad, unit) * (inverse / factor)
        return torch.addcmul(grad * (inverse * factor), unit, along, value=-1), None


def _check_once() -> None:
    check_no_second_backward(
        where="backward of the gated delta rule by chunks",
        hint="Use recurrent_gated_delta_rule(), which is differentiable any number of times",
    )


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products of the vectors of the last dim, which stays, of size 1."""
    return (a.unsqueeze(-2) @ b.unsqueeze(-1)).squeeze(-1)


class _Recurrence(torch.autograd.Function):
    """The states between chunks, from S_0 = 0; their gradients are a like recurrence backwards.

        written_j = own_j + erased_j S_j
        S_(j+1)   = kept_j S_j + to_end_j^T written_j

    Autograd through the loop would save, and add up, slices step by step.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        own_JBGPCE: Tensor,
        erased_JBGPCD: Tensor,
        to_end_JBGPCD: Tensor,
        kept_JBGP11: Tensor,
    ) -> tuple[Tensor, Tensor]:
        written_JBGPCE = own_JBGPCE.clone()
        states_JBGPDE = own_JBGPCE.new_empty(
            *own_JBGPCE.shape[:4], erased_JBGPCD.shape[-1], own_JBGPCE.shape[-1]
        )
        states_JBGPDE[0] = 0
        erased, to_end, kept, written, states = (
            x.flatten(1, 3)
            for x in (erased_JBGPCD, to_end_JBGPCD, kept_JBGP11, written_JBGPCE, states_JBGPDE)
        )
        for j in range(1, len(states)):
            torch.mul(states[j - 1], kept[j - 1], out=states[j])
            states[j].baddbmm_(to_end[j - 1].mT, written[j - 1])
            written[j].baddbmm_(erased[j], states[j])
        ctx.save_for_backward(
            erased_JBGPCD, to_end_JBGPCD, kept_JBGP11, written_JBGPCE, states_JBGPDE
        )
        return written_JBGPCE, states_JBGPDE

    @staticmethod
    def backward(
        ctx: FunctionCtx, written_grad_JBGPCE: Tensor, state_grad_JBGPDE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _check_once()
        saved = ctx.saved_tensors  # type: ignore[attr-defined]
        erased, to_end, kept, written, states = (x.flatten(1, 3) for x in saved)
        own_grad = written_grad_JBGPCE.flatten(1, 3).clone()
        state_grad = state_grad_JBGPDE.flatten(1, 3)
        # The gradient of the state after each chunk; no token reads the last state.
        after_grad = torch.empty_like(states)
        after_grad[-1] = 0
        for j in range(len(states) - 1, 0, -1):
            torch.addcmul(state_grad[j], after_grad[j], kept[j], out=after_grad[j - 1])
            after_grad[j - 1].baddbmm_(erased[j].mT, own_grad[j])
            own_grad[j - 1].baddbmm_(to_end[j - 1], after_grad[j - 1])
        erased_grad = own_grad @ states.mT
        to_end_grad = written @ after_grad.mT
        kept_grad = _dot(after_grad.flatten(2), states.flatten(2)).unsqueeze(-1)
        grads = (own_grad, erased_grad, to_end_grad, kept_grad)
        own, erased_, to_end_, kept_ = (x.unflatten(1, saved[0].shape[1:4]) for x in grads)
        return own, erased_, to_end_, kept_
