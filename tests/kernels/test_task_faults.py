"""A fault of memory in a native task is an error of its call and the pool goes on; one anywhere else ends the process.

Each case runs in a process of its own: what goes wrong here ends it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import ctypes, mmap, os, signal, sys, threading, time
import numpy as np, torch
from strata.errors import EngineError
from strata.kernels.cpu import library, pool
from strata.kernels.cpu.checksum import checksum_at
from strata.kernels.cpu.experts import ExpertKernel, group_picks
from strata.quant import ExpertLayout

pool.configure(int(sys.argv[2]))
layout = ExpertLayout(256, 128, "nvfp4")
random = torch.Generator().manual_seed(0)
EXPERTS = 24
shapes = ((128, 256), (128, 256), (256, 128))
blobs, scales = layout.pack_weights(*(torch.randn(EXPERTS, *shape, generator=random) for shape in shapes))
with open(sys.argv[1], "wb") as file:
    file.write(blobs.numpy().tobytes())
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
    kept = mmap.mmap(-1, blobs.numel())
    kept[:] = mapped[:]
x = torch.randn(3, 256, generator=random)
kernel = ExpertKernel(layout)

def address_of(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))

def compute(start, stride=layout.blob_bytes):
    tasks = group_picks(np.tile(np.arange(EXPERTS, dtype=np.int32), (3, 1)))
    tasks.place(np.uint64(start) + np.arange(EXPERTS, dtype=np.uint64) * np.uint64(stride), scales.numpy())
    out = torch.zeros(3, EXPERTS, 256)
    kernel.compute(tasks, x, out)
    return out

def refused(call):
    try:
        call()
    except EngineError as error:
        return str(error)
    raise SystemExit("no error")

wanted = compute(address_of(kept))
assert torch.equal(compute(address_of(mapped)), wanted)
"""

CUT = """
os.truncate(sys.argv[1], 5 * layout.blob_bytes + 4096)
for _ in range(40):
    words = refused(lambda: compute(address_of(mapped)))
    assert "blobs.bin cannot be read at byte " in words and "it was cut" in words and "restore the file" in words, words
    byte = int(words.split("at byte ")[1].split(":")[0])
    assert 5 * layout.blob_bytes + 4096 <= byte < blobs.numel(), words
    assert torch.equal(compute(address_of(kept)), wanted)
with pool.measure_busy() as seconds:  # every thread still works
    until = time.monotonic() + 120
    while not all(seconds()) and time.monotonic() < until:
        compute(address_of(kept))
    assert len(seconds()) == pool.threads() and all(seconds()), seconds()
words = refused(lambda: checksum_at(address_of(mapped), blobs.numel()))
assert "blobs.bin cannot be read" in words, words
assert checksum_at(address_of(kept), 4096) == checksum_at(address_of(mapped), 4096)
"""

UNMAPPED = """
for _ in range(40):
    words = refused(lambda: compute(0x1000, 0))
    assert "touched address 0x" in words and "start Strata again" in words, words
    assert torch.equal(compute(address_of(kept)), wanted)
total, add = ctypes.c_uint64(), library.declare("strata_memory_sum", ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p)
for nbytes in (64, 64 << 20):  # one slice on the caller, and many
    words = refused(lambda: library.check(add(0x1000, nbytes, ctypes.byref(total))))
    assert "touched address 0x" in words, words
pool.configure(2)
assert torch.equal(compute(address_of(kept)), wanted)
"""

MANY_CALLERS = """
found = []
def caller(number):
    for _ in range(20):
        if number % 2:
            found.append("touched address" in refused(lambda: compute(0x1000, 0)))
        else:
            found.append(torch.equal(compute(address_of(kept)), wanted))
callers = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
for one in callers: one.start()
for one in callers: one.join()
assert len(found) == 80 and all(found), found
"""

# Without torch, whose import is most of such a process's time.
OUTSIDE = """
import ctypes, mmap, os, signal, sys, threading
from strata.errors import EngineError
from strata.kernels.cpu import library, pool

pool.configure(2)
add = library.declare("strata_memory_sum", ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p)
try:
    library.check(add(0x1000, 64 << 20, ctypes.byref(ctypes.c_uint64())))
except EngineError:
    print("before", flush=True)
{}
print("after")
"""
CUT_OUTSIDE = """
with open(sys.argv[1], "w+b") as file:
    file.truncate(8192)
    mapped = mmap.mmap(file.fileno(), 0)
    os.truncate(sys.argv[1], 0)
    mapped[0]
"""
IN_A_THREAD = "threading.Thread(target=ctypes.string_at, args=(0x1000,)).start(); threading.Event().wait(60)"


def run(tmp_path: Path, text: str, *words: str, trace: bool = False) -> subprocess.CompletedProcess[str]:
    options = ("-X", "faulthandler") if trace else ()
    command = [sys.executable, *options, "-c", text, str(tmp_path / "blobs.bin"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(("threads", "trace"), [(1, False), (3, False), (3, True)])
def test_a_fault_is_an_error_of_its_call_alone(tmp_path: Path, threads: int, trace: bool) -> None:
    done = run(tmp_path, CHILD + CUT + UNMAPPED + MANY_CALLERS, str(threads), trace=trace)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("ctypes.string_at(0x1000)", signal.SIGSEGV),
        (CUT_OUTSIDE, signal.SIGBUS),
        ("os.kill(os.getpid(), signal.SIGSEGV)", signal.SIGSEGV),
        (IN_A_THREAD, signal.SIGSEGV),
    ],
    ids=["no memory", "cut file", "sent", "thread"],
)
@pytest.mark.parametrize("trace", [False, True])
def test_a_fault_outside_of_a_task_ends_the_process_as_before(
    tmp_path: Path, what: str, number: int, trace: bool
) -> None:
    done = run(tmp_path, OUTSIDE.format(what), trace=trace)
    assert done.returncode == -number, (done.returncode, done.stderr)
    assert done.stdout == "before\n"
    assert ("Fatal Python error" in done.stderr) == trace, done.stderr
