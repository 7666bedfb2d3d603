"""Rotary position tables from float64, in pages, so that a position's values are the same bits in every window.

Lives in ``layers`` because attention and the sparse index share one table. It must not know models.
Legend: T rows, R rotary half width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["RopeTable"]

PAGE = 256  # positions computed at once: vectorised cosines of a page never depend on which rows are asked for


class RopeTable:
    """Cosines and sines of ``theta ** (-2i / rotary)`` times the position, FP32, computed page by page on demand.

    Text has one position for all axes, so interleaved multi-axis rotary is this same table.
    """

    def __init__(self, theta: float, rotary: int, device: torch.device) -> None:
        assert rotary % 2 == 0
        exponents = torch.arange(0, rotary, 2, dtype=torch.float64) / rotary
        self._frequency_R = theta**-exponents
        self._device = device
        self._pages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _page(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        page = self._pages.get(number)
        if page is None:
            positions = torch.arange(number * PAGE, (number + 1) * PAGE, dtype=torch.float64)
            angle = positions[:, None] * self._frequency_R
            page = (angle.cos().float().to(self._device), angle.sin().float().to(self._device))
            self._pages[number] = page
        return page

    def rows(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos_TR, sin_TR) of positions ``start .. start + count - 1``."""
        first, last = start // PAGE, (start + count - 1) // PAGE
        pages = [self._page(number) for number in range(first, last + 1)]
        cut = slice(start - first * PAGE, start - first * PAGE + count)
        if len(pages) == 1:
            return pages[0][0][cut], pages[0][1][cut]
        return torch.cat([cos for cos, _ in pages])[cut], torch.cat([sin for _, sin in pages])[cut]

    def at(self, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos_TR, sin_TR) of any positions, at least one."""
        if isinstance(positions, range):
            cos_TR, sin_TR = self.rows(positions[0], positions[-1] - positions[0] + 1)
            return cos_TR[:: positions.step].contiguous(), sin_TR[:: positions.step].contiguous()
        picked = [(self._page(p // PAGE), p % PAGE) for p in positions]
        return torch.stack([page[0][i] for page, i in picked]), torch.stack([page[1][i] for page, i in picked])
