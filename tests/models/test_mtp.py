"""The draft block against a plain transcription of its mathematics in float64, one token and one head at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from strata.errors import CheckpointError
from strata.kernels.reference import ReferenceOps
from strata.models import find
from strata.models.qwen4_exp_model import Qwen4Exp
from tests.models.oracle import Pair, defined_ties, load_weights, sample_ids, tiny_qwen4, worst

H, S, HEADS, KV, D, R = 64, 4, 4, 2, 32, 8
INDEX_HEADS, DI, BLOCK, TOP = 3, 16, 4, 4
Tensor = torch.Tensor


def draft_tensors(seed: int = 11) -> dict[str, Tensor]:
    """Random weights of the draft block under their published names."""
    raw = tiny_qwen4().oracle.config.to_dict() | {"architectures": ["Qwen4ExpForCausalLM"]}
    config = find(raw).read_config(raw)
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.35 / (shape[-1] / 16) ** 0.5

    tensors = {"mtp.fc.weight": matrix(H, 2 * H)}
    for entry in find(raw).weight_map(config).dense:
        if entry.group == "mtp" and entry.columns is None:
            shape = entry.shape
            random = torch.randn(shape, generator=generator) * 0.2 if len(shape) == 1 else matrix(*shape)
            tensors[entry.sources[0][0]] = random
    for expert in range(8):
        at = f"mtp.layers.0.mlp.experts.{expert}."
        tensors |= {at + "gate_proj.weight": matrix(24, H), at + "up_proj.weight": matrix(24, H)}
        tensors[at + "down_proj.weight"] = matrix(H, 24)
    return tensors


class Transcription:
    """The mathematics of the draft block, without caches: position i sees everything up to i."""

    def __init__(self, tensors: dict[str, Tensor], embedding: Tensor, head: Tensor) -> None:
        self.w = {name.removeprefix("mtp."): tensor.double() for name, tensor in tensors.items()}
        self.embedding, self.head = embedding.double(), head.double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + 1e-6) * (1 + self.w[name])

    def enter(self, streams: Tensor, token: int) -> Tensor:
        joint = self.w["fc.weight"]
        embedded = joint[:, :H] @ self.norm(self.embedding[token], "pre_fc_norm_embedding.weight")
        return torch.stack(
            [joint[:, H:] @ self.norm(streams[s], "pre_fc_norm_hidden.weight") + embedded for s in range(S)]
        )

    def mix(self, x: Tensor, at: str) -> tuple[Tensor, Tensor]:
        weight = self.w[at + "hc_norm.weight"].view(S, H)
        n = torch.stack([x[s] / torch.sqrt((x[s] * x[s]).mean() + 1e-6) * (1 + weight[s]) for s in range(S)])
        low = self.w[at + "input_mix_weight_down.weight"] @ n.flatten() / S
        m = torch.sigmoid(self.w[at + "input_mix_weight_up.weight"] @ (low * torch.sigmoid(low))).view(S, H)
        u = sum(m[s] * n[s] for s in range(S)) / S
        assert isinstance(u, Tensor)
        if at + "block_inject_weight.weight" not in self.w:
            return u, n
        return u, 2 * torch.sigmoid(self.w[at + "block_inject_weight.weight"] @ n.flatten() / S)

    def rotate(self, x: Tensor, position: int) -> Tensor:
        angle = position * 1e7 ** (-torch.arange(R).double() / R)
        a, b = x[:R], x[R : 2 * R]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), x[2 * R :]))

    def visible(self, u: list[Tensor], position: int) -> list[int]:
        """Positions that the row attends: the best blocks by index score and the incomplete tail."""
        at = "layers.0.self_attn.indexer."
        split = INDEX_HEADS * DI
        projection = self.w[at + "index_qk_proj.weight"]
        complete = (position + 1) // BLOCK
        query = (projection[:split] @ u[position]).view(INDEX_HEADS, DI)
        query_heads = [self.rotate(self.norm(q, at + "q_layernorm.weight"), position) for q in query]
        scores = []
        for block in range(complete):
            mean = sum(projection[split:] @ u[block * BLOCK + j] for j in range(BLOCK)) / BLOCK
            assert isinstance(mean, Tensor)
            key = self.rotate(self.norm(mean, at + "k_layernorm.weight"), block * BLOCK)
            scores.append(sum(max(0.0, float(q @ key)) for q in query_heads) / math.sqrt(DI))
        best = sorted(range(complete), key=lambda block: (-scores[block], block))[:TOP]
        listed = [block * BLOCK + j for block in sorted(best) for j in range(BLOCK)]
        return listed + list(range(complete * BLOCK, position + 1))

    def attend(self, u: list[Tensor], position: int) -> Tensor:
        at = "layers.0.self_attn."
        projected = (self.w[at + "q_proj.weight"] @ u[position]).view(HEADS, 2, D)
        seen = self.visible(u, position)
        out = []
        for head in range(HEADS):
            rows = slice((head // 2) * D, (head // 2 + 1) * D)
            q = self.rotate(self.norm(projected[head, 0], at + "q_norm.weight"), position)
            keys = [
                self.rotate(self.norm((self.w[at + "k_proj.weight"] @ u[p])[rows], at + "k_norm.weight"), p)
                for p in seen
            ]
            weights = torch.softmax(torch.stack([q @ k for k in keys]) / math.sqrt(D), 0)
            values = torch.stack([(self.w[at + "v_proj.weight"] @ u[p])[rows] for p in seen])
            out.append(weights @ values * torch.sigmoid(projected[head, 1]))
        return self.w[at + "o_proj.weight"] @ torch.cat(out)

    def swiglu(self, x: Tensor, at: str) -> Tensor:
        gate = self.w[at + "gate_proj.weight"] @ x
        return self.w[at + "down_proj.weight"] @ (gate * torch.sigmoid(gate) * (self.w[at + "up_proj.weight"] @ x))

    def experts(self, x: Tensor) -> Tensor:
        at = "layers.0.mlp."
        share = torch.softmax(self.w[at + "gate.weight"] @ x, 0)
        picked = sorted(range(8), key=lambda e: (-float(share[e]), e))[:3]
        total = sum(float(share[e]) for e in picked)
        y = torch.sigmoid(self.w[at + "shared_expert_gate.weight"] @ x) * self.swiglu(x, at + "shared_expert.")
        return y + sum(share[e] / total * self.swiglu(x, f"{at}experts.{e}.") for e in picked)

    def run(self, streams: Tensor, next_ids: list[int]) -> tuple[Tensor, Tensor]:
        """(logits, streams) of all positions."""
        x = [self.enter(streams[i].double(), token) for i, token in enumerate(next_ids)]
        mixed = [self.mix(one, "layers.0.attn_hyper_connection.") for one in x]
        u = [one for one, _ in mixed]
        x = [x[i] + c[:, None] * self.attend(u, i) for i, (_, c) in enumerate(mixed)]
        for i, one in enumerate(x):
            v, c = self.mix(one, "layers.0.mlp_hyper_connection.")
            x[i] = one + c[:, None] * self.experts(v)
        logits = [self.head @ self.mix(one, "hyper_connection_mixer.")[0] for one in x]
        return torch.stack(logits), torch.stack(x)


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return draft_tensors()


@pytest.fixture(scope="module")
def pair(tensors: dict[str, Tensor]) -> Pair:
    return tiny_qwen4(tensors)


@pytest.fixture(scope="module")
def plain(pair: Pair, tensors: dict[str, Tensor]) -> Transcription:
    oracle = pair.oracle
    return Transcription(tensors, oracle.model.embed_tokens.weight.detach(), oracle.lm_head.weight.detach())


def target_streams(pair: Pair, ids: list[int]) -> Tensor:
    """The oracle's streams before its final mixer."""
    seen: list[Tensor] = []
    mixer = pair.oracle.model.hyper_connection_mixer
    hook = mixer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with defined_ties():
        pair.oracle_logits(ids)
    hook.remove()
    return seen[0][0].view(len(ids), S, H)


