"""``strata`` and ``python -m strata``: hands over to the command line, and imports nothing heavy itself."""

from __future__ import annotations

from strata.cli.app import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
