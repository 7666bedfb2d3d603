"""The gated delta rule in torch: row by row, and in chunks (WY form) for prompts and training.

Lives in ``kernels/reference`` as the plain meaning of ``Ops.gated_delta``. Both forms take a leading batch axis and
are differentiable; neither keeps state. They must not know caches or models.

Legend: B sequences, T rows, G key heads, N value heads, D key width, V value width, M chunks, L rows of a chunk.
Source of the chunked form: Yang et al., "Gated Delta Networks" (2024), equations for the UT transform.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["chunked_delta", "recurrent_delta"]

CHUNK = 64  # rows solved together; 32 and 128 are slower at head width 128 on the machines tried


def _per_value_head(x_BTGD: torch.Tensor, value_heads: int) -> torch.Tensor:
    """B x N x T x D: each key head serves N / G consecutive value heads."""
    repeats = value_heads // x_BTGD.shape[2]
    return x_BTGD.repeat_interleave(repeats, dim=2).transpose(1, 2)


def recurrent_delta(
    q_BTGD: torch.Tensor | None,
    k_BTGD: torch.Tensor,
    v_BTNV: torch.Tensor,
    beta_BTN: torch.Tensor,
    g_BTN: torch.Tensor,
    state_BNDV: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(o_BTNV or None without queries, the state after the rows). The given state is not changed."""
    heads = v_BTNV.shape[2]
    k_BNTD = _per_value_head(k_BTGD, heads)
    q_BNTD = None if q_BTGD is None else _per_value_head(q_BTGD, heads)
    state = state_BNDV
    outputs = []
    for t in range(v_BTNV.shape[1]):
        k = k_BNTD[:, :, t]
        state = state * g_BTN[:, t].exp()[..., None, None]
        known = torch.einsum("bnd,bndv->bnv", k, state)
        change = (v_BTNV[:, t] - known) * beta_BTN[:, t, :, None]
        state = state + k[..., :, None] * change[..., None, :]
        if q_BNTD is not None:
            outputs.append(torch.einsum("bnd,bndv->bnv", q_BNTD[:, :, t], state))
    return (torch.stack(outputs, dim=1) if q_BTGD is not None else None), state


def chunked_delta(
    q_BTGD: torch.Tensor,
    k_BTGD: torch.Tensor,
    v_BTNV: torch.Tensor,
    beta_BTN: torch.Tensor,
    g_BTN: torch.Tensor,
    state_BNDV: torch.Tensor,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o_BTNV, the state after the rows), equal to ``recurrent_delta`` up to rounding.

    Within a chunk the updates d_i satisfy (I + A) d = beta * (v - exp(l) * k S0) with A strictly lower triangular,
    A_ij = beta_i exp(l_i - l_j) k_i.k_j and l the running sum of g; one triangular solve replaces the row loop.
    Rows that fill up the last chunk have k = v = beta = 0 and g = 0, so they change nothing.
    """
    rows, heads = v_BTNV.shape[1], v_BTNV.shape[2]
    fill = -rows % chunk

    def chunks(x_BNTX: torch.Tensor) -> torch.Tensor:
        return torch.unflatten(functional.pad(x_BNTX, (0, 0, 0, fill)), 2, (-1, chunk))

    q = chunks(_per_value_head(q_BTGD, heads))
    k = chunks(_per_value_head(k_BTGD, heads))
    v = chunks(v_BTNV.transpose(1, 2))
    beta = chunks(beta_BTN.transpose(1, 2).unsqueeze(-1))
    decay = chunks(g_BTN.transpose(1, 2).unsqueeze(-1)).squeeze(-1).cumsum(-1)  # B N M L

    above = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(above, float("-inf")).exp()
    system = (beta * k) @ k.transpose(-1, -2) * between
    seen = decay.exp().unsqueeze(-1)
    solved = torch.linalg.solve_triangular(
        system, torch.cat((beta * v, beta * seen * k), dim=-1), upper=False, unitriangular=True
    )
    own, through = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    within = q @ k.transpose(-1, -2) * between
    left = (decay[..., -1:] - decay).exp().unsqueeze(-1)

    state = state_BNDV
    outputs = []
    for m in range(v.shape[2]):
        change = own[:, :, m] - through[:, :, m] @ state
        outputs.append((q[:, :, m] * seen[:, :, m]) @ state + within[:, :, m] @ change)
        kept = state * decay[:, :, m, -1].exp()[..., None, None]
        state = kept + (k[:, :, m] * left[:, :, m]).transpose(-1, -2) @ change
    out_BNTV = torch.cat(outputs, dim=2)[:, :, :rows]
    return out_BNTV.transpose(1, 2), state
