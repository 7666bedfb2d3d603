"""Models of both families at the widths of released ones: a transformers model of random weights and packs of it.

Two layers, 32 experts and 4,096 words; every width, number of heads and number of picks is the released one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen4ExpForCausalLM, Qwen4ExpTextConfig
from transformers.initialization import no_init_weights

from strata.checkpoint.pack_writer import PackOptions, write_pack
from strata.checkpoint.random_model import RandomSource
from strata.checkpoint.source_model import ExpertWeights
from strata.checkpoint.weight_map import WeightMap
from strata.kernels.ops import Matrix
from strata.models import find
from strata.models.known_shapes import KNOWN_SHAPES
from strata.quant.blocks import E2M1_VALUES, e4m3_values
from strata.text.byte_tokenizer import byte_tokenizer
from strata.text.tokenizer_files import tokenizer_files
from tests.models.oracle import load_weights

__all__ = ["VOCABULARY", "WIDE", "write_wide_pack"]

VOCABULARY = 4096
_SMALL = {"num_hidden_layers": 2, "num_experts": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 1024}


def _qwen3() -> Any:
    with no_init_weights():
        return _fill(Qwen3MoeForCausalLM(Qwen3MoeConfig(**KNOWN_SHAPES["qwen3-30b"] | _SMALL)))


def _qwen4(**changes: Any) -> Any:
    """A layer of the gated delta net with n-grams, then one of attention."""
    small = {
        "layer_types": ["linear_attention", "indexed_attention"],
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 1000,
        "eos_token_id": [258, 256],
    }
    released = KNOWN_SHAPES["flash-next"]["text_config"]
    with no_init_weights():
        return _fill(Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**released | _SMALL | small | changes)))


WIDE: dict[str, Callable[[], Any]] = {
    "qwen3_moe": _qwen3,
    "qwen4_exp": _qwen4,
    "qwen4_exp_sparse": lambda: _qwen4(indexer_budget=64),
}
"""``sparse``: 16 blocks of 4 positions are attended, so that all behind position 67 takes the sparse path."""


class DrawnExperts:
    """One projection of a layer's experts in place of a parameter: what an index gives is made when it is asked for,
    since as FP32 parameters the experts would be more than a gigabyte to write first."""

    def __init__(self, drawn: torch.Tensor, place: int, shape: torch.Size) -> None:
        self.drawn = drawn
        self.place = place
        self.shape = shape

    def __getitem__(self, expert: int) -> torch.Tensor:
        size = math.prod(self.shape[1:])
        found = torch.empty(size)
        _cut(self.drawn, self.place + int(expert) * size, found)
        return found.view(self.shape[1:])


def _fill(model: Any) -> Any:
    """Gives ``model`` weights that each format of a pack keeps exactly: cuts of two drawings, at whole blocks, since to
    draw each weight takes ten times as long."""
    random = torch.Generator().manual_seed(17)
    blocks = (1 << 15) + 1
    codes = torch.randint(-127, 128, (blocks, 32), generator=random).float()
    codes[:, 5] = codes[:, 5].sign() * 127.0 + (codes[:, 5] == 0) * 127.0
    dense = (codes * 2.0 ** -torch.randint(0, 2, (blocks, 1), generator=random)).flatten()
    values = torch.tensor(E2M1_VALUES)[torch.randint(0, 8, (2 * blocks, 16), generator=random)]
    values[:, 9] = E2M1_VALUES[-1]
    values *= torch.randint(0, 2, values.shape, generator=random) * 2 - 1
    scales = e4m3_values()[torch.randint(0x70, 0x7F, (2 * blocks, 1), generator=random)]  # 128 to 448, the largest
    expert = (values * scales).flatten()
    place = itertools.count(step=32 * 31_253)
    plain = "qwen3" in model.config.model_type
    model.config._experts_implementation = "eager"  # the loop over experts, which reads one at a time
    with torch.no_grad():
        for name, weight in list(model.named_parameters()):
            spread = 1.0
            if "norm" in name:
                spread = 0.2
            elif weight.dim() == 1 or "conv1d" in name:
                spread = 0.4
            elif "embed" not in name:
                # A router of clear choices: rounding should not change which experts are picked.
                spread = (4.0 if "gate.weight" in name else 1.0) / weight.shape[-1] ** 0.5
            drawn = expert if ".experts." in name else dense
            drawn = drawn * 2.0 ** round(math.log2(spread / float(drawn.std())))
            if ".experts." in name:
                _replace(model, name, DrawnExperts(drawn, next(place), weight.shape))
                continue
            _cut(drawn, next(place), weight.data.view(-1))
            # Gated norms and those of qwen3_moe multiply by the weight, the others by 1 + weight.
            if "norm" in name and (plain or "linear_attn.norm" in name):
                weight.add_(1.0)
    return model.eval()


def _replace(model: Any, name: str, value: object) -> None:
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    delattr(owner, last)
    setattr(owner, last, value)


def _cut(drawn: torch.Tensor, place: int, flat: torch.Tensor) -> None:
    done = 0
    while done < flat.numel():
        first = (place + done) % drawn.numel()
        count = min(flat.numel() - done, drawn.numel() - first)
        flat[done : done + count] = drawn[first : first + count]
        done += count


class _OracleSource(RandomSource):
    """The weights of a transformers model as the pack writer asks for them."""

    def __init__(self, model: Any, folder: Path) -> None:
        raw = {**model.config.to_dict(), "architectures": [type(model).__name__]}
        self.family = find(raw)
        self.weight_map: WeightMap = self.family.weight_map(self.family.read_config(raw))
        self._layers = model.model.layers
        without_experts = WeightMap(self.weight_map.dense, (), self.weight_map.ignored)
        self._dense, _ = load_weights(without_experts, model.state_dict())
        absent = frozenset(e.group for e in self.weight_map.dense if e.group and e.name not in self._dense)
        byte_tokenizer(folder)
        super().__init__(
            raw, self.weight_map, 0, without=absent, tokenizer_files=tuple(tokenizer_files(folder)),
            integers={e.name: self._dense[e.name] for e in self.weight_map.dense if e.kind == "integers"},
        )  # fmt: skip

    def read_rows(self, name: str, rows_at_once: int) -> Iterator[torch.Tensor]:
        weight = self._dense[name]
        whole = weight.data if isinstance(weight, Matrix) else weight
        yield from whole.split(rows_at_once) if whole.ndim else (whole,)

    def read_expert(self, layer: int, expert: int) -> ExpertWeights:
        experts = self._layers[layer].mlp.experts
        gate, up = experts.gate_up_proj[expert].chunk(2)
        return ExpertWeights(gate, up, experts.down_proj[expert])


def write_wide_pack(model: Any, folder: Path, options: PackOptions) -> Path:
    """The pack of ``model`` in ``folder``, without a checkpoint in between."""
    words = folder / "words"
    words.mkdir(parents=True)
    source = _OracleSource(model, words)
    return write_pack(source, folder / "pack", str(source.family.read_config(source.config).family), options)
