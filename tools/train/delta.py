"""The gated delta rule for training: every chunk of every sequence at once, no loop over tokens.

Lives beside the trainer because its two primitives exist for speed on a GPU: the inverse of a unit lower triangular
matrix by doubling (ten batched products of 64 x 64 instead of a triangular solve), and the recurrence over chunk
states as one in-place batched product a chunk, forward and backward. The mathematics is that of
``strata.kernels.reference.delta`` (a test holds the two equal). Knows no model.

Legend: M chunks, N sequences times value heads, L rows of a chunk, D key width, V value width.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

__all__ = ["CHUNK", "chunk_states", "gated_delta", "unit_lower_inverse"]

CHUNK = 64


def _level_mask(size: int, block: int, device: torch.device) -> torch.Tensor:
    """Ones where a lower block of width ``block`` meets the diagonal block left of it, inside blocks twice as wide."""
    i = torch.arange(size, device=device)
    row, col = i[:, None], i[None, :]
    return ((row // (2 * block) == col // (2 * block)) & (row // block > col // block)).to(torch.float32)


@torch.library.custom_op("strata_train::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(a: torch.Tensor) -> torch.Tensor:
    """(I + a)^-1 for strictly lower triangular ``a`` (... x L x L, FP32, L a power of two).

    The inverse of [[P, 0], [C, Q]] is [[P', 0], [-Q' C P', Q']]: with X the inverse of the diagonal blocks, the
    inverse of blocks twice as wide is X - X (C) X, as stable as substitution because no power of ``a`` is formed.
    """
    size, a = a.shape[-1], a.contiguous()
    x = torch.eye(size, device=a.device) - a * _level_mask(size, 1, a.device)
    block = 2
    while block < size:
        x = x - x @ (a * _level_mask(size, block, a.device)) @ x
        block *= 2
    return x


@unit_lower_inverse.register_fake
def _(a: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def _inverse_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output)


def _inverse_backward(ctx, grad):  # type: ignore[no-untyped-def]
    (x,) = ctx.saved_tensors
    return -(x.mT @ grad @ x.mT).tril(-1)


unit_lower_inverse.register_autograd(_inverse_backward, setup_context=_inverse_setup)


@torch.library.custom_op("strata_train::chunk_states", mutates_args=())
def chunk_states(m: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """s_MNDV, the state before each chunk: s[0] = 0, s[c+1] = m[c] s[c] + u[c]. FP32."""
    m, u = m.contiguous(), u.contiguous()
    states = torch.empty_like(u)
    states[0].zero_()
    for c in range(u.shape[0] - 1):
        torch.baddbmm(u[c], m[c], states[c], out=states[c + 1])
    return states


@chunk_states.register_fake
def _(m: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(u, memory_format=torch.contiguous_format)


@torch.library.custom_op("strata_train::chunk_states_backward", mutates_args=())
def chunk_states_backward(m: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """t[c], the gradient that reaches the state before chunk c: t[c] = grad[c] + m[c]^T t[c+1]."""
    m, grad = m.contiguous(), grad.contiguous()
    total = torch.empty_like(grad)
    total[-1].copy_(grad[-1])
    for c in range(grad.shape[0] - 2, -1, -1):
        torch.baddbmm(grad[c], m[c].mT, total[c + 1], out=total[c])
    return total


@chunk_states_backward.register_fake
def _(m: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def _states_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[0], output)


def _states_backward(ctx, grad):  # type: ignore[no-untyped-def]
    m, states = ctx.saved_tensors
    after = torch.cat((chunk_states_backward(m, grad)[1:], torch.zeros_like(grad[:1])))
    return after @ states.mT, after


chunk_states.register_autograd(_states_backward, setup_context=_states_setup)


def gated_delta(
    q_BTGD: torch.Tensor, k_BTGD: torch.Tensor, v_BTNV: torch.Tensor, beta_BTN: torch.Tensor, g_BTN: torch.Tensor
) -> torch.Tensor:
    """o_BTNV of sequences that start with an empty state. T is a multiple of ``CHUNK``; all FP32.

    q and k are of unit length, q already scaled. Each key head serves N / G consecutive value heads.
    """
    batch, rows, heads, width = v_BTNV.shape
    repeats = heads // k_BTGD.shape[2]

    def chunks(x: torch.Tensor) -> torch.Tensor:  # M x (B*N) x L x D
        return x.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4).flatten(1, 2)

    q, k = (chunks(x.repeat_interleave(repeats, dim=2)) for x in (q_BTGD, k_BTGD))
    v, beta, g = chunks(v_BTNV), chunks(beta_BTN.unsqueeze(-1)), chunks(g_BTN.unsqueeze(-1)).squeeze(-1)
    index = torch.arange(CHUNK, device=v.device)
    seen_mask = index[:, None] >= index[None, :]
    # A masked sum, not a scan: both ways it is a plain reduction, and a wrong decay would hide behind the output norm.
    decay = (g.unsqueeze(-2) * seen_mask).sum(-1)
    between = torch.where(seen_mask, decay[..., :, None] - decay[..., None, :], float("-inf")).exp()
    strict = (index[:, None] > index[None, :]).to(v.dtype)
    inverse = unit_lower_inverse((beta * k) @ k.mT * between * strict)
    seen = decay.exp().unsqueeze(-1)
    own, through = inverse @ (beta * v), inverse @ (beta * seen * k)
    left_k = k * (decay[..., -1:] - decay).exp().unsqueeze(-1)
    eye = torch.eye(k.shape[-1], device=v.device)
    m = decay[..., -1].exp()[..., None, None] * eye - left_k.mT @ through
    states = chunk_states(m, left_k.mT @ own)
    change = own - through @ states
    out = (q * seen) @ states + (q @ k.mT * between) @ change
    return out.unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4).reshape(batch, rows, heads, width)


def depthwise_causal(x_BTC: torch.Tensor, weight_CW: torch.Tensor, dilation: int = 1) -> torch.Tensor:
    """silu of a depthwise causal convolution, as shifted products that fuse; the last tap is the row itself."""
    taps = weight_CW.shape[1]
    padded = F.pad(x_BTC, (0, 0, (taps - 1) * dilation, 0))
    rows = x_BTC.shape[1]
    total = sum(padded[:, w * dilation : w * dilation + rows] * weight_CW[:, w] for w in range(taps))
    return F.silu(total)
