"""Small mistakes put into a copy of the residency code, one at a time: each must be caught by this room's tests.

    python tests/experts/mutants.py [NUMBER ...]

Not part of the test run (a quarter of an hour); prints a line a mutant and `N of M caught` last.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/experts",
    "tests/faults/test_memory_faults.py",
    "tests/memory/test_page_lock.py",
    "tests/memory/test_locking.py",
)

# (file below src/strata, what stands there, what the mutant says)
MUTANTS: tuple[tuple[str, str, str], ...] = (
    (
        "experts/slots.py",
        'an owned slot is evicted first"\n        self.generation[slot] += 1\n',
        'an owned slot is evicted first"\n',
    ),
    ("experts/slots.py", "        self.slot_of[expert] = -1\n", ""),
    ("experts/slots.py", "        self.owner[slot] = NOBODY\n", ""),
    ("experts/store.py", "        self.alias[expert] = 0\n", ""),
    ("experts/store.py", "self.host_address[expert] = self._mapped[expert]", "pass"),
    ("experts/store.py", "        self.host_tier[expert] = self.base_tier\n", ""),
    (
        "experts/store.py",
        "self.memory.address + place * self.memory.stride",
        "self.memory.address + (place ^ 1) * self.memory.stride",
    ),
    ("experts/swaps.py", "if running.old_version >= oldest:", "if False:"),
    (
        "experts/swaps.py",
        "if running.loading is not None and not self._complete(running.loading, block):",
        "if False:",
    ),
    ("experts/swaps.py", "        if not self._complete(running.saving, block):\n            return False\n", ""),
    (
        "experts/swaps.py",
        "if store.place_of[victim] >= 0 or store.place_of[promoted] < 0:",
        "if store.place_of[promoted] < 0:",
    ),
    ("experts/swaps.py", "if store.place_of[victim] >= 0 or store.place_of[promoted] < 0:", "if True:"),
    (
        "experts/swaps.py",
        "self._store.give_place(running.swap.victim, running.place)",
        "self._store.give_place(running.swap.promoted, running.place)",
    ),
    ("experts/swaps.py", "        self.spares.append(slot)\n", ""),
    (
        "experts/swaps.py",
        "store.slots.slot_address(slot), running.place)",
        "store.slots.slot_address(running.spare), running.place)",
    ),
    ("experts/lender.py", "                slots.evict(slot)\n", "                pass\n"),
    ("experts/lender.py", "            self._mover.wait(move)\n            slots.admit", "            slots.admit"),
    ("experts/lender.py", "np.where(has_copy, 1, 2)", "np.where(has_copy, 2, 1)"),
    ("experts/lender.py", "if int(slot) not in keep", "if True"),
    (
        "experts/ring.py",
        "            try:\n                self._mover.wait(move)\n",
        "            try:\n                pass\n",
    ),
    (
        "experts/ring.py",
        "                yield batch\n",
        "                self._give_back(batch[:1])\n                self._start()\n                yield batch\n",
    ),
    ("experts/ring.py", "                self._give_back([*batch, move])\n", ""),
    ("experts/ring.py", "        del self._free[:count]\n", ""),
    ("experts/ring.py", "if expert not in self._expected", "if True"),
    ("experts/ring.py", "        self._drop_unwanted(left)\n", ""),
    (
        "experts/mover.py",
        "            event.synchronize()\n        self._draining.popleft()",
        "        self._draining.popleft()",
    ),
    ("experts/mover.py", "self.buffers.release(move.buffer, move.event)", "self.buffers.release(move.buffer)"),
    (
        "experts/mover.py",
        "return source_step == two.address - one.address == self._nbytes",
        "return source_step == self._nbytes",
    ),
    (
        "experts/mover.py",
        "return source_step == two.address - one.address == self._nbytes",
        "return two.address - one.address == self._nbytes",
    ),
    (
        "experts/mover.py",
        "if move.state is _State.UNLOADING and self._settle_ticket(move, block):",
        "if move.state is _State.UNLOADING:",
    ),
    (
        "experts/mover.py",
        "if move.state is _State.STAGING and self._settle_ticket(move, block):",
        "if move.state is _State.STAGING:",
    ),
    ("experts/mover.py", "if self._store.is_pinned(place):", "if True:"),
    ("experts/mover.py", "if self._store.host_tier[expert] != Tier.PINNED:", "if False:"),
    ("experts/loader.py", "    stager.wait(ticket)\n    reading.popleft()", "    reading.popleft()"),
    ("experts/loader.py", "            mover.wait(move)\n", ""),
    (
        "experts/dispatch.py",
        "                self._compute_moved(batch, task_of, work)\n                for move in batch:\n",
        "                for move in batch:\n",
    ),
    ("experts/dispatch.py", "        self._close_ring()\n        return None", "        return None"),
    ("experts/system.py", "        self.swaps.finish()\n        slots", "        slots"),
    ("experts/system.py", "        self._ring.settle()\n", ""),
    ("experts/system.py", "keep=set(self.swaps.spares)", "keep=set()"),
    (
        "experts/lender.py",
        "            self._lent.append((slot, expert))\n        self._store.version += 1\n",
        "            self._lent.append((slot, expert))\n",
    ),
    (
        "experts/lender.py",
        "            slots.admit(expert, slot)\n        self._store.version += 1\n",
        "            slots.admit(expert, slot)\n",
    ),
    ("memory/locked_memory.py", "first = -(-part.offset // self.stride)", "first = part.offset // self.stride"),
    (
        "memory/locked_memory.py",
        "(part.offset + part.nbytes) // self.stride)",
        "-(-(part.offset + part.nbytes) // self.stride))",
    ),
    ("memory/page_lock.py", "if start == first else start * stride // page * page", "if True else 0"),
    (
        "memory/page_lock.py",
        "self.num_cuts, refusal)\n                    break",
        "self.num_cuts, refusal)\n                    continue",
    ),
    ("memory/locked_memory.py", "            part.registration.unregister()\n", "            pass\n"),
    ("memory/locked_memory.py", "min(self.num_places, offset // self.stride)", "self.num_places"),
    ("memory/locked_memory.py", "        self._closing.set()\n        self._join()\n", ""),
    ("memory/locked_memory.py", "                    self._error = error\n", "                    pass\n"),
    ("memory/page_lock.py", "                touching.wait(number)\n", ""),
    (
        "memory/page_lock.py",
        "                memory.open_below(offset)\n",
        "                memory.open_below(offset + nbytes)\n",
    ),
    ("memory/touching.py", "self._pool.shutdown(cancel_futures=True)", "self._pool.shutdown(wait=False)"),
    ("experts/loader.py", "                open_places = store.memory.wait_for(place)\n", "                pass\n"),
)


def run_tests(source: Path) -> bool:
    """Whether the tests pass on the package below ``source``."""
    environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--timeout=60"]
    done = subprocess.run(
        [*command, *TESTS], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    return done.returncode == 0


def try_mutant(number: int) -> bool:
    """Whether the mutant is caught."""
    name, before, after = MUTANTS[number]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / "strata" / name
        text = path.read_text()
        assert text.count(before) >= 1, f"mutant {number}: {name} no longer holds {before!r}"
        path.write_text(text.replace(before, after, 1))
        return not run_tests(copy)


def main() -> int:
    numbers = [int(word) for word in sys.argv[1:]] or list(range(len(MUTANTS)))
    caught = 0
    for number in numbers:
        result = try_mutant(number)
        caught += result
        name, before, after = MUTANTS[number]
        print(f"{number:3} {'caught' if result else 'ALIVE '} {name}: {before!r} -> {after!r}", flush=True)
    print(f"{caught} of {len(numbers)} caught")
    return 0 if caught == len(numbers) else 1


if __name__ == "__main__":
    sys.exit(main())
