"""What a small model's bits per byte are held against: xz, and a 5-gram model of the same training text.

Lives beside the trainer. Knows token streams only.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["NgramModel", "xz_bits_per_byte"]

BITS = 13  # of an id; the vocabulary is 8,192
_SLICE = 1 << 21


def xz_bits_per_byte(text: bytes) -> float:
    """Of the whole text as one stream at the strongest preset."""
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) * 8 / len(text)


class NgramModel:
    """Interpolated Witten-Bell over n-grams of a training stream, counted only where ``queries`` need it.

    p_n(w | h) = (count(h w) + kinds(h) p_(n-1)(w | h')) / (count(h) + kinds(h)); below one token all ids are equal.
    """

    def __init__(self, training: NDArray[np.uint16], order: int = 5, vocabulary: int = 1 << BITS) -> None:
        self.training, self.order, self.vocabulary = training, order, vocabulary

    def nats(self, queries: Sequence[Sequence[int]]) -> list[float]:
        """Nats of each query: of all its tokens but the first ``order`` - 1, which are only context."""
        parts = [_grams(np.asarray(q, np.uint64), self.order) for q in queries]
        grams = np.concatenate(parts)
        probability = np.full(len(grams), 1.0 / self.vocabulary)
        for n in range(1, self.order + 1):
            context, word = grams[:, self.order - n : self.order - 1], grams[:, -1]
            pair, total, kinds = self._count(context, word)
            probability = np.where(total > 0, (pair + kinds * probability) / np.maximum(total + kinds, 1), probability)
        ends = np.cumsum([len(part) for part in parts])[:-1]
        return [float(-np.log(part).sum()) for part in np.split(probability, ends)]

    def _count(
        self, context: NDArray[np.uint64], word: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(count of context and word, count of the context, different words after it) of each query."""
        length = context.shape[1]
        wanted, place = np.unique(_key(context), return_inverse=True)
        codes = []  # place of the context in ``wanted`` and the word after it, wherever the training text has one
        for part in self._slices(length):
            windows = _grams(part, length + 1)
            keys = _key(windows[:, :-1])
            found = np.minimum(np.searchsorted(wanted, keys), len(wanted) - 1)
            hit = wanted[found] == keys
            codes.append((found[hit].astype(np.uint64) << np.uint64(BITS)) | windows[hit, -1])
        seen, counts = np.unique(np.concatenate(codes), return_counts=True)
        owner = (seen >> np.uint64(BITS)).astype(np.int64)
        total = np.bincount(owner, counts, len(wanted)).astype(np.int64)
        kinds = np.bincount(owner, minlength=len(wanted))
        asked = (place.astype(np.uint64).ravel() << np.uint64(BITS)) | word
        at = np.minimum(np.searchsorted(seen, asked), max(len(seen) - 1, 0))
        pair = np.where(seen[at] == asked, counts[at], 0) if len(seen) else np.zeros(len(asked), np.int64)
        return pair, total[place.ravel()], kinds[place.ravel()]

    def _slices(self, overlap: int) -> Iterator[NDArray[np.uint64]]:
        for start in range(0, max(1, len(self.training) - overlap), _SLICE):
            yield self.training[start : start + _SLICE + overlap].astype(np.uint64)


def _grams(ids: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    return np.lib.stride_tricks.sliding_window_view(ids, length)


def _key(context: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One number a context of at most four ids."""
    key = np.zeros(len(context), np.uint64)
    for column in range(context.shape[1]):
        key = (key << np.uint64(BITS)) | context[:, column]
    return key
