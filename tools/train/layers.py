"""The parts of the trainer's model: streams, mixers, experts and the n-gram block, over whole batches of sequences.

Lives beside model.py, which joins them; parameters are named as in the published checkpoint. The same mathematics as
``strata.layers`` in the form that a GPU trains fastest. It keeps no state and writes none.

Legend: B sequences, T rows, H hidden, S streams, N heads, G key/value heads, D head width, E experts, I expert width,
J index blocks, R sampled rows.
"""

from __future__ import annotations

import math

import torch
from delta import depthwise_causal, gated_delta
from grouped import grouped_experts
from model_config import Config
from torch import nn
from torch.nn import functional as F

PLE_DILATION = 3  # of the n-gram block's convolution

__all__ = ["PLE_DILATION", "Attention", "DeltaNet", "Experts", "HyperConnection", "Indexer", "MixtureOfExperts", "Ple",
           "Shared", "Weight", "rms", "rotate"]  # fmt: skip


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * (1 + weight) in FP32 over the last axis, in the type of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1.0 + weight)).to(x.dtype)


def rotate(x_BTND: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """Rotary on the first 2R of D, in FP32, in the type of x."""
    half = cos_TR.shape[-1]
    first, second, rest = x_BTND.float().split([half, half, x_BTND.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x_BTND.dtype)


def rooted(match: torch.Tensor) -> torch.Tensor:
    """sign(m) sqrt(|m|), |m| no smaller than 1e-6. Its slope has no bound at zero, where rounding decides m's sign, so
    below 0.01 the gradient takes the slope at 0.01."""
    value = match.sign() * match.abs().clamp_min(1e-6).sqrt()
    slope = 0.5 * match.detach().abs().clamp_min(0.01).rsqrt()
    return value.detach() + (match - match.detach()) * slope


class Weight(nn.Module):
    """Holds one parameter called ``weight``, so that names are those of the checkpoint."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))


class HyperConnection(nn.Module):
    def __init__(self, c: Config, inject: bool = True) -> None:
        super().__init__()
        self.c = c
        wide = c.streams * c.hidden
        self.hc_norm = Weight(wide)
        self.input_mix_weight_down = Weight(c.rank, wide)
        self.input_mix_weight_up = Weight(wide, c.rank)
        if inject:
            self.block_inject_weight = Weight(c.streams, wide)

    def read(self, x_BTSH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(u_BTH, the flat normed streams): a block's input."""
        c = self.c
        n = rms(x_BTSH, self.hc_norm.weight.view(c.streams, c.hidden), c.eps)
        flat = n.flatten(2)
        low = F.silu(F.linear(flat, self.input_mix_weight_down.weight) / c.streams)
        mix = F.linear(low, self.input_mix_weight_up.weight).sigmoid().view_as(n)
        return (mix * n).mean(2), flat

    def write(self, x_BTSH: torch.Tensor, flat: torch.Tensor, y_BTH: torch.Tensor) -> torch.Tensor:
        inject = 2.0 * (F.linear(flat, self.block_inject_weight.weight) / self.c.streams).sigmoid()
        return x_BTSH + inject.unsqueeze(-1) * y_BTH.unsqueeze(2)


class DeltaNet(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        keys, values = c.delta_key_heads * c.delta_width, c.delta_value_heads * c.delta_width
        self.in_proj_qkv = Weight(2 * keys + values, c.hidden)
        self.in_proj_z = Weight(values, c.hidden)
        self.in_proj_b = Weight(c.delta_value_heads, c.hidden)
        self.in_proj_a = Weight(c.delta_value_heads, c.hidden)
        self.conv1d = Weight(2 * keys + values, 1, c.conv)
        self.dt_bias = nn.Parameter(torch.empty(c.delta_value_heads))
        self.A_log = nn.Parameter(torch.empty(c.delta_value_heads))
        self.norm = Weight(c.delta_width)
        self.out_proj = Weight(c.hidden, values)

    def forward(self, u_BTH: torch.Tensor) -> torch.Tensor:
        qkv, z, b, a = self.project(u_BTH)
        q, k, v = self.heads(depthwise_causal(qkv, self.conv1d.weight.squeeze(1)))
        with torch.autocast(u_BTH.device.type, enabled=False):
            o = gated_delta(q, k, v, b.float().sigmoid(), self.log_decay(a))
        return self.finish(o, z, u_BTH.dtype)

    def project(self, u_BTH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(q, k and v before their convolution, in FP32; z; b; a)."""
        c = self.c
        keys, values = c.delta_key_heads * c.delta_width, c.delta_value_heads * c.delta_width
        projections = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        mixed = F.linear(u_BTH, torch.cat([p.weight for p in projections]))
        qkv, z, b, a = mixed.split([2 * keys + values, values, c.delta_value_heads, c.delta_value_heads], dim=-1)
        return qkv.float(), z, b, a

    def heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(q, k, v) as B x T x heads x width; q and k of unit length, q scaled."""
        c = self.c
        keys, values = c.delta_key_heads * c.delta_width, c.delta_value_heads * c.delta_width
        q, k, v = (x.unflatten(-1, (-1, c.delta_width)) for x in qkv.split([keys, keys, values], dim=-1))
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * c.delta_width**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        return q, k, v

    def log_decay(self, a: torch.Tensor) -> torch.Tensor:
        return -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)

    def finish(self, o: torch.Tensor, z: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The block's output from its heads' outputs and gates."""
        c = self.c
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + c.eps) * self.norm.weight
        gated = (o * z.float().unflatten(-1, (-1, c.delta_width)).sigmoid()).flatten(2)
        return F.linear(gated.to(dtype), self.out_proj.weight)


class Indexer(nn.Module):
    """Scores of index blocks. It learns from attention mass alone: its input is detached."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.index_qk_proj = Weight((c.index_heads + 1) * c.index_width, c.hidden)
        self.q_layernorm = Weight(c.index_width)
        self.k_layernorm = Weight(c.index_width)

    def scores(
        self, u_BTH: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, picked_R: torch.Tensor
    ) -> torch.Tensor:
        """scores_BRJ of the rows ``picked_R`` against every complete block; FP32, unmasked."""
        c = self.c
        qk = F.linear(u_BTH, self.index_qk_proj.weight).float()
        q, raw = qk.split([c.index_heads * c.index_width, c.index_width], dim=-1)
        q = q.index_select(1, picked_R).unflatten(-1, (c.index_heads, -1))
        q = rotate(rms(q, self.q_layernorm.weight, c.eps), cos_TR[picked_R], sin_TR[picked_R])
        blocks = u_BTH.shape[1] // c.index_block
        pooled = raw[:, : blocks * c.index_block].unflatten(1, (blocks, c.index_block)).mean(2)
        starts = torch.arange(blocks, device=raw.device) * c.index_block
        key = rms(pooled, self.k_layernorm.weight, c.eps).unsqueeze(2)
        key = rotate(key, cos_TR[starts], sin_TR[starts]).squeeze(2)
        each = torch.einsum("brnd,bjd->brnj", q, key).relu()
        return each.sum(2) / math.sqrt(c.index_width)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.q_proj = Weight(c.heads * c.head_width * 2, c.hidden)
        self.k_proj = Weight(c.kv_heads * c.head_width, c.hidden)
        self.v_proj = Weight(c.kv_heads * c.head_width, c.hidden)
        self.o_proj = Weight(c.hidden, c.heads * c.head_width)
        self.q_norm = Weight(c.head_width)
        self.k_norm = Weight(c.head_width)
        self.indexer = Indexer(c)

    def _project(self, u: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = self.c
        q, gate = F.linear(u, self.q_proj.weight).unflatten(-1, (c.heads, 2, c.head_width)).unbind(3)
        k = F.linear(u, self.k_proj.weight).unflatten(-1, (c.kv_heads, c.head_width))
        v = F.linear(u, self.v_proj.weight).unflatten(-1, (c.kv_heads, c.head_width))
        q = rotate(rms(q, self.q_norm.weight, c.eps), cos, sin)
        k = rotate(rms(k, self.k_norm.weight, c.eps), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.flatten(2)

    def forward(
        self, u: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, picked_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(y_BTH, the indexer's loss on the rows ``picked_R``)."""
        q, k, v, gate = self._project(u, cos, sin)
        o = self._attend(q, k, v)
        y = F.linear(o.transpose(1, 2).flatten(2) * gate.sigmoid(), self.o_proj.weight)
        with torch.no_grad():
            mass = self._mass(q.detach(), k.detach(), picked_R)
        return y, self._distil(u.detach(), mass, cos, sin, picked_R)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """o_BNTD; heads are spread first, because that is the form that every attention kernel takes."""
        k, v = (x.repeat_interleave(self.c.heads // self.c.kv_heads, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)

    def _mass(self, q: torch.Tensor, k: torch.Tensor, picked_R: torch.Tensor) -> torch.Tensor:
        """mass_BRJ: attention of the picked rows, averaged over heads, summed by complete block, normalised."""
        c = self.c
        rows = k.shape[2]
        q = q.index_select(2, picked_R).unflatten(1, (c.kv_heads, -1))
        scores = torch.einsum("bgqrd,bgpd->bgqrp", q, k).float() * c.head_width**-0.5
        hidden = torch.arange(rows, device=k.device)[None, :] > picked_R[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).mean((1, 2))
        mass = weights.unflatten(-1, (-1, c.index_block)).sum(-1)
        mass = mass.masked_fill(self._incomplete(rows, picked_R), 0.0)
        return mass / mass.sum(-1, keepdim=True).clamp_min(1e-9)

    def _incomplete(self, rows: int, picked_R: torch.Tensor) -> torch.Tensor:
        blocks = torch.arange(rows // self.c.index_block, device=picked_R.device)
        return blocks[None, :] >= ((picked_R + 1) // self.c.index_block)[:, None]

    def _distil(
        self, u: torch.Tensor, mass: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, picked_R: torch.Tensor
    ) -> torch.Tensor:
        """Divergence of the indexer's softmax from the mass, averaged over rows with a complete block."""
        incomplete = self._incomplete(u.shape[1], picked_R)
        scores = self.indexer.scores(u, cos, sin, picked_R).masked_fill(incomplete, -1e9)
        divergence = (mass * (mass.clamp_min(1e-9).log() - scores.log_softmax(-1))).sum(-1)
        counted = (picked_R + 1 >= self.c.index_block).float()
        return (divergence * counted).sum() / (counted.sum() * u.shape[0])

    @torch.no_grad()
    def sparse(self, u: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """y_BTH attending the selected blocks only, as a decode does past the budget. Ties: lowest block."""
        c = self.c
        rows = torch.arange(u.shape[1], device=u.device)
        scores = self.indexer.scores(u, cos, sin, rows).masked_fill(self._incomplete(u.shape[1], rows), float("-inf"))
        count = min(c.index_budget // c.index_block, scores.shape[-1])
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
        chosen &= ~self._incomplete(u.shape[1], rows)
        seen = chosen.repeat_interleave(c.index_block, dim=-1)
        seen = F.pad(seen, (0, u.shape[1] - seen.shape[-1]))
        tail = (rows + 1) // c.index_block * c.index_block
        causal = rows[None, :] <= rows[:, None]
        seen = (seen | (rows[None, :] >= tail[:, None])) & causal
        q, k, v, gate = self._project(u, cos, sin)
        o = self._attend(q, k, v, seen.unsqueeze(1))
        return F.linear(o.transpose(1, 2).flatten(2) * gate.sigmoid(), self.o_proj.weight)


class Experts(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(c.experts, 2 * c.expert_width, c.hidden))
        self.down_proj = nn.Parameter(torch.empty(c.experts, c.hidden, c.expert_width))


class Shared(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = Weight(c.shared_width, c.hidden)
        self.up_proj = Weight(c.shared_width, c.hidden)
        self.down_proj = Weight(c.hidden, c.shared_width)


class MixtureOfExperts(nn.Module):
    """Experts as products over rows sorted by expert (``grouped``), or all of them as two wide products with the
    unpicked ones weighted zero. The wide form is exact in FP32 and the reference of the grouped one, which takes a
    third of its time on a GPU (probe.py measures both)."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.gate = Weight(c.experts, c.hidden)
        self.experts = Experts(c)
        self.shared_expert = Shared(c)
        self.shared_expert_gate = Weight(1, c.hidden)
        self.grouped = False

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(weights_BTE with zeros where not picked, picked_BTK, the balance loss, picks of each expert as shares)."""
        with torch.autocast(x.device.type, enabled=False):
            probabilities = F.linear(x.float(), self.gate.weight).softmax(-1)
        picked = probabilities.detach().topk(self.c.top_k, dim=-1).indices
        mask = torch.zeros_like(probabilities).scatter(-1, picked, 1.0)
        weights = probabilities * mask
        weights = weights / weights.sum(-1, keepdim=True)
        share = mask.mean((0, 1)) / self.c.top_k
        balance = self.c.experts * (share * probabilities.mean((0, 1))).sum()
        return weights, picked, balance, share

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, picked, balance, share = self.route(x)
        e = self.experts
        if self.grouped:
            chosen = weights.gather(-1, picked).flatten(0, 1)
            low = (t.bfloat16() for t in (e.gate_up_proj, e.down_proj))
            y = grouped_experts(x.bfloat16().flatten(0, 1), picked.flatten(0, 1), chosen, *low).view_as(x)
        else:
            y = self._wide(x, weights)
        s = self.shared_expert
        inner = F.silu(F.linear(x, s.gate_proj.weight)) * F.linear(x, s.up_proj.weight)
        shared = F.linear(x, self.shared_expert_gate.weight).sigmoid() * F.linear(inner, s.down_proj.weight)
        return y + shared, balance, share

    def _wide(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate_up = F.linear(x, self.experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (self.c.experts, 2, -1))
        gate, up = gate_up.unbind(-2)
        inner = F.silu(gate) * up * weights.to(gate.dtype).unsqueeze(-1)
        return F.linear(inner.flatten(-2), self.experts.down_proj.permute(1, 0, 2).flatten(1))


class Ple(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        wide = c.streams * c.hidden
        rows = c.ngram_hash.table_rows(128)
        self.ple_embedding = nn.Module()
        self.ple_embedding.ngram_embedding = Weight(rows, c.ple_width // c.ngram_hash.all_heads)
        self.key_proj = Weight(wide, c.ple_width)
        self.value_proj = Weight(c.hidden, c.ple_width)
        self.norm_key = Weight(wide)
        self.norm_query = Weight(wide)
        self.norm_conv = Weight(wide)
        self.conv1d = Weight(wide, 1, c.conv)

    def lookup(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """The table rows of each token side by side; every window starts as if after an end token."""
        h = self.c.ngram_hash
        eos = h.boundary
        padded = F.pad(ids_BT, (2, 0), value=eos)
        now, one, two = padded[:, 2:], padded[:, 1:-1], padded[:, :-2]
        two = torch.where(one == eos, eos, two)
        factors = h.multipliers
        pair = (now * factors[0]) ^ (one * factors[1])
        triple = pair ^ (two * factors[2])
        sizes = torch.tensor(h.sizes, device=ids_BT.device)
        offsets = torch.tensor(h.offsets, device=ids_BT.device)
        mixed = torch.stack((pair, triple), dim=-1).repeat_interleave(h.heads, dim=-1)
        return F.embedding(torch.remainder(mixed, sizes) + offsets, self.ple_embedding.ngram_embedding.weight).flatten(
            2
        )

    def forward(self, x_BTSH: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        gated, normed = self.gated(x_BTSH, embedded)
        spread = depthwise_causal(normed, self.conv1d.weight.squeeze(1), dilation=PLE_DILATION)
        return x_BTSH + gated + spread.unflatten(-1, (self.c.streams, self.c.hidden))

    def gated(self, x_BTSH: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(gated_BTSH, its normed form, flat: what the convolution reads)."""
        c = self.c
        shape = (c.streams, c.hidden)
        key = F.linear(embedded, self.key_proj.weight).float().unflatten(-1, shape)
        key = rms(key, self.norm_key.weight.view(shape), c.eps)
        value = F.linear(embedded, self.value_proj.weight).float()
        query = rms(x_BTSH.float(), self.norm_query.weight.view(shape), c.eps)
        match = (key * query).sum(-1, keepdim=True) / math.sqrt(c.hidden)
        gated = rooted(match).sigmoid() * value.unsqueeze(2)
        return gated, rms(gated, self.norm_conv.weight.view(shape), c.eps).flatten(2)
