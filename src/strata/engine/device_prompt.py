"""A prompt on a card: chunk after chunk, each layer finished for a whole chunk before the next, experts streamed.

Lives in ``engine`` because a prompt is where model, state and experts meet; ``device_rounds`` is the same for rounds. A
chunk is the unit of streaming. It runs as passes, whole frames of ``FRAME_ROWS`` rows at multiples of it, which compute
the model's own forward in turns (``lockstep``) and meet at each layer's experts, whose rows are multiplied for all of
the chunk at once. So each operation has one shape at one position, and a row's bits depend on neither chunk, pass,
placement nor company (decision record 0131). It must not know a family, a tier or a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from strata.engine.lockstep import run_together
from strata.errors import EngineError
from strata.kernels.cuda.prompt.calls import calls_for
from strata.kernels.cuda.prompt.experts import ChunkExperts
from strata.kernels.cuda.prompt.frame import FRAME_ROWS, Frame, frames_of
from strata.kernels.cuda.prompt.ops import DenseWeights, PromptOps
from strata.kernels.cuda.prompt.order import compute_of
from strata.kvcache.prompt_state import PassState
from strata.memory.planner import prompt_bytes

if TYPE_CHECKING:
    from strata.engine.cancellation import Cancellation
    from strata.experts.card_stream import CardStream
    from strata.experts.system import ExpertSystem
    from strata.kernels.backend import Backend
    from strata.kernels.cuda.program import Machine
    from strata.kvcache.device_state import DeviceState
    from strata.models.family import LogitRows, Model
    from strata.quant.layout import ExpertLayout

__all__ = ["ChunkReader", "DevicePrompt", "even_rows"]

LEARNED_ROUNDS = 64  # a prompt counts for as many rounds in what the expert cache learns


def even_rows(count: int, most: int, frame_rows: int) -> int:
    """Rows of the chunks of a prompt of ``count`` rows, of at most ``most`` each: as few chunks as that takes, alike to
    a frame. ``most`` itself where it is no whole number of frames."""
    if most % frame_rows:
        return most
    return -(-count // -(-count // most) // frame_rows) * frame_rows


class _Brought(NamedTuple):
    """What a pass brings to a layer's experts."""

    layer: int
    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor


