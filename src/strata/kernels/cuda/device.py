"""A card that runs launches: kernels loaded whole, arguments packed, a list of launches captured as one graph.

Lives in ``kernels/cuda`` as the ``Machine`` of program.py. All kernels are loaded before the first launch, because a
kernel that is loaded while another waits for the CPU can wait for ever. It must not know what a launch computes, nor
whose memory it reads.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strata.errors import EngineError
from strata.kernels.cuda.compile import Compiled, compile_kernels, list_kernels
from strata.kernels.cuda.driver import CudaContext, ask
from strata.kernels.cuda.program import Address, Argument, Launch, TimedLaunch
from strata.paths import Home

__all__ = ["CapturedGraph", "CudaMachine", "Mark", "TimedLaunch", "pack_arguments"]

PLAIN_SHARED = 48 << 10  # bytes of dynamic shared memory that a block gets without asking
EMPTY_GRAPH_RUNS = 20
MOST_STAMPS = 1 << 12  # of a file: device.h
# Launches that may overlap (programmatic dependent launch): cards that can, and files whose kernels all wait by
# themselves for what the launch before has written (``device.h``: wait_for_previous).
OVERLAP_ARCHITECTURE = 90
_OVERLAPPING = frozenset(
    {"attention", "delta", "delta_step", "expert", "heads", "index", "linear", "pointwise", "round", "state", "streams"}
)


class PackedArguments:
    """Arguments of one launch as the driver takes them: an array of pointers to values. Owns both."""

    def __init__(self, arguments: Sequence[Argument]) -> None:
        self._values = [_pack(argument) for argument in arguments]
        self._pointers = (ctypes.c_void_p * max(1, len(self._values)))(*map(ctypes.addressof, self._values))
        self.address = ctypes.addressof(self._pointers)


def pack_arguments(arguments: Sequence[Argument]) -> PackedArguments:
    """By the rule of ``program.Argument``. A tensor's address is taken now: its storage must not move."""
    return PackedArguments(arguments)


class Mark:
    """A point of a stream with a time on the card's clock. Freed when it is collected."""

    def __init__(self, machine: CudaMachine, handle: Any) -> None:
        self._machine = machine
        self.handle = handle

    def milliseconds_until(self, later: Mark) -> float:
        """Waits for ``later``. Raises ``EngineError`` if anything before it failed."""
        driver = self._machine.context.driver
        self._machine.context.use()
        ask(driver.cuEventSynchronize(later.handle), "waiting for the card")
        return float(ask(driver.cuEventElapsedTime(self.handle, later.handle), "reading the card's clock"))

    def __del__(self) -> None:
        self._machine.context.driver.cuEventDestroy(self.handle)


