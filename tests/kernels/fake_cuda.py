"""NVIDIA's Python packages without a card: the calls that Strata makes, over RAM, failing on purpose.

Names and order of parameters are those of cuda.bindings 13.0 (a test compares them). Device memory is RAM, a kernel is
a Python function, work runs when it is enqueued; within a capture it is recorded, with its arguments copied then.
"""

from __future__ import annotations

import ctypes
import enum
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from strata.kernels.cuda import compile as compiling

Result = tuple[Any, ...]


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_DEINITIALIZED = 4
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803


class nvrtcResult(enum.IntEnum):  # noqa: N801 - the packages' own name
    NVRTC_SUCCESS = 0
    NVRTC_ERROR_COMPILATION = 6


class CUdevice_attribute(enum.IntEnum):  # noqa: N801
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT = 17
    CU_DEVICE_ATTRIBUTE_INTEGRATED = 18
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38


class CUfunction_attribute(enum.IntEnum):  # noqa: N801
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class CUstream_flags(enum.IntEnum):  # noqa: N801
    CU_STREAM_NON_BLOCKING = 1


class CUevent_flags(enum.IntEnum):  # noqa: N801
    CU_EVENT_DISABLE_TIMING = 2


class CUstreamCaptureMode(enum.IntEnum):
    CU_STREAM_CAPTURE_MODE_RELAXED = 2


class CUmemcpySrcAccessOrder(enum.IntEnum):
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1


class CUmemcpyAttributes:
    srcAccessOrder: CUmemcpySrcAccessOrder


class CUdeviceptr(int):
    pass


