"""The trainer's model: qwen4_exp over whole batches of sequences, parameters named as in the published checkpoint.

Lives beside the trainer, not in the package: it is the same mathematics as ``strata.models`` in the form that a GPU
trains fastest (B x T rows at once, chunked delta net, all experts as two wide products, fused by torch.compile), and
``tests/train`` holds its logits equal to the package's model on the same weights. It keeps no state and writes none.

Legend: B sequences, T rows, H hidden, S streams, N heads, G key/value heads, D head width, E experts, I expert width,
V vocabulary, J index blocks, R sampled rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from layers import Attention, DeltaNet, HyperConnection, MixtureOfExperts, Ple, Weight, rms
from model_config import Config
from torch import nn
from torch.nn import functional as F

BALANCE_WEIGHT = 0.01  # of each layer

__all__ = ["Config", "Outputs", "TrainModel"]


class Layer(nn.Module):
    """One block: a mixer and a mixture of experts, each read from and written to the streams."""

    def __init__(self, c: Config, attention: bool) -> None:
        super().__init__()
        self.c = c
        self.attention = attention
        if attention:
            self.self_attn = Attention(c)
        else:
            self.linear_attn = DeltaNet(c)
        self.mlp = MixtureOfExperts(c)
        self.attn_hyper_connection = HyperConnection(c)
        self.mlp_hyper_connection = HyperConnection(c)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        picked_R: torch.Tensor,
        sparse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(streams, balance loss, indexer loss, shares of picks)."""
        u, flat = self.attn_hyper_connection.read(x)
        distil = x.new_zeros(())
        if not self.attention:
            y = self.linear_attn(u)
        elif sparse:
            y = self.self_attn.sparse(u, cos, sin)
        else:
            y, distil = self.self_attn(u, cos, sin, picked_R)
        x = self.attn_hyper_connection.write(x, flat, y)
        u, flat = self.mlp_hyper_connection.read(x)
        y, balance, share = self.mlp(u)
        return self.mlp_hyper_connection.write(x, flat, y), balance, distil, share