def model_of(pair: Pair) -> Qwen4Exp:
    assert isinstance(pair.model, Qwen4Exp)
    assert pair.model.mtp is not None
    return pair.model


def test_target_streams_are_the_oracles(pair: Pair) -> None:
    ids = sample_ids(45)
    model = model_of(pair)
    with torch.no_grad():
        found = model.streams(ReferenceOps(), ids, model.new_state(45), pair.experts, certain=True)
    assert worst(found, target_streams(pair, ids)) < 2e-5


@pytest.mark.parametrize("chunks", [[45], [7], [1]])
def test_draft_logits_and_streams(pair: Pair, plain: Transcription, chunks: list[int]) -> None:
    ids = sample_ids(46)
    streams, next_ids = target_streams(pair, ids[:45]), ids[1:]
    logits, after = plain.run(streams, next_ids)
    draft = model_of(pair).mtp
    assert draft is not None
    state = draft.new_state(45)
    found: list[Any] = []
    with torch.no_grad():
        while state.length < 45:
            rows = slice(state.length, min(45, state.length + chunks[0]))
            found.append(draft.forward(ReferenceOps(), next_ids[rows], streams[rows], state, pair.experts))
            state.commit(rows.stop - rows.start)
    assert worst(torch.cat([one for one, _ in found]).double(), logits) < 2e-5
    assert worst(torch.cat([one for _, one in found]).double(), after) < 2e-5


def test_chain_feeds_back_its_streams_and_is_taken_back(pair: Pair, plain: Transcription) -> None:
    ids = sample_ids(24)
    streams, next_ids = target_streams(pair, ids[:23]), ids[1:]
    first = plain.run(streams, next_ids)[1][-1:].float()
    draft, ops = model_of(pair).mtp, ReferenceOps()
    assert draft is not None
    state = draft.new_state(30)
    with torch.no_grad():
        draft.forward(ops, next_ids, streams, state, pair.experts)
        state.commit(23)
        for tokens in ((3, 90, 5), (41, 7)):
            chain, chain_ids, own = streams, list(next_ids), first
            for token in tokens:
                found, _ = draft.forward(ops, [token], own, state, pair.experts)
                state.commit(1)
                chain, chain_ids = torch.cat((chain, own)), [*chain_ids, token]
                expected, after = plain.run(chain, chain_ids)
                assert worst(found.double(), expected[-1:]) < 2e-5
                own = after[-1:].float()
            state.truncate(23)


def test_model_without_draft_weights_has_none() -> None:
    assert tiny_qwen4().model.mtp is None  # type: ignore[attr-defined]


def test_partial_draft_weights_are_refused(tensors: dict[str, Tensor]) -> None:
    """Loaded names are all or none; a missing one is named by the block that needs it."""
    pair = tiny_qwen4(tensors)
    raw = pair.oracle.config.to_dict() | {"architectures": ["Qwen4ExpForCausalLM"]}
    family = find(raw)
    config = family.read_config(raw)
    dense, _ = load_weights(family.weight_map(config), pair.oracle.state_dict() | tensors)
    del dense["mtp.layers.0.self_attn.o_proj.weight"]
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.0\.self_attn\.o_proj\.weight was not loaded"):
        family.build(config, dense)