class CapturedGraph:
    """Launches as one graph, ready to run. Keeps what they read alive; close it or let it be collected."""

    def __init__(self, machine: CudaMachine, handle: Any, launches: list[Launch]) -> None:
        self._machine = machine
        self._handle = handle
        self._launches = launches
        self.num_launches = len(launches)

    @property
    def handle(self) -> int:
        """The driver's CUgraphExec, for a native conductor."""
        return int(self._handle)

    def run(self) -> None:
        """Enqueues the graph on the machine's stream; returns before it is complete."""
        machine = self._machine
        machine.context.use()
        ask(machine.context.driver.cuGraphLaunch(self._handle, machine.stream), "starting a graph")

    def close(self) -> None:
        """Frees the graph; it must not be running."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._machine.context.driver.cuGraphExecDestroy(handle)
            self._launches = []

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()


class CudaMachine:
    """``program.Machine`` on a card. Owns its stream and the loaded modules; borrows the context.

    ``stream`` is a CUstream as an integer, ``torch_stream`` the same for ``torch.cuda.stream(...)``. Close once.
    """

    def __init__(self, context: CudaContext, home: Home | None = None, *, stamped: bool = False) -> None:
        """``stamped``: kernels note when they begin, for ``run_timed`` of another machine."""
        self.context = context
        self._defines = ("STRATA_STAMPED",) if stamped else ()
        self._stamped: CudaMachine | None = None
        self.device = torch.device("cuda", context.card.index)
        self.multiprocessors = context.card.multiprocessors
        self.cache_bytes = context.card.cache_bytes
        self._home = home
        self._compiled: dict[str, Compiled] = {}  # by unit
        self._modules: dict[str, list[Any]] = {}  # of a file: one, or one a part
        self._functions: dict[str, Any] = {}
        self._places: dict[str, tuple[str, int]] = {}  # of a function: its file and part
        self._granted_shared: dict[str, int] = {}
        self.load_ms = 0.0
        self.overlaps = context.card.architecture >= OVERLAP_ARCHITECTURE
        context.use()
        driver = context.driver
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = ask(driver.cuStreamCreate(int(flags)), "making a stream")
        self.stream = int(self._stream)

    @property
    def torch_stream(self) -> torch.cuda.Stream:
        make: Callable[..., torch.cuda.Stream] = torch.cuda.ExternalStream
        return make(self.stream, device=self.device)

    def compile_all(self) -> None:
        """Has the machine code of every kernel file at hand: what a start waits for happens at once, side by side."""
        self._compile(list_kernels())

    def _compile(self, names: Sequence[str]) -> None:
        known = {one.file for one in self._compiled.values()}
        card, new = self.context.card, [name for name in names if name not in known]
        if new:
            self._compiled |= compile_kernels(new, card.architecture, card.cuda, self._home, self._defines)

    def load(self, names: Sequence[str]) -> None:
        """Compiles or reads the kernel files ``names`` and loads them whole. Raises ``EngineError``."""
        missing = sorted(set(names) - set(self._modules))
        if not missing:
            return
        began = time.perf_counter()
        self._compile(missing)
        self.context.use()
        for name in missing:
            units = sorted(unit for unit, one in self._compiled.items() if one.file == name)
            self._modules[name] = []
            for unit in units:
                code = self._compiled[unit].image
                self._modules[name].append(ask(self.context.driver.cuModuleLoadData(code), f"loading {name}.cu"))
        self.load_ms += (time.perf_counter() - began) * 1000

    def function(self, kernel: str) -> Any:
        """The loaded function of "file.entry". Raises ``EngineError`` where the file has no such kernel."""
        if kernel not in self._functions:
            name, _, entry = kernel.partition(".")
            self.load([name])
            self.context.use()
            driver = self.context.driver
            self._places[kernel], found = self._find(name, entry)
            ask(driver.cuFuncLoad(found), f"loading {kernel}")  # never at its first launch: see the module's page
            self._functions[kernel] = found
        return self._functions[kernel]

    def _find(self, name: str, entry: str) -> tuple[tuple[str, int], Any]:
        """Which part of a file holds an entry, as (file, number), and the function."""
        driver, modules = self.context.driver, self._modules[name]
        for part, module in enumerate(modules):
            answer = driver.cuModuleGetFunction(module, entry.encode())
            if answer[0] != driver.CUresult.CUDA_ERROR_NOT_FOUND or part == len(modules) - 1:
                return (name, part), ask(answer, f"finding {name}.{entry}")
        raise AssertionError(f"{name}.cu was loaded without a module")

    def prepare(self, launches: list[Launch]) -> CapturedGraph:
        """Loads every kernel and captures the launches, in order, as one graph. Raises ``EngineError``."""
        self._ready(launches)
        return self._capture(launches)

    def _capture(self, launches: list[Launch]) -> CapturedGraph:
        driver = self.context.driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        ask(driver.cuStreamBeginCapture(self._stream, mode), "beginning a graph")
        try:
            for launch in launches:
                self._launch(launch)
        except BaseException:
            _, unfinished = driver.cuStreamEndCapture(self._stream)
            if unfinished is not None and int(unfinished):
                driver.cuGraphDestroy(unfinished)
            raise
        graph = ask(driver.cuStreamEndCapture(self._stream), "ending a graph")
        try:
            handle = ask(driver.cuGraphInstantiate(graph, 0), f"making a graph of {len(launches)} launches")
        finally:
            driver.cuGraphDestroy(graph)
        captured = CapturedGraph(self, handle, list(launches))
        ask(driver.cuGraphUpload(handle, self._stream), "loading a graph")
        self.synchronize()
        return captured

    def run_eagerly(self, launches: list[Launch]) -> None:
        """Enqueues the launches one by one; returns before they are complete."""
        self._ready(launches)
        for launch in launches:
            self._launch(launch)

    def run_timed(self, launches: list[Launch]) -> list[TimedLaunch]:
        """Runs the launches once and waits: where a round spends its time, while launches overlap as they do in rounds.

        A machine of its own has the same kernels, of which one block notes the card's clock when what it waits for is
        complete; a launch's time goes from there to the next one's. Raises ``EngineError`` where a kernel notes none.
        """
        if self._stamped is None:
            self._stamped = CudaMachine(self.context, self._home, stamped=True)
        self.synchronize()
        return self._stamped._time_once(launches)

    def _time_once(self, launches: list[Launch]) -> list[TimedLaunch]:
        graph = self.prepare([*launches, Launch("nothing.nothing", (1, 1, 1), 32, 0, ())])
        names = [*(launch.kernel for launch in launches), "nothing.nothing"]
        modules = [self._places[name] for name in names]  # each notes the times of its own kernels
        try:
            logs = {place: self._find_stamps(*place) for place in set(modules)}
            for count, _ in logs.values():
                self._copy_to(count, np.zeros(1, np.uint32))
            graph.run()
            self.synchronize()
            read = {place: self._read_stamps(*log) for place, log in logs.items()}
        finally:
            graph.close()
        for place, stamps in read.items():
            launched = modules.count(place)
            if len(stamps) != launched:
                raise EngineError(f"{place[0]}.cu noted {len(stamps)} times for {launched} launches")
        stamps_of = {place: iter(stamps.tolist()) for place, stamps in read.items()}
        times = [next(stamps_of[place]) for place in modules]
        return [
            TimedLaunch(launch.kernel, launch.grid, launch.block, (after - before) / 1000)
            for launch, (before, after) in zip(launches, pairwise(times), strict=True)
        ]

    def _find_stamps(self, name: str, part: int) -> tuple[int, int]:
        """Addresses of a module's count and of its times (``device.h``: STRATA_STAMPED)."""
        driver, found = self.context.driver, []
        for symbol in (b"stamp_count", b"stamps"):
            module = self._modules[name][part]
            found.append(ask(driver.cuModuleGetGlobal(module, symbol), f"finding what {name}.cu notes"))
        return int(found[0][0]), int(found[1][0])

    def _read_stamps(self, count: int, stamps: int) -> NDArray[np.uint64]:
        """Nanoseconds, in the order in which they were noted."""
        number = np.zeros(1, np.uint32)
        self._copy_from(count, number)
        times = np.zeros(min(int(number[0]), MOST_STAMPS), np.uint64)
        if times.size:
            self._copy_from(stamps, times)
        return times

    def _copy_to(self, address: int, values: NDArray[Any]) -> None:
        ask(self.context.driver.cuMemcpyHtoD(address, values.ctypes.data, values.nbytes), "writing to the card")

    def _copy_from(self, address: int, values: NDArray[Any]) -> None:
        ask(self.context.driver.cuMemcpyDtoH(values.ctypes.data, address, values.nbytes), "reading from the card")

    def mark(self) -> Mark:
        """A timed point of the stream, after everything enqueued so far."""
        self.context.use()
        driver = self.context.driver
        handle = ask(driver.cuEventCreate(0), "making an event")
        mark = Mark(self, handle)
        ask(driver.cuEventRecord(handle, self._stream), "recording an event")
        return mark

    def time_ms(self, run: Callable[[], None], repeats: int) -> list[float]:
        """Milliseconds on the card's clock of each of ``repeats`` calls that enqueue work on the stream."""
        run()  # the first is not counted: it pays for what is loaded at first use
        marks = [self.mark()]
        for _ in range(repeats):
            run()
            marks.append(self.mark())
        return [before.milliseconds_until(after) for before, after in pairwise(marks)]

    def empty_graph_ms(self, num_launches: int) -> float:
        """Median time of a graph of so many kernels that do nothing: what the launches of a round cost at least."""
        nothing = Launch("nothing.nothing", (1, 1, 1), 32, 0, ())
        graph = self.prepare([nothing] * num_launches)
        try:
            times = sorted(self.time_ms(graph.run, EMPTY_GRAPH_RUNS))
        finally:
            graph.close()
        return times[len(times) // 2]

    def synchronize(self) -> None:
        """Waits for everything on the stream. Raises ``EngineError`` if any of it failed."""
        self.context.use()
        ask(self.context.driver.cuStreamSynchronize(self._stream), "running on the card")

    def close(self) -> None:
        """Waits for what runs, then lets stream and modules go; graphs must be closed. May be called twice."""
        if self._stamped is not None:
            self._stamped.close()
            self._stamped = None
        if self._stream is None:
            return
        driver, stream = self.context.driver, self._stream
        self._stream = None
        self.context.use()
        driver.cuStreamSynchronize(stream)
        driver.cuStreamDestroy(stream)
        for modules in self._modules.values():
            for module in modules:
                driver.cuModuleUnload(module)
        self._modules.clear()
        self._functions.clear()
        self._places.clear()

    def _ready(self, launches: Sequence[Launch]) -> None:
        """Everything a launch needs that must not happen between launches: loading, and shared memory granted."""
        self.load(sorted({launch.kernel.partition(".")[0] for launch in launches}))
        most: dict[str, int] = {}
        for launch in launches:
            self.function(launch.kernel)
            most[launch.kernel] = max(most.get(launch.kernel, 0), launch.shared)
        self.context.use()
        for kernel, shared in most.items():
            if shared > max(PLAIN_SHARED, self._granted_shared.get(kernel, 0)):
                self._grant_shared(kernel, shared)

    def _grant_shared(self, kernel: str, shared: int) -> None:
        card, driver = self.context.card, self.context.driver
        if shared > card.max_shared:
            raise EngineError(
                f"{kernel} needs {shared:,} bytes of shared memory a block, {card.name} has {card.max_shared:,}",
                "use --device cpu",
            )
        kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ask(driver.cuFuncSetAttribute(self._functions[kernel], kind, shared), f"asking for shared memory of {kernel}")
        self._granted_shared[kernel] = shared

    def _launch(self, launch: Launch) -> None:
        packed = pack_arguments(launch.arguments)
        if self.overlaps and launch.kernel.partition(".")[0] in _OVERLAPPING:
            self._launch_early(launch, packed)
            return
        answer = self.context.driver.cuLaunchKernel(
            self._functions[launch.kernel], *launch.grid, launch.block, 1, 1, launch.shared, self._stream,
            packed.address, 0,
        )  # fmt: skip
        ask(answer, f"launching {launch.kernel} with {launch.grid} blocks of {launch.block} threads")

    def _launch_early(self, launch: Launch, packed: PackedArguments) -> None:
        """A launch that may begin before the one before it has ended: it waits by itself for what that one wrote."""
        driver = self.context.driver
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
        config.sharedMemBytes = launch.shared
        config.hStream = self._stream
        config.attrs = [attribute]
        config.numAttrs = 1
        answer = driver.cuLaunchKernelEx(config, self._functions[launch.kernel], packed.address, 0)
        ask(answer, f"launching {launch.kernel} with {launch.grid} blocks of {launch.block} threads")


def _pack(argument: Argument) -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_uint64(argument.data_ptr())
    if isinstance(argument, Address):
        return ctypes.c_uint64(argument)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    if isinstance(argument, int):
        assert -(2**31) <= argument < 2**32, f"{argument} is no 32-bit argument; an address is an Address"
        return ctypes.c_uint32(argument & 0xFFFFFFFF)
    assert isinstance(argument, ctypes.Structure), f"{type(argument).__name__} is no argument of a kernel"
    return argument