class Mtp(nn.Module):
    """The draft block: streams of row t and the embedding of token t + 1 give token t + 2."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.pre_fc_norm_embedding = Weight(c.hidden)
        self.pre_fc_norm_hidden = Weight(c.hidden)
        self.fc = Weight(c.hidden, 2 * c.hidden)
        self.layers = nn.ModuleList([Layer(c, attention=True)])
        self.hyper_connection_mixer = HyperConnection(c, inject=False)

    def combine(self, x_BTSH: torch.Tensor, next_BTH: torch.Tensor) -> torch.Tensor:
        embedding, hidden = self.fc.weight.split(self.c.hidden, dim=1)
        told = F.linear(rms(next_BTH, self.pre_fc_norm_embedding.weight, self.c.eps), embedding)
        kept = F.linear(rms(x_BTSH, self.pre_fc_norm_hidden.weight, self.c.eps), hidden)
        return (kept + told.unsqueeze(2)).float()


@dataclass
class Outputs:
    """Losses are scalars (nats); ``shares_LE`` says how often each expert of each layer was picked."""

    loss: torch.Tensor
    main: torch.Tensor
    draft: torch.Tensor
    balance: torch.Tensor
    distil: torch.Tensor
    shares_LE: torch.Tensor


class TrainModel(nn.Module):
    """``forward`` gives losses on windows of T + 2 tokens; ``hidden`` and ``logits`` serve evaluation."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embed_tokens = Weight(c.vocabulary, c.hidden)
        self.layers = nn.ModuleList(Layer(c, c.is_attention(i)) for i in range(c.layers))
        self.layers[1].ple = Ple(c)
        self.hyper_connection_mixer = HyperConnection(c, inject=False)
        self.lm_head = Weight(c.vocabulary, c.hidden)
        self.mtp = Mtp(c)
        rotary = int(c.head_width * c.rotary)
        angle = torch.arange(c.context).double()[:, None] * c.theta ** -(torch.arange(0, rotary, 2).double() / rotary)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fresh weights from a CPU generator: the same on every device."""
        generator = torch.Generator().manual_seed(seed)

        def normal(p: torch.Tensor, std: float) -> None:
            p.copy_(torch.empty(p.shape).normal_(0.0, std, generator=generator))

        def uniform(p: torch.Tensor, low: float, high: float) -> torch.Tensor:
            return torch.empty(p.shape).uniform_(low, high, generator=generator)

        for name, p in self.named_parameters():
            if name.endswith("linear_attn.norm.weight"):
                p.fill_(1.0)
            elif name.endswith(("A_log",)):
                p.copy_(uniform(p, 1.0, 16.0).log())
            elif name.endswith("dt_bias"):
                step = uniform(p, math.log(1e-3), math.log(0.1)).exp()
                p.copy_(step + torch.log(-torch.expm1(-step)))
            elif "norm" in name.rsplit(".", 2)[-2] or name.endswith("ple.conv1d.weight"):
                p.zero_()
            elif name.endswith("conv1d.weight"):
                p.copy_(uniform(p, -0.5, 0.5))
            elif name in ("embed_tokens.weight",):
                normal(p, 0.3)
            elif name.endswith(
                ("lm_head.weight", "ngram_embedding.weight", "gate.weight", "block_inject_weight.weight")
            ):
                normal(p, 0.02)
            else:
                normal(p, 0.5 * p.shape[-1] ** -0.5)

    def compile_blocks(self) -> None:
        """Compiles each kind of block once (parameters are inputs, so equal blocks share their code)."""
        torch._dynamo.config.cache_size_limit = 64
        for block in [*self.layers, *self.mtp.layers, self.layers[1].ple]:
            block.compile(dynamic=False)
        self.cross_entropy = torch.compile(self.cross_entropy, dynamic=False)  # type: ignore[method-assign]

    def group_experts(self, grouped: bool) -> None:
        for layer in [*self.layers, *self.mtp.layers]:
            layer.mlp.grouped = grouped

    def leave_uncompiled(self, kind: str) -> None:
        """Takes one of the kinds that agree.py names out of compilation."""
        if kind == "head":
            self.__dict__.pop("cross_entropy", None)
        blocks = [self.layers[1].ple] if kind == "ngram" else [*self.layers, *self.mtp.layers]
        for block in blocks:
            if kind == "ngram" or (kind != "head" and block.attention == (kind == "attention")):
                block._compiled_call_impl = None

    def hidden(
        self, ids_BT: torch.Tensor, picked_R: torch.Tensor, sparse: bool = False
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
        """(streams_BTSH before the final mixer, (balance, distil, shares) of each layer). T: a multiple of 64."""
        cos, sin = self.cos[: ids_BT.shape[1]], self.sin[: ids_BT.shape[1]]
        x = F.embedding(ids_BT, self.embed_tokens.weight).unsqueeze(2).repeat(1, 1, self.c.streams, 1)
        facts = []
        for index, layer in enumerate(self.layers):
            if index == 1:
                x = layer.ple(x, layer.ple.lookup(ids_BT))
            x, *fact = layer(x, cos, sin, picked_R, sparse)
            facts.append(tuple(fact))
        return x, facts

    def drafted(
        self, x: torch.Tensor, next_BT: torch.Tensor, picked_R: torch.Tensor, sparse: bool = False
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The draft block's streams for the same rows, given each row's next token."""
        cos, sin = self.cos[: next_BT.shape[1]], self.sin[: next_BT.shape[1]]
        y = self.mtp.combine(x, F.embedding(next_BT, self.embed_tokens.weight))
        y, *fact = self.mtp.layers[0](y, cos, sin, picked_R, sparse)
        return y, tuple(fact)

    def logits(self, x: torch.Tensor, draft: bool = False) -> torch.Tensor:
        """logits_BTV (FP32) from streams."""
        mixer = self.mtp.hyper_connection_mixer if draft else self.hyper_connection_mixer
        return F.linear(mixer.read(x)[0], self.lm_head.weight).float()

    def cross_entropy(self, x: torch.Tensor, targets: torch.Tensor, draft: bool) -> torch.Tensor:
        """nats_BT of the targets."""
        logits = self.logits(x, draft)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)

    def forward(
        self,
        window_BT2: torch.Tensor,
        picked_R: torch.Tensor,
        draft_weight: float,
        weights_BT2: torch.Tensor | None = None,
    ) -> Outputs:
        """Losses of windows. ``weights_BT2``: what each token counts as a target; None: one each."""
        ids, targets, beyond = window_BT2[:, :-2], window_BT2[:, 1:-1], window_BT2[:, 2:]
        x, facts = self.hidden(ids, picked_R)
        y, fact = self.drafted(x, targets, picked_R)
        nats, draft_nats = self.cross_entropy(x, targets, False), self.cross_entropy(y, beyond, True)
        if weights_BT2 is not None:
            nats, draft_nats = nats * weights_BT2[:, 1:-1], draft_nats * weights_BT2[:, 2:]
        main, draft = nats.mean(), draft_nats.mean()
        facts.append(fact)
        balance = torch.stack([f[0] for f in facts]).mean()
        distil = torch.stack([f[1] for f in facts]).sum()
        loss = main + draft_weight * draft + BALANCE_WEIGHT * len(facts) * balance + 0.1 * distil
        return Outputs(loss, main.detach(), draft.detach(), balance.detach(), distil.detach(),
                       torch.stack([f[2] for f in facts]).detach())  # fmt: skip
