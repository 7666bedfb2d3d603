"""Loading and the file tier beside what the drive and the memory of this machine can do: tiers.json.

    python benchmarks/tiers.py --machine cpu2

Writes a file of experts of the released size, then: a load with a cold and a warm page cache against a sequential
read and against memcpy; picks read from the file and computed, one layer at a time, by a process whose own memory may
grow by half of the file alone, against reads of such pieces that compute nothing; and the peak of resident memory
against its final size. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from strata.benchmark_record import Figure, Record, measured, record_path
from strata.errors import EngineError, MemoryPlanError, StrataError
from strata.experts.source import BlobPlace, ExpertSource
from strata.experts.system import ExpertSystem
from strata.kernels.cpu import pool
from strata.kernels.cpu.checksum import checksum
from strata.kernels.cpu.experts import ExpertKernel
from strata.kernels.cpu.stager import Stager
from strata.kernels.host import HostBackend
from strata.memory.planner import GIB, plan
from strata.memory.probe import probe_machine
from strata.memory.requests import DeviceRoom, MemoryRequest, ModelShape, PinRequest
from strata.memory.system import system
from strata.quant.layout import ExpertLayout

RESULTS = Path(__file__).resolve().parent / "results"
LAYOUT = ExpertLayout(2560, 640, "nvfp4")  # of flash-next
BLOB_BYTES = LAYOUT.blob_bytes
NUM_EXPERTS = 64
TOP_K = 10  # as flash-next picks
PIECE = 8 << 20


@dataclass
class Blobs:
    """``ExpertFile`` over one file of blobs that differ in their first bytes."""

    path: Path
    num_layers: int
    num_experts: int
    blob_bytes: int
    scales: NDArray[np.float32]
    checksums: list[int]

    def place(self, layer: int, expert: int) -> BlobPlace:
        number = layer * self.num_experts + expert
        return BlobPlace(self.path, number * self.blob_bytes, self.blob_bytes, self.checksums[number])


def write_blobs(folder: Path, gib: float) -> Blobs:
    num_layers = max(1, int(gib * GIB / (NUM_EXPERTS * BLOB_BYTES)))
    blobs, _ = LAYOUT.pack_weights(*(torch.randn(1, *s) for s in ((640, 2560), (640, 2560), (2560, 640))))
    data = blobs[0].numpy().reshape(-1)
    sums = []
    path = folder / "experts.bin"
    with path.open("wb") as handle:
        for number in range(num_layers * NUM_EXPERTS):
            data[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
            sums.append(checksum(data))
            handle.write(data.tobytes())
        handle.flush()
        os.fsync(handle.fileno())
    return Blobs(path, num_layers, NUM_EXPERTS, BLOB_BYTES, np.ones((num_layers, NUM_EXPERTS, 3), np.float32), sums)


def drop_cache(path: Path) -> None:
    with path.open("rb") as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_of(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def read_sequentially(path: Path, direct: bool) -> None:
    """One thread, pieces of 8 MiB, each into the same buffer."""
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    buffer = HostBackend(PIECE).allocate(PIECE)
    view = memoryview((ctypes.c_uint8 * PIECE).from_address(buffer.address))
    position = 0
    while got := os.preadv(descriptor, [view], position):
        position += got
    os.close(descriptor)


def read_cold(blobs: Blobs, direct: bool) -> float:
    """Seconds of a sequential read with nothing in the page cache."""
    drop_cache(blobs.path)
    return seconds_of(lambda: read_sequentially(blobs.path, direct))


def read_experts(blobs: Blobs) -> float:
    """Bytes a second of reads of single experts in random order, past the page cache, sixteen at a time."""
    drop_cache(blobs.path)
    source, stager, backend = ExpertSource(blobs), Stager(4), HostBackend(16 * BLOB_BYTES)
    source.direct = True
    buffers = backend.allocate(16 * BLOB_BYTES)
    tickets: list[int] = []

    def read() -> None:
        for number, flat in enumerate(np.random.default_rng(2).permutation(len(blobs.checksums)).tolist()):
            if number >= 16:
                stager.wait(tickets[number - 16])
            target = buffers.address + number % 16 * BLOB_BYTES
            tickets.append(source.submit(stager, *divmod(flat, NUM_EXPERTS), target))
        for ticket in tickets[-16:]:
            stager.wait(ticket)

    seconds = seconds_of(read)
    stager.close()
    source.close()
    return len(tickets) * BLOB_BYTES / seconds


def copy_memory(nbytes: int) -> float:
    """Bytes a second of one memcpy between touched pages."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return nbytes / seconds_of(lambda: np.copyto(target, source))


def open_experts(blobs: Blobs, ram_bytes: int, **changes: object) -> ExpertSystem:
    shape = ModelShape("blobs", blobs.num_layers, NUM_EXPERTS, TOP_K, BLOB_BYTES, LAYOUT.hidden, dense_bytes=0)
    request = MemoryRequest(
        ram_bytes=ram_bytes,
        headroom_bytes=0,
        max_context=64,
        num_cpus=os.cpu_count() or 1,
        pin=PinRequest("none"),
        **changes,  # type: ignore[arg-type]
    )
    resolved = plan(shape, request, DeviceRoom("cpu", None))
    return ExpertSystem.open(resolved, blobs, ExpertKernel(LAYOUT), HostBackend(1 << 20))


def make_memory_exist(nbytes: int) -> float:
    """Touches so much memory and frees it; bytes a second.

    A virtual machine's host takes free memory back within seconds and gives it again at the first touch, at 0.3 to
    3 GB/s where touching memory that exists runs at 10 to 16. That is the host's speed, no engine's: every load is
    measured in memory that exists, and the host's rate is a figure of its own.
    """
    region = system.map_region(nbytes, huge_pages=True)
    seconds = seconds_of(lambda: system.touch_pages(region.address, region.nbytes))
    region.free()
    return nbytes / seconds


