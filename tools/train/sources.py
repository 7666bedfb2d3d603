"""Where the training text comes from: packages, their licences, and which files of them may be read.

Lives beside the corpus builder because only it asks. A source is the standard library of the running Python, a
package installed beside it, or a wheel in the cache folder. Whatever has no plainly permissive licence in its own
metadata is left out whole; vendored, generated, minified, table-like or secret-bearing files are left out one by one.
Knows nothing of tokens or of the model.
"""

from __future__ import annotations

import email.parser
import importlib.metadata
import re
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["EXTRA_PACKAGES", "HELD_OUT", "Source", "installed_sources", "refusal", "wheel_sources"]

# Added to what the project's environment holds: large, well known, plainly permissive. At most fifteen.
EXTRA_PACKAGES = (
    "aiohttp",
    "attrs",
    "celery",
    "dask",
    "django",
    "ipython",
    "pandas",
    "scikit-learn",
    "scipy",
    "sphinx",
    "sqlalchemy",
    "sqlglot",
    "tornado",
    "twisted",
    "werkzeug",
)

# Whole packages that the model never sees. Chosen for variety before anything was measured.
HELD_OUT = frozenset(
    {"click", "jinja2", "markdown-it-py", "networkx", "psutil", "rich", "starlette", "tornado", "urllib3"}
)

_PERMISSIVE = frozenset(
    {
        "0BSD",
        "APACHE",
        "APACHE-2.0",
        "BSD",
        "BSD-2-CLAUSE",
        "BSD-3-CLAUSE",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-PYTHON",
        "ISC",
        "LLVM-EXCEPTION",
        "MIT",
        "PSF-2.0",
        "UNLICENSE",
        "ZLIB",
    }
)
_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Python Software Foundation License": "PSF-2.0",
}
_FREE_TEXT = {
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "bsd": "BSD",
    "bsd-3-clause": "BSD-3-Clause",
    "isc license": "ISC",
    "mit": "MIT",
}
_VENDORED = frozenset(
    {"_vendor", "vendor", "vendored", "_vendored", "_vendored_packages", "third_party", "externals", "extern"}
    | {"_distutils", "lib2to3", "idlelib", "pydoc_data", "encodings", "site-packages", "__pycache__", "lexers"}
)
_TESTS = re.compile(r"(^|/)(tests?|testing|benchmarks?)/|(^|/)(test_[^/]*|[^/]*_tests?|conftest)\.py$")
_GENERATED = re.compile(
    r"auto-?generated|automatically generated|generated (by|from|file)|do not edit|@generated", re.I
)
_COPYLEFT = re.compile(r"GNU (Lesser |Library |Affero )?General Public|Mozilla Public License|\bA?GPL(v[23])?\b|\bLGPL")
_SECRET = re.compile(r"-----BEGIN [A-Z ]*(PRIVATE KEY|CERTIFICATE)|\bAKIA[0-9A-Z]{16}\b|\bghp_[0-9A-Za-z]{30,}")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+\.[a-z]{2,}")
_LETTERS = re.compile(r"[A-Za-z_\s]")


@dataclass(frozen=True)
class Source:
    """One package: its name as registered, version, licence, and where its files lie (a folder or a wheel)."""

    name: str
    version: str
    licence: str
    files: tuple[tuple[str, Path], ...]
    wheel: Path | None = None

    def texts(self) -> Iterator[tuple[str, str]]:
        """(path inside the package, text) of each .py file that is UTF-8, in sorted order."""
        archive = zipfile.ZipFile(self.wheel) if self.wheel else None
        for inside, path in self.files:
            raw = archive.read(inside) if archive else path.read_bytes()
            try:
                yield inside, raw.decode("utf-8").replace("\r\n", "\n")
            except UnicodeDecodeError:
                continue


def licence_of(expression: str | None, classifiers: list[str], free_text: str | None) -> str | None:
    """The package's licence when its metadata name one that is plainly permissive, else None.

    ``A AND B`` needs both, ``A OR B`` one. Several classifiers are read as AND.
    """
    if expression:
        parts = [
            [a.strip(" ()") for a in re.split(r"\s+(?:AND|WITH)\s+", o)] for o in re.split(r"\s+OR\s+", expression)
        ]
        return expression if any(all(a.upper() in _PERMISSIVE for a in alternative) for alternative in parts) else None
    known = [c.split("::")[-1].strip() for c in classifiers if c.startswith("License")]
    known = [c for c in known if c not in ("OSI Approved", "DFSG approved")]
    if known:
        return " AND ".join(_CLASSIFIERS[c] for c in known) if all(c in _CLASSIFIERS for c in known) else None
    return _FREE_TEXT.get((free_text or "").strip().lower())


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_sources() -> tuple[list[Source], list[str]]:
    """The standard library and every installed package with a permissive licence; names of those left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    inside = [(p.relative_to(root).as_posix(), p) for p in sorted(root.rglob("*.py"))]
    found = [Source("python-stdlib", ".".join(map(str, __import__("sys").version_info[:3])), "PSF-2.0", tuple(inside))]
    refused = []
    for dist in sorted(importlib.metadata.distributions(), key=lambda d: _canonical(d.metadata["Name"])):
        meta = dist.metadata
        name = _canonical(meta["Name"])
        if name in ("strata", "strata-engine"):
            continue
        licence = licence_of(meta.get("License-Expression"), meta.get_all("Classifier") or [], meta.get("License"))
        if licence is None:
            refused.append(name)
            continue
        files = [(f.as_posix(), Path(str(dist.locate_file(f)))) for f in dist.files or [] if f.suffix == ".py"]
        found.append(Source(name, dist.version, licence, tuple(sorted(f for f in files if f[1].is_file()))))
    return found, refused


def wheel_sources(folder: Path) -> tuple[list[Source], list[str]]:
    """The wheels of ``EXTRA_PACKAGES`` in ``folder``; names of those whose licence is not plainly permissive."""
    found, refused = [], []
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(archive.namelist())
            meta_name = next(n for n in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
            meta = email.parser.Parser().parsestr(archive.read(meta_name).decode("utf-8"), headersonly=True)
        name = _canonical(str(meta["Name"]))
        if name not in EXTRA_PACKAGES:
            continue
        licence = licence_of(meta.get("License-Expression"), meta.get_all("Classifier") or [], meta.get("License"))
        if licence is None:
            refused.append(name)
            continue
        files = tuple((n, Path(n)) for n in names if n.endswith(".py"))
        found.append(Source(name, str(meta["Version"]), licence, files, wheel))
    return found, refused


def refusal(path: str, text: str) -> str | None:
    """Why one file is left out, or None when it may be read. Cheap tests first."""
    parts = PurePosixPath(path).parts
    if _VENDORED.intersection(parts):
        return "vendored"
    if path.endswith(("_pb2.py", "_pb2_grpc.py")) or _GENERATED.search(text[:3000]):
        return "generated"
    if not 200 <= len(text) <= 400_000:
        return "size"
    lines = text.split("\n")
    if max(map(len, lines)) > 500 or len(text) / len(lines) > 100:
        return "minified"
    if len(_LETTERS.findall(text)) < 0.6 * len(text):
        return "table"
    if "\x00" in text or "\x0c" in text or _SECRET.search(text):
        return "secret"
    if len(set(_MAIL.findall(text))) > 5:
        return "mail"
    if _COPYLEFT.search(text):
        return "copyleft"
    return None


def is_test(path: str) -> bool:
    """Whether a file is test or benchmark code, which repeats itself and is taken in part only."""
    return bool(_TESTS.search(path))
