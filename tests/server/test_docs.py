"""docs/server.md: its examples run as they stand, and its lists are those of the source."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import httpx
import pytest

from strata.server.answers import MAX_REQUESTS
from strata.server.fields import CHAT, COMPLETION, IGNORED, UNSERVED_CHAT, UNSERVED_COMPLETION
from strata.server.listen import Server
from tests.patience import PATIENCE_S

ADDRESS = "http://127.0.0.1:8080"


@pytest.fixture
def page(root: Path) -> str:
    return (root / "docs" / "server.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_curl_examples(page: str, real_server: Server) -> None:
    commands = [shlex.split(block) for block in blocks(page, "sh") if block.startswith("curl")]
    assert len(commands) == 2
    for words in commands:
        url = next(word for word in words if word.startswith(ADDRESS))
        data = words[words.index("-d") + 1]
        # curl's own content type, which a body given with -d has.
        headers = {"content-type": "application/x-www-form-urlencoded"}
        response = httpx.post(url.replace(ADDRESS, real_server.url), content=data, headers=headers, timeout=PATIENCE_S)
        assert response.status_code == 200
        if json.loads(data).get("stream"):
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            assert response.json()["choices"][0]["finish_reason"] in ("stop", "length")


def test_python_examples(page: str, real_server: Server) -> None:
    examples = blocks(page, "python")
    assert examples
    for example in examples:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(example.replace(ADDRESS, real_server.url), "docs/server.md", "exec"), {})
        assert said.getvalue()


def test_the_lists_are_complete(page: str) -> None:
    names = {*CHAT, *COMPLETION, *IGNORED, *UNSERVED_CHAT, *UNSERVED_COMPLETION} - {"function_call", "modalities"}
    missing = [name for name in sorted(names) if not re.search(rf"`{name}\b", page)]
    assert not missing
    assert f"the {MAX_REQUESTS + 1}th that waits" in page
