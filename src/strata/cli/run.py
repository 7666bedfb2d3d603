"""``strata run [MODEL] PROMPT``: streams one completion to standard output.

Lives in ``cli``: words in, text out. Everything but the text goes to standard error, so output can be piped.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from strata.cli.configure import Configure
from strata.cli.model_words import split_model_and_prompt
from strata.cli.streaming import stream_answer
from strata.errors import RequestError


def empty_prompt(why: str = "") -> RequestError:
    return RequestError(f"the prompt is empty{': ' + why if why else ''}", "strata run [MODEL] 'def read_lines(path):'")


def read_standard_input() -> str:
    """All of it. Bytes that are no UTF-8 arrive as lone surrogates, or as an error, by how the locale is set."""
    try:
        text = sys.stdin.read()
        text.encode("utf-8")
    except UnicodeError:
        raise RequestError("standard input is not UTF-8 text", "convert it first, for example with iconv") from None
    return text


def command(
    configure: Configure,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL] PROMPT", help="The model may be left out; '-' reads standard input."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the model's chat template.")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer at this text; may be given again.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end tokens.")] = False,
) -> int:
    """Streams one completion."""
    if words and words[-1] == "":
        raise empty_prompt()
    if stop and "" in stop:  # before seconds of loading
        raise RequestError("--stop: an empty text would end every answer at once", "leave it out")
    model, prompt = split_model_and_prompt(words or [])
    requested = configure(model)
    if prompt is None:
        raise RequestError("no prompt was given", "strata run [MODEL] 'def read_lines(path):'")
    if prompt == "-":
        prompt = read_standard_input()
        if not prompt:
            raise empty_prompt("standard input gave no text")
    from strata.cli.loading import load_engine

    with load_engine(requested) as engine:
        params = engine.sampling({"stop": stop or [], "ignore_eos": ignore_eos})
        if chat:
            request = engine.chat_request([{"role": "user", "content": prompt}], params)
        else:
            request = engine.plain_request(prompt, params)
            sys.stdout.write(prompt)
        try:
            return stream_answer(engine, request)
        except BaseException:
            sys.stdout.write("\n")  # the error's line begins on its own
            raise
