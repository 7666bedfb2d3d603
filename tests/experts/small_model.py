"""A small model's experts on disk, a plan for them, and the independent arithmetic they are checked against."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from strata.experts.injection import FaultInjection
from strata.experts.source import BlobPlace
from strata.experts.system import ExpertSystem
from strata.kernels.cpu.checksum import checksum
from strata.kernels.cpu.experts import ExpertKernel, group_picks
from strata.kernels.host import HostBackend, HostFaults
from strata.memory.planner import ResolvedPlan, plan
from strata.memory.requests import DeviceRoom, MemoryRequest, ModelShape
from strata.quant.layout import ExpertLayout

HIDDEN, INTERMEDIATE = 64, 32
TOP_K = 2
MIB = 1 << 20


@dataclass
class SmallPack:
    """``ExpertFile`` over one file, with a gap before the blobs and after each layer."""

    path: Path
    num_layers: int
    num_experts: int
    blob_bytes: int
    scales: NDArray[np.float32]
    blobs: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    checksums: NDArray[np.uint64]

    def place(self, layer: int, expert: int) -> BlobPlace:
        return BlobPlace(
            self.path, int(self.offsets[layer, expert]), self.blob_bytes, int(self.checksums[layer, expert])
        )


def write_pack(
    folder: Path,
    num_layers: int = 3,
    num_experts: int = 8,
    seed: int = 0,
    *,
    whole_pages: bool = True,
    alike: bool = False,
) -> tuple[SmallPack, ExpertKernel]:
    """A pack of random q8_0 experts and the kernel that computes them; with ``alike`` all layers hold the same ones."""
    layout = ExpertLayout(HIDDEN, INTERMEDIATE, "q8_0")
    generator = torch.Generator().manual_seed(seed)
    different = 1 if alike else num_layers
    shape = (different * num_experts, INTERMEDIATE, HIDDEN)
    gate, up = (torch.randn(shape, generator=generator) for _ in range(2))
    down = torch.randn(shape[0], HIDDEN, INTERMEDIATE, generator=generator)
    blobs_torch, scales = layout.pack_weights(gate, up, down)
    blob_bytes = layout.blob_bytes if whole_pages else layout.payload_bytes
    blobs = np.ascontiguousarray(blobs_torch.numpy()[:, :blob_bytes]).reshape(different, num_experts, blob_bytes)
    blobs = np.repeat(blobs, num_layers // different, 0)
    path = folder / f"experts-{seed}-{blob_bytes}.bin"
    offsets = np.zeros((num_layers, num_experts), np.int64)
    with path.open("wb") as handle:
        handle.write(b"\xee" * 4096)
        for layer in range(num_layers):
            for expert in range(num_experts):
                offsets[layer, expert] = handle.tell()
                handle.write(blobs[layer, expert].tobytes())
            handle.write(b"\xee" * 4096)
    checksums = np.array([[checksum(blob) for blob in row] for row in blobs], np.uint64)
    scales_table = np.repeat(scales.numpy().reshape(different, num_experts, 3), num_layers // different, 0)
    pack = SmallPack(path, num_layers, num_experts, blob_bytes, scales_table, blobs, offsets, checksums)
    return pack, ExpertKernel(layout)


def make_plan(pack: SmallPack, **changes: object) -> ResolvedPlan:
    """A plan on a simulated card with room for everything; ``changes`` are fields of ``MemoryRequest``."""
    shape = ModelShape(
        name="small",
        num_layers=pack.num_layers,
        num_experts=pack.num_experts,
        top_k=TOP_K,
        blob_bytes=pack.blob_bytes,
        hidden=HIDDEN,
        dense_bytes=0,
    )
    base = MemoryRequest(ram_bytes=1 << 30, headroom_bytes=0, max_context=512, stager_threads=2, expert_cache=4)
    request = dataclasses.replace(base, **changes)  # type: ignore[arg-type]
    return plan(shape, request, DeviceRoom("cpu", 256 * MIB))


@dataclass
class Opened:
    system: ExpertSystem
    backend: HostBackend
    pack: SmallPack

    def forward(self, seed: int, num_rows: int) -> torch.Tensor:
        """Random rows and picks through every layer, the output of one being the input of the next."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_rows, HIDDEN, generator=generator)
        for layer in range(self.pack.num_layers):
            ids, weights = draw_picks(generator, num_rows, self.pack.num_experts)
            x = x + self.system.dispatcher(layer, x, ids, weights)
        return x

    def close(self) -> None:
        self.system.close()
        self.backend.close()


def draw_picks(generator: torch.Generator, num_rows: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(num_rows, num_experts, generator=generator)
    weights, ids = torch.topk(torch.softmax(logits, -1), TOP_K)
    return ids.to(torch.int32).contiguous(), weights.contiguous()


def open_system(
    pack: SmallPack,
    kernel: ExpertKernel,
    faults: HostFaults | None = None,
    injection: FaultInjection | None = None,
    heat: NDArray[np.float64] | None = None,
    **changes: object,
) -> Opened:
    backend = HostBackend(256 * MIB, faults)
    system = ExpertSystem.open(make_plan(pack, **changes), pack, kernel, backend, injection=injection, heat=heat)
    return Opened(system, backend, pack)


def oracle(pack: SmallPack, kernel: ExpertKernel, seed: int, num_rows: int) -> torch.Tensor:
    """The same rows with every expert in one plain array: no tiers, no slots, no copies."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, HIDDEN, generator=generator)
    aligned = torch.empty(pack.num_experts * pack.blob_bytes + 64, dtype=torch.uint8)
    start = -aligned.data_ptr() % 64
    for layer in range(pack.num_layers):
        ids, weights = draw_picks(generator, num_rows, pack.num_experts)
        view = aligned[start : start + pack.num_experts * pack.blob_bytes]
        view.copy_(torch.from_numpy(pack.blobs[layer].reshape(-1).copy()))
        tasks = group_picks(ids.numpy())
        addresses = np.uint64(view.data_ptr()) + np.arange(pack.num_experts, dtype=np.uint64) * np.uint64(
            pack.blob_bytes
        )
        tasks.place(addresses, pack.scales[layer])
        parts = torch.empty(num_rows * TOP_K, HIDDEN)
        kernel.compute(tasks, x, parts)
        x = x + kernel.combine(parts, weights)
    return x
