"""Log lines: one line a message, as users read them; all of it with time in a file; and bars that stay silent."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

import pytest

from strata.errors import ConfigError
from strata.logs import set_up_logging
from strata.progress import bar, write_line


def test_lines_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info")
    logger = logging.getLogger("strata.memory.anything")
    logger.debug("not shown")
    logger.info("page-locking path 2: %s of %s GiB pinned", 48.15, 48.15)
    logger.warning("two\n  lines")
    try:
        raise ValueError("deep\ntrouble")
    except ValueError:
        logger.exception("it failed")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "page-locking path 2: 48.15 of 48.15 GiB pinned",
        "warning: two | lines",
        "error: it failed (ValueError: deep | trouble)",
    ]


@pytest.mark.parametrize(("level", "shown"), [("error", 1), ("warning", 2), ("info", 3), ("debug", 4)])
def test_levels(capsys: pytest.CaptureFixture[str], level: str, shown: int) -> None:
    set_up_logging("debug")
    set_up_logging(level)  # replaces the earlier set-up, so nothing is said twice
    for name in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("strata.x"), name)("words")
    assert len(capsys.readouterr().err.splitlines()) == shown


def test_the_file_holds_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "strata.log"
    set_up_logging("error", path)
    logging.getLogger("strata.x").debug("a detail")
    logging.getLogger("elsewhere").error("not ours")
    assert capsys.readouterr().err == ""
    (line,) = path.read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z DEBUG strata\.x: a detail", line)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--log-file"):
        set_up_logging("info", tmp_path)


def test_no_bar_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("Packing", 10) as advance:
        advance(5)
        write_line("words")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "words\n")


def test_lines_are_written_above_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    with bar("Packing", 1 << 20, unit="B", enabled=True) as advance:
        advance(1 << 19)
        write_line("[1/2] words stay as they are")
    assert "[1/2] words stay as they are\n" in screen.getvalue()


def test_a_bar_within_a_bar_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal is drawn on
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    with bar("Packing", 10, enabled=True) as outer:
        with bar("GPU kernels", 4, enabled=True) as inner:
            inner(3)
            write_line("words")
        outer(10)
        write_line("more words")
    drawn = screen.getvalue()
    assert "words\n" in drawn
    assert "more words\n" in drawn
    assert drawn.index("GPU kernels") < drawn.rindex("Packing")
