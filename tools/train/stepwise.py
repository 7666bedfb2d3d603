"""The trainer's model one token at a time, for many texts at once: what sampling needs.

Lives beside the trainer's model and shares its blocks; only what mixes tokens is written a second time, as one step
over a kept state (``tests/train`` holds its logits equal to the whole forward's). All texts stand at the same place, so
there is one position and no mask, and a prompt is read by the same steps as an answer is written. A step of few texts
costs a GPU its launches, so thousands cost little more. Knows no tokens' meaning and picks none.

Legend: B texts, S streams, H hidden, N value heads, G key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import torch
from layers import PLE_DILATION, Attention, DeltaNet, Ple
from model import TrainModel
from torch.nn import functional as F

__all__ = ["Stepwise"]


class Stepwise:
    """The state of ``texts`` that all begin now and have at most ``length`` tokens. Call under ``torch.no_grad``."""

    def __init__(self, model: TrainModel, texts: int, length: int) -> None:
        self.model, self.place = model, 0
        c, device = model.c, model.lm_head.weight.device
        low = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.kept: dict[str, torch.Tensor] = {}  # by layer and kind, texts first
        for index in range(c.layers):
            if c.is_attention(index):
                for name in ("keys", "values"):
                    shape = (texts, c.kv_heads, length, c.head_width)
                    self.kept[f"{index} {name}"] = torch.zeros(shape, dtype=low, device=device)
            else:
                wide = (2 * c.delta_key_heads + c.delta_value_heads) * c.delta_width
                self.kept[f"{index} before"] = torch.zeros(texts, c.conv - 1, wide, device=device)
                shape = (texts, c.delta_value_heads, c.delta_width, c.delta_width)
                self.kept[f"{index} state"] = torch.zeros(shape, device=device)
        self.kept["n-grams"] = torch.zeros(texts, (c.conv - 1) * PLE_DILATION, c.streams * c.hidden, device=device)

    def keep(self, texts: torch.Tensor) -> None:
        """Goes on with some of the texts only."""
        self.kept = {name: held.index_select(0, texts) for name, held in self.kept.items()}

    def streams(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """streams_B1SH after the next token, ids_BT[:, place]; earlier columns are what was read before."""
        model, at = self.model, self.place
        cos, sin = model.cos[at : at + 1], model.sin[at : at + 1]
        ids = ids_BT[:, at : at + 1]
        x = F.embedding(ids, model.embed_tokens.weight).unsqueeze(2).repeat(1, 1, model.c.streams, 1)
        for index, layer in enumerate(model.layers):
            if index == 1:
                looked = layer.ple.lookup(ids_BT[:, max(0, at - 2) : at + 1])[:, -1:]
                x = self._ngrams(layer.ple, x, looked)
            u, flat = layer.attn_hyper_connection.read(x)
            if layer.attention:
                y = self._attend(index, layer.self_attn, u, cos, sin)
            else:
                y = self._delta(index, layer.linear_attn, u)
            x = layer.attn_hyper_connection.write(x, flat, y)
            u, flat = layer.mlp_hyper_connection.read(x)
            x = layer.mlp_hyper_connection.write(x, flat, layer.mlp(u)[0])
        self.place += 1
        return x

    def _convolved(self, name: str, now_B1C: torch.Tensor, weight_CW: torch.Tensor, dilation: int) -> torch.Tensor:
        """silu of the causal convolution's last row; the rows it will read again are kept."""
        window = torch.cat((self.kept[name], now_B1C), dim=1)
        self.kept[name] = window[:, 1:]
        return F.silu((window[:, ::dilation] * weight_CW.T).sum(1, keepdim=True))

    def _ngrams(self, ple: Ple, x_B1SH: torch.Tensor, looked: torch.Tensor) -> torch.Tensor:
        gated, normed = ple.gated(x_B1SH, looked)
        spread = self._convolved("n-grams", normed, ple.conv1d.weight.squeeze(1), PLE_DILATION)
        return x_B1SH + gated + spread.view_as(gated)

    def _delta(self, index: int, block: DeltaNet, u_B1H: torch.Tensor) -> torch.Tensor:
        """state = decay * state + k (beta (v - k state))^T, and the row reads it with q."""
        qkv, z, b, a = block.project(u_B1H)
        q, k, v = block.heads(self._convolved(f"{index} before", qkv, block.conv1d.weight.squeeze(1), 1))
        repeats = v.shape[2] // k.shape[2]
        q, k = (x.repeat_interleave(repeats, dim=2).transpose(1, 2) for x in (q, k))  # B x N x 1 x D
        beta, decay = b.float().sigmoid().mT.unsqueeze(-1), block.log_decay(a).exp().mT.unsqueeze(-1)
        state = self.kept[f"{index} state"]
        with torch.autocast(u_B1H.device.type, enabled=False):
            state.mul_(decay)
            change = beta * (v.transpose(1, 2) - k @ state)
            state.flatten(0, 1).baddbmm_(k.flatten(0, 1).mT, change.flatten(0, 1))
            o = (q @ state).transpose(1, 2)
        return block.finish(o, z, u_B1H.dtype)

    def _attend(
        self, index: int, block: Attention, u_B1H: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        q, k, v, gate = block._project(u_B1H, cos, sin)
        keys, values = (self.kept[f"{index} {name}"] for name in ("keys", "values"))
        keys[:, :, self.place], values[:, :, self.place] = k.squeeze(2), v.squeeze(2)
        grouped = q.squeeze(2).unflatten(1, (block.c.kv_heads, -1)).to(keys.dtype)
        read = slice(0, self.place + 1)
        scores = (grouped @ keys[:, :, read].mT).float() * block.c.head_width**-0.5
        o = (scores.softmax(-1).to(values.dtype) @ values[:, :, read]).flatten(1).unsqueeze(1)
        return F.linear(o * gate.sigmoid(), block.o_proj.weight)
