"""Creates .venv with the pinned packages and this checkout installed in it; does nothing when that is done already.

Lives in tools because it runs before there is an environment: the standard library of Python >= 3.11 and no more.
``--extra dev`` adds the oracles and linters of the tests; ``cuda`` is added by itself when an NVIDIA driver is found.
What was installed is kept in .venv/strata-environment.json, keyed by the hash of pyproject.toml, setup.py and
constraints.txt, so that a warm start needs no network and well under a second. ``--current`` only answers by status.
The system's pip configuration is used as it is and never changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "strata-environment.json"
KEYED = ("pyproject.toml", "setup.py", "constraints.txt")

# Downloads and disk in MB, measured with the pinned versions on Linux x86-64. A CUDA build of PyTorch brings NVIDIA's
# libraries as packages of their own; they are most of it.
SIZES_MB = {"cpu": (210, 850), "cuda": (3000, 7000), "base": (60, 280), "dev": (150, 590), "bench": (35, 110)}


def python_of(venv: Path) -> Path:
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def version_of(python: str | Path) -> str:
    """Version of another interpreter; empty if it does not run."""
    code = "import sys; print(sys.version.split()[0])"
    try:
        return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def key() -> str:
    digest = hashlib.sha256()
    for name in KEYED:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def has_driver() -> bool:
    """True where an NVIDIA driver is installed (its tool, its kernel module, or WSL's library)."""
    marks = (Path("/proc/driver/nvidia/version"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
    return shutil.which("nvidia-smi") is not None or any(mark.exists() for mark in marks)


def is_current(extras: set[str]) -> bool:
    if not STAMP.exists() or not python_of(VENV).exists():
        return False
    try:
        stamp = json.loads(STAMP.read_text())
    except ValueError:
        return False
    return bool(stamp.get("key") == key() and extras <= set(stamp.get("extras", ())))


def requirements(extras: set[str]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in sorted(extras):
        wanted += project["optional-dependencies"][extra]
    return wanted


def pip(*words: str) -> None:
    command = [str(python_of(VENV)), "-m", "pip", "--disable-pip-version-check", *words]
    result = subprocess.run(command, cwd=ROOT, check=False)
    if result.returncode:
        print(
            f"strata: error: pip ended with status {result.returncode}; its words are above\n"
            "  try: check the network and `pip config list`, then run the same command again",
            file=sys.stderr,
        )
        raise SystemExit(2)


def torch_build() -> str:
    """Which PyTorch pip would install: 'cuda' (needs NVIDIA's packages), 'cpu', or 'present' (nothing to do)."""
    wanted = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip("install", "-qq", "--dry-run", "--no-deps", "--report", str(report), wanted)
        chosen = json.loads(report.read_text())["install"]
    if not chosen:
        return "present"
    needs = [line for line in chosen[0]["metadata"].get("requires_dist", ()) if "extra ==" not in line]
    return "cuda" if any(line.lower().startswith(("nvidia-", "cuda-")) for line in needs) else "cpu"


def announce(extras: set[str]) -> None:
    """Says what comes and how large, and stops before downloading what the disk cannot hold."""
    build = torch_build()
    parts = [
        part
        for part in (build, "base", "dev", "bench")
        if part in SIZES_MB and (part in (build, "base") or part in extras)
    ]
    download = sum(SIZES_MB[part][0] for part in parts)
    disk = sum(SIZES_MB[part][1] for part in parts)
    words = {"cpu": "PyTorch for the CPU (about 0.2 GB)", "cuda": "a CUDA build of PyTorch (several GB)"}
    what = words.get(build, "PyTorch is there already")
    print(
        f"strata: installing into .venv: {what}; in all about {download} MB to download, {disk} MB on disk", flush=True
    )
    free = shutil.disk_usage(ROOT).free // 1_000_000
    if free < disk:
        print(
            f"strata: error: {free} MB of disk free here, about {disk} MB are needed\n"
            "  try: free some space, or clone on a larger disk",
            file=sys.stderr,
        )
        raise SystemExit(2)


def install(extras: set[str]) -> None:
    started = time.monotonic()
    if version_of(python_of(VENV)) != sys.version.split()[0]:  # none yet, broken, or made by another Python
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    STAMP.unlink(missing_ok=True)
    announce(extras)
    print("strata: installing packages, a minute or a few ...", flush=True)
    pip("install", "-qq", "--constraint", "constraints.txt", *requirements(extras))
    print("strata: compiling the native library, a minute or two ...", flush=True)
    # The build backend is pinned in the environment like all else, so nothing is fetched into a second one.
    pip("install", "-qq", "--no-deps", "--no-build-isolation", "--editable", ".")
    STAMP.write_text(json.dumps({"key": key(), "extras": sorted(extras)}) + "\n")
    print(f"strata: environment ready in {time.monotonic() - started:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml")
    parser.add_argument("--current", action="store_true", help="status 0 if nothing is to be done, else 1")
    words = parser.parse_args()
    extras = set(words.extra) | ({"cuda"} if has_driver() else set())
    if words.current:
        asked = os.environ.get("PYTHON")
        is_other = bool(asked) and version_of(str(asked)) != version_of(python_of(VENV))
        return 0 if is_current(extras) and not is_other else 1
    if not is_current(extras):
        install(extras)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
