"""Memory that a load takes once and uses again for every weight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata.checkpoint import weight_memory
from strata.checkpoint.pack_reader import DenseWeight
from strata.checkpoint.weight_memory import ReusedMemory
from strata.engine.synthetic_model import open_synthetic
from strata.kernels.ops import Matrix


@given(st.lists(st.lists(st.integers(0, 5000), max_size=6), max_size=5))
def test_parts_of_one_weight_never_overlap(weights: list[list[int]]) -> None:
    memory, least = ReusedMemory(), weight_memory._LEAST_BYTES
    weight_memory._LEAST_BYTES = 4096
    try:
        for sizes in weights:
            memory.restart()
            parts = [memory.take(size) for size in sizes]
            for number, part in enumerate(parts):
                assert part.ctypes.data % 16 == 0
                part[:] = number
            for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
                assert part.nbytes == size
                assert np.all(part == number)
    finally:
        weight_memory._LEAST_BYTES = least


def test_one_block_serves_weights_that_fit() -> None:
    memory = ReusedMemory()
    first = memory.take(1 << 20).ctypes.data
    memory.restart()
    assert memory.take(20 << 20).ctypes.data == first


def test_weights_that_are_moved_at_once_are_those_that_stay() -> None:
    def move(weight: DenseWeight) -> DenseWeight:
        if isinstance(weight, Matrix):
            scales = None if weight.scales is None else weight.scales.clone()
            return replace(weight, data=weight.data.clone(), scales=scales)
        return weight.clone() if isinstance(weight, torch.Tensor) else weight

    model = open_synthetic("tiny-hyper", 2)
    try:
        staying, moved = model.reader.load_dense(), model.reader.load_dense(None, move)
        assert staying.keys() == moved.keys()
        for name, weight in staying.items():
            other = moved[name]
            if isinstance(weight, Matrix):
                assert isinstance(other, Matrix)
                assert torch.equal(weight.data, other.data)
                assert weight.scales is None or (other.scales is not None and torch.equal(weight.scales, other.scales))
            elif isinstance(weight, torch.Tensor):
                assert isinstance(other, torch.Tensor)
                assert torch.equal(weight, other)
    finally:
        model.close()