def load(blobs: Blobs, ram_bytes: int, *, warm: bool) -> float:
    """Bytes a second from the call to the first round possible, everything checked and in place."""
    if not warm:
        drop_cache(blobs.path)
    make_memory_exist(len(blobs.checksums) * BLOB_BYTES + GIB // 4)
    started = time.perf_counter()
    opened = open_experts(blobs, ram_bytes)
    seconds = time.perf_counter() - started
    opened.close()
    return len(blobs.checksums) * BLOB_BYTES / seconds


def read_status(name: str) -> int:
    """A size of this process in bytes, as the system counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise EngineError(f"the system does not say {name}")


@contextmanager
def limited(room: int) -> Iterator[None]:
    """So many bytes of private memory more than now, and no more, for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (read_status("VmData") + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def file_tier(blobs: Blobs, ram_bytes: int, num_rounds: int) -> float:
    """Bytes a second of decode rounds whose picks are all read from the file, the cache dropped before each.

    Under a limit that holds half of the experts: it is tried on a copy of all of them, which must be refused.
    """
    with limited(len(blobs.checksums) * BLOB_BYTES // 2):
        try:
            open_experts(blobs, ram_bytes).close()
        except MemoryPlanError:
            return read_rounds(blobs, ram_bytes, num_rounds)
    raise EngineError("the limit of memory does not hold: all experts were taken into RAM under it")


def read_rounds(blobs: Blobs, ram_bytes: int, num_rounds: int) -> float:
    # With so little RAM in the plan, reads go past the page cache, as on a machine that is full.
    small = open_experts(blobs, min(ram_bytes, GIB // 4), mode="budget", budget_bytes=0, expert_cache=0)
    random = np.random.default_rng(1)
    x, weights = torch.randn(1, LAYOUT.hidden), torch.ones(1, TOP_K)
    seconds = 0.0
    for _ in range(num_rounds):
        drop_cache(blobs.path)
        picks = [random.permutation(NUM_EXPERTS)[:TOP_K].astype(np.int32) for _ in range(blobs.num_layers)]
        started = time.perf_counter()
        for layer, ids in enumerate(picks):
            small.dispatcher(layer, x, torch.from_numpy(ids[None]), weights)
        seconds += time.perf_counter() - started
    read = small.statistics().file_bytes
    small.close()
    return read / seconds


def measure_peak(blobs: Blobs, ram_bytes: int) -> float:
    """Peak of resident memory while loading, over what is resident once ready."""
    Path("/proc/self/clear_refs").write_text("5")
    opened = open_experts(blobs, ram_bytes)
    peak, final = read_status("VmHWM"), read_status("VmRSS")
    opened.close()
    return peak / final


def run(blobs: Blobs, ram_bytes: int, repeats: int) -> dict[str, Figure]:
    nbytes = len(blobs.checksums) * BLOB_BYTES
    given, drive, pieces, memory, cold, warm, tier = [], [], [], [], [], [], []
    for _ in range(repeats):  # interleaved: the drive's own rate drifts, and a busy moment meets all of them
        given.append(make_memory_exist(min(3 * nbytes, ram_bytes // 2)))
        drive.append(max(nbytes / read_cold(blobs, direct) for direct in (False, True)))
        cold.append(load(blobs, ram_bytes, warm=False))
        read_sequentially(blobs.path, direct=False)
        warm.append(load(blobs, ram_bytes, warm=True))
        memory.append(copy_memory(1 << 29))
        pieces.append(read_experts(blobs))
        tier.append(file_tier(blobs, ram_bytes, 2))
    drive_rate, piece_rate, memory_rate = (statistics.median(rates) / 1e9 for rates in (drive, pieces, memory))
    return {
        "load_cold": measured([rate / 1e9 for rate in cold], "GB/s", ceiling=drive_rate),
        "load_warm": measured([rate / 1e9 for rate in warm], "GB/s", ceiling=memory_rate),
        "touch_of_new_memory": measured([rate / 1e9 for rate in given], "GB/s"),
        "file_tier_rate": measured([rate / 1e9 for rate in tier], "GB/s", ceiling=piece_rate),
        "load_peak_over_final": Figure(round(measure_peak(blobs, ram_bytes), 3), "ratio"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures loading and the file tier.")
    parser.add_argument("--machine", required=True, help="what this machine is called in benchmarks/results")
    parser.add_argument("--gib", type=float, default=3.0, help="size of the file of experts")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats; ceilings are medians as well")
    parser.add_argument("--folder", type=Path, help="where the file is written; default: the temporary folder")
    words = parser.parse_args()
    machine = probe_machine()
    pool.configure()
    command = f"python benchmarks/tiers.py --machine {words.machine} --gib {words.gib:g} --repeats {words.repeats}"
    try:
        with tempfile.TemporaryDirectory(dir=words.folder) as folder:
            figures = run(write_blobs(Path(folder), words.gib), machine.ram_available, words.repeats)
        about = {
            "cpu": machine.cpu_name,
            "cores": machine.num_cpus,
            "ram_gib": round(machine.ram_total / GIB, 1),
            "system": platform.system(),
        }
        record = Record(command, about, figures)
        record.write(record_path(RESULTS, words.machine, "tiers"))
    except StrataError as error:
        print(f"strata: error: {error}", file=sys.stderr)
        return error.exit_status
    for name, figure in figures.items():
        share = f", {figure.percent} % of {figure.ceiling:.2f}" if figure.ceiling else ""
        print(f"{name}: {figure.value:.2f} {figure.unit}{share}")
    print(record.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