class DevicePrompt:
    """Reads prompts into a ``DeviceState``; owns nothing between them. One thread calls it."""

    def __init__(
        self,
        model: Model,
        experts: ExpertSystem,
        layout: ExpertLayout,
        machine: Machine,
        backend: Backend,
        state: DeviceState,
        scales: torch.Tensor,
        chunk_rows: int,
        *,
        even: bool = False,
        frame_rows: int | None = None,
    ) -> None:
        """``scales``: [layers, experts, 3] FP32 on the device.

        ``even``: a prompt's chunks are of one length, at most ``chunk_rows``.
        """
        self._model, self._experts, self._layout, self._machine = model, experts, layout, machine
        self._state, self._scales = state, scales
        self._even = even
        self._chunk_rows, self._frame_rows = chunk_rows, frame_rows or FRAME_ROWS
        self._compute = compute_of(machine, backend)
        self._calls = calls_for(machine.device)
        self._num_layers = int(scales.shape[0])

    @contextmanager
    def reading(self, count: int) -> Iterator[ChunkReader]:
        """For a prompt of ``count`` more rows: slots are borrowed inside, and given back filled."""
        with ExitStack() as owned, torch.no_grad():
            first, last = self._state.length, self._state.length + count - 1
            chunk_rows = self._chunk_rows
            if self._even:
                chunk_rows = even_rows(count, chunk_rows, self._frame_rows)
            chunks = last // chunk_rows - first // chunk_rows + 1
            rows = min(count, chunk_rows)
            held = -(-rows // self._frame_rows) * self._frame_rows + (self._frame_rows if first else 0)
            nbytes = prompt_bytes(self._experts.plan.shape, held, last + 1)
            stream = self._experts.open_stream(self._compute, chunks, self._model.config.num_layers, nbytes)
            owned.callback(self._experts.end_prompt)
            owned.callback(self._compute.synchronize)  # before slots are filled again
            with self._compute.scope():
                buffers = ChunkExperts(
                    self._layout, rows, self._model.config.top_k, self._machine.device, self._machine.multiprocessors
                )
                reader = ChunkReader(self, stream, buffers, chunk_rows)
                del buffers  # the reader alone has them: their memory may be lent slots'
                try:
                    yield reader
                    reader.end(count)
                finally:
                    reader.release()

    def _new_ops(self, frame: Frame, weights: DenseWeights) -> PromptOps:
        return PromptOps(frame, self._calls, weights, self._compute.launch)


class ChunkReader:
    """One prompt being read."""

    def __init__(self, prompt: DevicePrompt, stream: CardStream, buffers: ChunkExperts, chunk_rows: int) -> None:
        self._prompt, self._stream, self._buffers = prompt, stream, buffers
        self.chunk_rows = chunk_rows  # chunks end at multiples of it
        self._parts = prompt._state.begin_prompt()
        self._weights = DenseWeights(prompt._compute.launch)
        device = prompt._machine.device
        self._counts = torch.zeros(prompt._num_layers, self._buffers_experts, dtype=torch.int32, device=device)

    @property
    def _buffers_experts(self) -> int:
        return int(self._prompt._scales.shape[1])

    def read(self, ids: Sequence[int], logits: LogitRows, cancellation: Cancellation | None) -> torch.Tensor | None:
        """The rows of one chunk, which are part of the sequence then. FP32 logits of its last row in RAM (1 x V), or
        None. Raises ``Cancelled``, or what a copy or read failed with: the sequence is of no use then."""
        prompt, state = self._prompt, self._prompt._state
        state.check_room(len(ids))
        frames = frames_of(state.length, state.length + len(ids), prompt._frame_rows)
        self._orders = self._stream.begin_chunk()
        device = prompt._machine.device  # one copy for all layers: each one would wait for what is enqueued
        self._experts_LE = torch.from_numpy(np.stack([one.experts for one in self._orders])).to(device)
        self._addresses_LE = torch.from_numpy(np.stack([one.addresses for one in self._orders])).to(device)
        self._cancellation = cancellation
        works = []
        at = 0
        for number, frame in enumerate(frames):
            padded = [0] * frame.first + list(ids[at : at + frame.count]) + [0] * (frame.rows - frame.stop)
            at += frame.count
            wanted = frame.stop - 1 if logits != "none" and number == len(frames) - 1 else None
            works.append(partial(self._forward, frame, padded, wanted))
        answer = partial(self._multiply, frames)
        try:
            results = run_together(works, answer, prompt._compute.scope)
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"a chunk of {len(ids):,} rows needs more VRAM than was planned for it", "use a smaller --prefill"
            ) from error
        self._weights.forget()
        state.advance(len(ids))
        found: torch.Tensor | None = results[-1]
        return None if found is None else found.cpu()

    def end(self, count: int) -> None:
        """After the last chunk: rounds may run."""
        prompt = self._prompt
        prompt._state.end_prompt(self._parts)
        counts = self._counts.cpu().numpy().astype(np.int64)
        prompt._experts.learn(counts, min(1.0, LEARNED_ROUNDS / count))

    def release(self) -> None:
        """Drops every tensor, once what is enqueued is complete; no call comes after it."""
        self._prompt._compute.synchronize()
        for name in ("_buffers", "_parts", "_weights", "_counts", "_orders", "_experts_LE", "_addresses_LE"):
            self.__dict__.pop(name, None)

    def _forward(self, frame: Frame, ids: list[int], wanted: int | None, meet: Any) -> torch.Tensor | None:
        prompt = self._prompt
        state = PassState(self._parts, frame.start, frame.rows, frame.first, frame.stop)

        def experts(layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = meet(_Brought(layer, x_TH, ids_TK, weights_TK))
            return found

        with torch.no_grad():
            ops = prompt._new_ops(frame, self._weights)
            return prompt._model.forward(ops, ids, state, experts, "none" if wanted is None else wanted, certain=True)

    def _multiply(self, frames: Sequence[Frame], brought: Sequence[_Brought]) -> list[torch.Tensor]:
        """The experts' outputs for the rows of all frames, which bring the same layer."""
        if self._cancellation is not None:
            self._cancellation.check()
        self._weights.forget()  # the layer's own were used by every frame
        prompt, buffers, device = self._prompt, self._buffers, self._prompt._machine.device
        layer = brought[0].layer
        hidden, top_k = brought[0].x_TH.shape[1], brought[0].ids_TK.shape[1]
        total = sum(frame.count for frame in frames)
        ids_CK = torch.empty(total, top_k, dtype=torch.int32, device=device)
        weights_CK = torch.empty(total, top_k, device=device)
        bounds, at = [], 0
        for frame, one in zip(frames, brought, strict=True):
            rows, own = slice(at, at + frame.count), slice(frame.first, frame.stop)
            buffers.x_CH[rows, :hidden] = one.x_TH[own]
            ids_CK[rows], weights_CK[rows] = one.ids_TK[own], one.weights_TK[own]
            bounds.append(rows)
            at += frame.count
        buffers.begin_layer(ids_CK, self._experts_LE[layer], self._addresses_LE[layer], prompt._scales[layer])
        self._counts[layer] += buffers.counts_E
        for first, stop in self._stream.waves(self._orders[layer]):
            prompt._compute.launch(buffers.wave(first, stop))
        y_CH = torch.empty(total, hidden, device=device)
        prompt._compute.launch(buffers.sums(ids_CK, weights_CK, y_CH))
        return [_in_frame(y_CH[rows], frame) for frame, rows in zip(frames, bounds, strict=True)]


def _in_frame(y_CH: torch.Tensor, frame: Frame) -> torch.Tensor:
    """A frame's own rows among zeros."""
    if frame.count == frame.rows:
        return y_CH
    y_TH = y_CH.new_zeros(frame.rows, y_CH.shape[1])
    y_TH[frame.first : frame.stop] = y_CH
    return y_TH
