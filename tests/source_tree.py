"""The package's files and what each imports, read from the source so that nothing runs. Shared by the wall tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "strata"

# From top to bottom, as docs/architecture.md lists them; an import may only point down.
ROOMS = (
    "cli", "server", "engine", "text", "models", "layers", "kvcache", "experts", "memory", "checkpoint", "kernels",
    "quant",
)  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One imported module as it is known to Python, and where the statement stands."""

    module: str
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path.relative_to(PACKAGE.parent.parent)}:{self.line} imports {self.module}"


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The room's name, or '' for the files on top."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def imports_of(path: Path) -> Iterator[Import]:
    """All imports of a file, also those inside functions and under TYPE_CHECKING."""
    package = path.relative_to(PACKAGE.parent).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name, path, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield Import(module, path, node.lineno)
            if module == "strata":  # from strata import engine
                for name in node.names:
                    yield Import(f"strata.{name.name}", path, node.lineno)