class CUmemAllocationType(enum.IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(enum.IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAllocationGranularity_flags(enum.IntEnum):  # noqa: N801
    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1


class CUmemAccess_flags(enum.IntEnum):  # noqa: N801
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationProp:
    def __init__(self) -> None:
        self.type = 0
        self.location = SimpleNamespace(type=0, id=0)


class CUmemAccessDesc:
    def __init__(self) -> None:
        self.flags = 0
        self.location = SimpleNamespace(type=0, id=0)


ENUMS = (
    CUresult, CUdevice_attribute, CUfunction_attribute, CUstream_flags, CUevent_flags,
    CUstreamCaptureMode,
    CUmemcpySrcAccessOrder, CUmemAllocationType, CUmemLocationType, CUmemAllocationGranularity_flags,
    CUmemAccess_flags,
)  # fmt: skip


@dataclass
class Kernel:
    """``types``: ctypes of its arguments. ``run(grid, block, *values)``; None: an access to no memory."""

    types: tuple[Any, ...]
    run: Callable[..., None] | None


@dataclass
class FakeCard:
    name: bytes = b"Fake 9000"
    architecture: tuple[int, int] = (9, 0)
    memory_total: int = 1 << 30
    memory_free: int = 900 << 20
    max_shared: int = 232_448
    cache_bytes: int = 50 << 20
    timeout: int = 0
    integrated: int = 0
    contexts: int = 0


@dataclass
class _Stream:
    error: CUresult = CUresult.CUDA_SUCCESS
    capture: list[Callable[[], None]] | None = None
    pending: int = 0  # queries that still find the stream busy


class _Stamps:
    """What the kernels of a module note."""

    def __init__(self) -> None:
        self.count = ctypes.c_uint32()
        self.times = (ctypes.c_uint64 * 16)()

    def note(self, nanoseconds: int) -> None:
        self.times[self.count.value] = nanoseconds
        self.count.value += 1


@dataclass
class FakeCuda:
    """State of the machine; set it before or while the code under test runs. ``calls`` names every call made."""

    cards: list[FakeCard] = field(default_factory=lambda: [FakeCard()])
    driver_version: int = 13000
    has_driver: bool = True
    has_compiler: bool = True
    init_status: CUresult = CUresult.CUDA_SUCCESS
    compile_log: bytes = b""  # not empty: the source does not compile
    compiler: tuple[int, int] = (13, 0)
    unaligned: bool = False  # small allocations lie at odd 512 bytes
    refuse_pins_after: int | None = None  # page-locked bytes beyond this are refused
    refuse_status: CUresult = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    no_alias: bool = False
    busy_queries: int = 0
    kernels: dict[str, Kernel] = field(default_factory=lambda: {"nothing": Kernel((), lambda grid, block: None)})
    calls: list[str] = field(default_factory=list)
    compiled: list[tuple[bytes, tuple[bytes, ...], tuple[bytes, ...]]] = field(default_factory=list)
    maps_memory: bool = True
    ranges: dict[int, Any] = field(default_factory=dict)
    created: dict[int, int] = field(default_factory=dict)  # bytes by handle
    mapped: dict[int, int] = field(default_factory=dict)  # bytes by address
    device_memory: dict[int, Any] = field(default_factory=dict)
    pinned: dict[int, int] = field(default_factory=dict)
    host_memory: dict[int, Any] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)  # kernels that note no time
    loaded: list[str] = field(default_factory=list)
    live: dict[str, int] = field(default_factory=dict)  # of modules, streams, events, graphs

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._graphs: dict[int, list[Callable[[], None]]] = {}
        self._programs: dict[int, list[bytes]] = {}
        self._options: dict[int, list[bytes]] = {}
        self._stamps: dict[int, _Stamps] = {}
        self._clock = 0.0
        self._events: dict[int, tuple[float, CUresult, int]] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        """Takes the place of the packages, and of a PyTorch that is built with CUDA."""
        driver, nvrtc = ModuleType("cuda.bindings.driver"), ModuleType("cuda.bindings.nvrtc")
        constants = {
            "CU_MEMHOSTALLOC_PORTABLE": 1,
            "CU_MEMHOSTALLOC_DEVICEMAP": 2,
            "CU_MEMHOSTREGISTER_PORTABLE": 1,
            "CU_MEMHOSTREGISTER_DEVICEMAP": 2,
        }
        vars(driver).update(
            {
                kind.__name__: kind
                for kind in (*ENUMS, CUmemcpyAttributes, CUmemAllocationProp, CUmemAccessDesc, CUdeviceptr)
            }
            | constants
        )
        for module, prefix in ((driver, "cu"), (nvrtc, "nvrtc")):
            for name, method in inspect.getmembers(self, inspect.ismethod):
                if name.startswith(prefix) and name[len(prefix)].isupper():
                    setattr(module, name, self._counted(name, method))
        bindings = ModuleType("cuda.bindings")
        vars(bindings).update(driver=driver, nvrtc=nvrtc, __path__=[])
        cuda = ModuleType("cuda")
        vars(cuda).update(bindings=bindings, __path__=[])
        modules = {"cuda": cuda, "cuda.bindings": bindings}
        modules |= {"cuda.bindings.driver": driver, "cuda.bindings.nvrtc": nvrtc}
        for name, module in modules.items():
            monkeypatch.setitem(__import__("sys").modules, name, module)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(compiling, "start_compiler", compiling.InThisProcess)
        return self

    def _counted(self, name: str, method: Callable[..., Result]) -> Callable[..., Result]:
        def call(*arguments: Any) -> Result:
            self.calls.append(name)
            if name.startswith("nvrtc") and not self.has_compiler:
                raise RuntimeError('Failure finding "libnvrtc.so.13": No such file: libnvrtc.so.13, No such file: x')
            if not name.startswith("nvrtc") and not self.has_driver:
                raise RuntimeError("Failed to dlopen libcuda.so.1")
            return method(*arguments)

        return call

    def _new(self, kind: str) -> int:
        self.live[kind] = self.live.get(kind, 0) + 1
        return next(self._numbers)

    def _end(self, kind: str) -> Result:
        self.live[kind] -= 1
        assert self.live[kind] >= 0, f"a {kind} is ended twice"
        return (CUresult.CUDA_SUCCESS,)

    # The driver: what there is.
    def cuDriverGetVersion(self) -> Result:
        return CUresult.CUDA_SUCCESS, self.driver_version

    def cuInit(self, Flags: int) -> Result:
        if not self.cards and self.init_status == 0:
            return (CUresult.CUDA_ERROR_NO_DEVICE,)
        return (self.init_status,)

    def cuGetErrorString(self, error: CUresult) -> Result:
        return CUresult.CUDA_SUCCESS, f"words of {error.name[11:].lower().replace('_', ' ')}".encode()

    def cuDeviceGetCount(self) -> Result:
        return CUresult.CUDA_SUCCESS, len(self.cards)

    def cuDeviceGet(self, ordinal: int) -> Result:
        if ordinal >= len(self.cards):
            return CUresult.CUDA_ERROR_INVALID_DEVICE, None
        return CUresult.CUDA_SUCCESS, ordinal

    def cuDeviceGetName(self, length: int, dev: int) -> Result:
        return CUresult.CUDA_SUCCESS, self.cards[dev].name.ljust(length, b"\0")

    def cuDeviceGetPCIBusId(self, length: int, dev: int) -> Result:
        return CUresult.CUDA_SUCCESS, f"0000:{dev + 1:02x}:00.0".encode().ljust(length, b"\0")

    def cuDeviceTotalMem(self, dev: int) -> Result:
        return CUresult.CUDA_SUCCESS, self.cards[dev].memory_total

    def cuDeviceGetAttribute(self, attrib: CUdevice_attribute, dev: int) -> Result:
        card = self.cards[dev]
        values = {
            CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 12,
            CUdevice_attribute.CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT: card.timeout,
            CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED: card.integrated,
            CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: card.architecture[0],
            CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: card.architecture[1],
            CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: card.max_shared,
            CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: card.cache_bytes,
        }
        return CUresult.CUDA_SUCCESS, values[attrib]

    def cuDevicePrimaryCtxRetain(self, dev: int) -> Result:
        self.cards[dev].contexts += 1
        return CUresult.CUDA_SUCCESS, 1000 + dev

    def cuDevicePrimaryCtxRelease(self, dev: int) -> Result:
        self.cards[dev].contexts -= 1
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxSetCurrent(self, ctx: int) -> Result:
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxSynchronize(self) -> Result:
        return (max((stream.error for stream in self._streams.values()), default=CUresult.CUDA_SUCCESS),)

    # Memory. The first card's only.
    def cuMemGetInfo(self) -> Result:
        return CUresult.CUDA_SUCCESS, self.cards[0].memory_free, self.cards[0].memory_total

    def cuMemAlloc(self, bytesize: int) -> Result:
        if bytesize > self.cards[0].memory_free:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        self.cards[0].memory_free -= bytesize
        raw = (ctypes.c_uint8 * (bytesize + 8192))()
        address = -(-ctypes.addressof(raw) // 4096) * 4096 + (512 if self.unaligned else 0)
        self.device_memory[address] = (raw, bytesize)
        return CUresult.CUDA_SUCCESS, CUdeviceptr(address)

    # Address ranges and the memory behind them.
    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> Result:
        return CUresult.CUDA_SUCCESS, 4096

    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> Result:
        self._new("range")
        raw = (ctypes.c_uint8 * (size + 8192))()
        address = -(-ctypes.addressof(raw) // 4096) * 4096
        self.ranges[address] = (raw, size)
        return CUresult.CUDA_SUCCESS, CUdeviceptr(address)

    def cuMemAddressFree(self, ptr: int, size: int) -> Result:
        assert self.ranges.pop(ptr)[1] == size
        assert not any(ptr <= at < ptr + size for at in self.mapped), "memory is mapped still"
        return self._end("range")

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> Result:
        if not self.maps_memory:
            return CUresult.CUDA_ERROR_NOT_SUPPORTED, 0
        if size > self.cards[0].memory_free:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        self.cards[0].memory_free -= size
        handle = self._new("mapped memory")
        self.created[handle] = size
        return CUresult.CUDA_SUCCESS, handle

    def cuMemMap(self, ptr: int, size: int, offset: int, handle: int, flags: int) -> Result:
        assert self.created[handle] == size
        assert ptr not in self.mapped
        self.mapped[ptr] = size
        return (CUresult.CUDA_SUCCESS,)

    def cuMemSetAccess(self, ptr: int, size: int, desc: Any, count: int) -> Result:
        assert len(desc) == count == 1
        assert sum(n for at, n in self.mapped.items() if ptr <= at < ptr + size) == size, "a hole in a range"
        return (CUresult.CUDA_SUCCESS,)

    def cuMemUnmap(self, ptr: int, size: int) -> Result:
        assert self.mapped.pop(ptr) == size
        ctypes.memset(ptr, 0xEE, size)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemRelease(self, handle: int) -> Result:
        self.cards[0].memory_free += self.created.pop(handle)
        return self._end("mapped memory")

    def cuMemFree(self, dptr: int) -> Result:
        _, nbytes = self.device_memory.pop(int(dptr))
        self.cards[0].memory_free += nbytes
        return (CUresult.CUDA_SUCCESS,)

    def _pin(self, nbytes: int) -> CUresult:
        limit = self.refuse_pins_after
        if limit is not None and sum(self.pinned.values()) + nbytes > limit:
            return self.refuse_status
        return CUresult.CUDA_SUCCESS

    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> Result:
        status = self._pin(bytesize)
        if status:
            return status, None
        raw = (ctypes.c_uint8 * (bytesize + 4096))()
        address = -(-ctypes.addressof(raw) // 4096) * 4096
        self.host_memory[address] = raw
        self.pinned[address] = bytesize
        return CUresult.CUDA_SUCCESS, address

    def cuMemFreeHost(self, p: int) -> Result:
        del self.pinned[p], self.host_memory[p]
        return (CUresult.CUDA_SUCCESS,)

    def cuMemHostRegister(self, p: int, bytesize: int, Flags: int) -> Result:
        if p in self.pinned:
            return (CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
        status = self._pin(bytesize)
        if not status:
            self.pinned[p] = bytesize
        return (status,)

    def cuMemHostUnregister(self, p: int) -> Result:
        del self.pinned[p]
        return (CUresult.CUDA_SUCCESS,)

    def cuMemHostGetDevicePointer(self, p: int, Flags: int) -> Result:
        if self.no_alias:
            return CUresult.CUDA_ERROR_INVALID_VALUE, 0
        return CUresult.CUDA_SUCCESS, CUdeviceptr(p)

    # Streams, events, copies.
    def cuStreamCreate(self, Flags: int) -> Result:
        assert Flags == CUstream_flags.CU_STREAM_NON_BLOCKING
        handle = self._new("stream")
        self._streams[handle] = _Stream()
        return CUresult.CUDA_SUCCESS, handle

    def cuStreamDestroy(self, hStream: int) -> Result:
        del self._streams[int(hStream)]
        return self._end("stream")

    def cuStreamSynchronize(self, hStream: int) -> Result:
        return (self._streams[int(hStream)].error,)

    def cuStreamWaitEvent(self, hStream: int, hEvent: int, Flags: int) -> Result:
        return (CUresult.CUDA_SUCCESS,)

    def cuEventCreate(self, Flags: int) -> Result:
        return CUresult.CUDA_SUCCESS, self._new("event")

    def cuEventDestroy(self, hEvent: int) -> Result:
        return self._end("event")

    def cuEventRecord(self, hEvent: int, hStream: int) -> Result:
        self._clock += 1.0
        self._events[hEvent] = (self._clock, self._streams[int(hStream)].error, self.busy_queries)
        return (CUresult.CUDA_SUCCESS,)

    def cuEventQuery(self, hEvent: int) -> Result:
        at, error, busy = self._events[hEvent]
        if busy:
            self._events[hEvent] = (at, error, busy - 1)
            return (CUresult.CUDA_ERROR_NOT_READY,)
        return (error,)

    def cuEventSynchronize(self, hEvent: int) -> Result:
        return (self._events[hEvent][1],)

    def cuEventElapsedTime(self, hStart: int, hEnd: int) -> Result:
        return CUresult.CUDA_SUCCESS, self._events[hEnd][0] - self._events[hStart][0]

    def cuMemcpyAsync(self, dst: int, src: int, ByteCount: int, hStream: int) -> Result:
        ctypes.memmove(int(dst), int(src), ByteCount)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyHtoD(self, dstDevice: int, srcHost: int, ByteCount: int) -> Result:
        ctypes.memmove(int(dstDevice), int(srcHost), ByteCount)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyDtoH(self, dstHost: int, srcDevice: int, ByteCount: int) -> Result:
        ctypes.memmove(int(dstHost), int(srcDevice), ByteCount)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyBatchAsync(
        self, dsts: list[int], srcs: list[int], sizes: list[int], count: int, attrs: list[CUmemcpyAttributes],
        attrsIdxs: list[int], numAttrs: int, hStream: int,
    ) -> Result:  # fmt: skip
        assert all(isinstance(one, CUdeviceptr) for one in (*dsts, *srcs))
        assert len(attrs) == len(attrsIdxs) == numAttrs
        assert len(dsts) == len(srcs) == len(sizes) == count
        for dst, src, size in zip(dsts, srcs, sizes, strict=True):
            ctypes.memmove(dst, src, size)
        return (CUresult.CUDA_SUCCESS,)

    # Kernels and graphs.
    def cuModuleLoadData(self, image: bytes) -> Result:
        if not image.startswith(b"machine code"):
            return CUresult.CUDA_ERROR_INVALID_IMAGE, None
        handle = self._new("module")
        if b"STRATA_STAMPED" in image:
            self._stamps[handle] = _Stamps()
        return CUresult.CUDA_SUCCESS, handle

    def cuModuleUnload(self, hmod: int) -> Result:
        return self._end("module")

    def cuModuleGetFunction(self, hmod: int, name: bytes) -> Result:
        if name.decode() not in self.kernels:
            return CUresult.CUDA_ERROR_NOT_FOUND, None
        return CUresult.CUDA_SUCCESS, SimpleNamespace(name=name.decode(), module=hmod)

    def forget_stamps(self) -> None:
        """The module that was loaded last has none from now on."""
        self._stamps.pop(max(self._stamps))

    def cuModuleGetGlobal(self, hmod: int, name: bytes) -> Result:
        if hmod not in self._stamps:
            return CUresult.CUDA_ERROR_NOT_FOUND, None, None
        stamps = self._stamps[hmod]
        values: Any = {b"stamp_count": stamps.count, b"stamps": stamps.times}[name]
        return CUresult.CUDA_SUCCESS, CUdeviceptr(ctypes.addressof(values)), ctypes.sizeof(values)

    def cuFuncLoad(self, function: Any) -> Result:
        self.loaded.append(function.name)
        return (CUresult.CUDA_SUCCESS,)

    def cuFuncSetAttribute(self, hfunc: Any, attrib: CUfunction_attribute, value: int) -> Result:
        self.shared[hfunc.name] = value
        return (CUresult.CUDA_SUCCESS,)

    def cuLaunchKernel(
        self, f: Any, gridDimX: int, gridDimY: int, gridDimZ: int, blockDimX: int, blockDimY: int, blockDimZ: int,
        sharedMemBytes: int, hStream: int, kernelParams: int, extra: int,
    ) -> Result:  # fmt: skip
        if sharedMemBytes > self.shared.get(f.name, 48 << 10) or blockDimX > 1024:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        kernel, stream = self.kernels[f.name], self._streams[int(hStream)]
        pointers = (ctypes.c_void_p * max(1, len(kernel.types))).from_address(kernelParams)
        values = [
            kind.from_buffer_copy(ctypes.string_at(pointer, ctypes.sizeof(kind)))
            for kind, pointer in zip(kernel.types, pointers, strict=False)
        ]
        grid = (gridDimX, gridDimY, gridDimZ)

        def work() -> None:
            if f.module in self._stamps and f.name not in self.silent:
                self._clock += 1.0
                self._stamps[f.module].note(1_000_000 * int(self._clock))
            if kernel.run is None:
                stream.error = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
            else:
                kernel.run(grid, blockDimX, *(getattr(value, "value", value) for value in values))

        if stream.capture is None:
            work()
        else:
            stream.capture.append(work)
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamBeginCapture(self, hStream: int, mode: CUstreamCaptureMode) -> Result:
        assert mode == CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._streams[int(hStream)].capture = []
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamEndCapture(self, hStream: int) -> Result:
        stream = self._streams[int(hStream)]
        assert stream.capture is not None
        handle = self._new("graph")
        self._graphs[handle], stream.capture = stream.capture, None
        return CUresult.CUDA_SUCCESS, handle

    def cuGraphInstantiate(self, hGraph: int, flags: int) -> Result:
        handle = self._new("graph")
        self._graphs[handle] = self._graphs[hGraph]
        return CUresult.CUDA_SUCCESS, handle

    def cuGraphUpload(self, hGraphExec: int, hStream: int) -> Result:
        return (CUresult.CUDA_SUCCESS,)

    def cuGraphLaunch(self, hGraphExec: int, hStream: int) -> Result:
        for work in self._graphs[hGraphExec]:
            work()
        return (CUresult.CUDA_SUCCESS,)

    def cuGraphDestroy(self, hGraph: int) -> Result:
        return self._end("graph")

    def cuGraphExecDestroy(self, hGraphExec: int) -> Result:
        return self._end("graph")

    # The compiler.
    def nvrtcVersion(self) -> Result:
        return (nvrtcResult.NVRTC_SUCCESS, *self.compiler)

    def nvrtcCreateProgram(
        self, src: bytes, name: bytes, numHeaders: int, headers: list[bytes], includeNames: list[bytes]
    ) -> Result:
        assert numHeaders == len(headers) == len(includeNames)
        handle = next(self._numbers)
        self._programs[handle] = [src, *includeNames]
        return nvrtcResult.NVRTC_SUCCESS, handle

    def nvrtcCompileProgram(self, prog: int, numOptions: int, options: list[bytes]) -> Result:
        assert numOptions == len(options)
        if self.compile_log:
            return (nvrtcResult.NVRTC_ERROR_COMPILATION,)
        source, *names = self._programs[prog]
        self._options[prog] = [one for one in options if b"define" in one]
        self.compiled.append((source, tuple(names), tuple(options)))
        return (nvrtcResult.NVRTC_SUCCESS,)

    def nvrtcGetProgramLogSize(self, prog: int) -> Result:
        return nvrtcResult.NVRTC_SUCCESS, len(self.compile_log) + 1

    def nvrtcGetProgramLog(self, prog: int, log: bytes) -> Result:
        _overwrite(log, self.compile_log + b"\0")
        return (nvrtcResult.NVRTC_SUCCESS,)

    def nvrtcGetCUBINSize(self, prog: int) -> Result:
        return nvrtcResult.NVRTC_SUCCESS, len(self._image(prog))

    def nvrtcGetCUBIN(self, prog: int, cubin: bytes) -> Result:
        _overwrite(cubin, self._image(prog))
        return (nvrtcResult.NVRTC_SUCCESS,)

    def nvrtcDestroyProgram(self, prog: int) -> Result:
        del self._programs[prog]
        return (nvrtcResult.NVRTC_SUCCESS,)

    def _image(self, prog: int) -> bytes:
        return b"machine code of " + b" ".join([*self._options[prog], self._programs[prog][0][:64]])


def _overwrite(target: bytes, content: bytes) -> None:
    """Writes into a bytes object, as the bindings do with buffers that they are given."""
    assert len(target) >= len(content)
    start = bytes.__basicsize__ - 1  # the characters follow the header
    ctypes.memmove(id(target) + start, content, len(content))


def parameters(call: Callable[..., Any]) -> list[str]:
    """Names of a binding's parameters from the first line of its description: 'cuMemFree(dptr)', types left out."""
    head = (call.__doc__ or "").strip().splitlines()[0]
    inside = head.partition("(")[2].rpartition(")")[0]
    depth, words, word = 0, [], ""
    for letter in inside + ",":
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            words.append(word)
            word = ""
        else:
            word += letter
    names = [one.partition(":")[0].partition("=")[0].split() for one in words]
    return [name[-1].lstrip("*") for name in names if name]
