"""The ``strata`` command: finds the command that was typed, and turns every ending into a line and a status.

Lives in ``cli`` and never sees a tensor. A command's module is imported only when that command is typed, so that
``strata --help`` loads nothing heavy.

To add a command: write ``cli/NAME.py`` with a function ``command(...)`` whose parameters are typer's, and add one line
to ``COMMANDS``. What it returns is the exit status (None is 0). A command that runs a model takes a first parameter
``configure: Configure``; it then gets every option of ``config.py`` as a flag, and ``configure(model)`` returns the
``Requested`` configuration, sets up logging, and serves ``--show-config``. It raises ``StrataError`` for what the user
can mend, and never prints a traceback.

Endings: 0 well, 2 a mistake of the user (one line and a hint), 1 a fault of ours or of the machine, 130 Ctrl-C, 141 a
reader that closed the pipe.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, get_type_hints

import typer

from strata import interrupts, version
from strata.cli.configure import Configure, flag_parameters
from strata.cli.process_limits import refuse_too_little
from strata.cli.unexpected import print_error, tell_unexpected
from strata.errors import StrataError, lacks_memory
from strata.paths import refuse_foreign_bytes

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True)
class Command:
    """A line of ``strata --help``. ``module`` holds the function ``command``."""

    name: str
    module: str
    help: str


COMMANDS: tuple[Command, ...] = (
    Command("demo", "strata.cli.demo", "Show what Strata does on this PC, in a minute."),
    Command("run", "strata.cli.run", "Stream one completion."),
    Command("chat", "strata.cli.chat", "Chat in the terminal."),
    Command("serve", "strata.cli.serve", "Serve a model over HTTP to programs of this PC."),
    Command("verify", "strata.cli.verify", "Prove that placement never changes a token."),
    Command("bench", "strata.cli.bench", "Measure kernels, cache policies, or a model beside its forecast."),
    Command("plan", "strata.cli.plan", "Say what of a model would lie where on this PC, and how fast it would be."),
    Command("doctor", "strata.cli.doctor", "Say what this machine has, what limits it, and what is missing."),
    Command("inspect", "strata.cli.inspect", "Tell what a pack or a checkpoint holds; --check reads every byte."),
    Command("pack", "strata.cli.pack", "Make a pack of a Hugging Face checkpoint."),
    Command("export", "strata.cli.export", "Turn a pack back into a Hugging Face checkpoint."),
    Command("list", "strata.cli.list", "List the models in STRATA_HOME."),
    Command("rm", "strata.cli.rm", "Remove a model from STRATA_HOME."),
)


class PipeClosed(Exception):  # noqa: N818 - what happened, not a fault
    """Nobody reads standard output any more. Typer would end the process itself on the system's own error."""


class Interrupted(Exception):  # noqa: N818 - as above
    """Ctrl-C ended a command. Typer would make an exit status of ``KeyboardInterrupt`` itself, and say nothing."""


def typed_command(words: Sequence[str]) -> str | None:
    """The command's name: the first word, since no option before it takes a value. None for ``strata --help``."""
    return next((word for word in words if not word.startswith("-")), None)


def adapt(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives typer a function whose parameters are the command's own, then one for each option it may be given.

    ``configure`` is replaced by the options' flags; a command without it gets the log options alone.
    """
    hints = get_type_hints(function, include_extras=True)
    given = inspect.signature(function).parameters
    takes_model = "configure" in given
    own = [one.replace(annotation=hints[name]) for name, one in given.items() if name != "configure"]
    flags = flag_parameters(None if takes_model else {"log"})

    def invoke(**values: Any) -> None:
        show_config = values.pop("show_config", False)
        configure = Configure({one.name: values.pop(one.name) for one in flags if one.name in values}, show_config)
        if takes_model:
            refuse_too_little()
            values["configure"] = configure
        else:
            configure()
        try:
            status = function(**values)
            sys.stdout.flush()
        except BrokenPipeError:
            raise PipeClosed from None
        except KeyboardInterrupt:
            raise Interrupted from None
        raise typer.Exit(int(status or 0))

    signature = inspect.Signature([one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in [*own, *flags]])
    invoke.__signature__ = signature  # type: ignore[attr-defined]
    invoke.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
    invoke.__doc__ = function.__doc__
    return invoke


def print_version(wanted: bool) -> None:
    if wanted:
        print(version.describe())
        raise typer.Exit


def build_app(typed: str | None) -> typer.Typer:
    """All commands by name and help; only the typed one with its real parameters, which costs its import."""
    app = typer.Typer(
        name="strata",
        help="Runs Mixture-of-Experts models larger than the graphics card's memory, on this PC.",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def top(
        show_version: Annotated[
            bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print version and commit.")
        ] = False,
    ) -> None:
        """Runs Mixture-of-Experts models larger than the graphics card's memory, on this PC."""

    for one in COMMANDS:
        function = adapt(import_module(one.module).command) if one.name == typed else lambda: None
        app.command(one.name, help=one.help)(function)
    return app


def run_app(words: list[str]) -> int:
    """Runs one command line. Raises what the command raises."""
    if words and words[0] == "--serve":
        words = ["serve", *words[1:]]
    for word in words:
        refuse_foreign_bytes("a word of the command", word)
    typed = typed_command(words)
    words = words or ["--help"]
    try:
        status = build_app(typed)(args=words, prog_name="strata", standalone_mode=False)
    except typer.TyperException as error:
        known = any(one.name == typed for one in COMMANDS)
        print_error(error.format_message().rstrip("."), f"strata {typed} --help" if known else "strata --help")
        return 2
    return status if isinstance(status, int) else 0


def open_missing_streams() -> None:
    """A standard stream that the shell closed (``>&-``) becomes the null device: writing to it harms nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the life of the process


def drop_output() -> None:
    """Standard output takes nothing more: Python would complain once again when it flushes it at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def output_fails() -> bool:
    """Whether standard output refuses one more line end: what it refused before need not be waiting in a buffer."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return True
    return False


def accept_any_text() -> None:
    """A terminal that cannot show a character shows ``?``; an answer never ends for that."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def main(words: Sequence[str] | None = None) -> int:
    """The whole of the program; returns its exit status. ``words`` are the arguments, else those of the process."""
    open_missing_streams()
    accept_any_text()
    try:
        status = run_app(list(sys.argv[1:] if words is None else words))
        sys.stdout.flush()
        return status
    except StrataError as error:
        print_error(error.message, error.hint)
        return error.exit_status
    except (Interrupted, KeyboardInterrupt, typer.Abort):
        interrupts.tell()
        return interrupts.STATUS
    except (BrokenPipeError, PipeClosed):
        drop_output()
        return 141
    except Exception as error:  # noqa: BLE001 - the end of the program: no user sees a traceback, and none is lost
        if isinstance(error, OSError) and output_fails():
            drop_output()
            print_error(f"standard output cannot be written: {error.strerror}", "send the output somewhere with room")
            return 1
        if isinstance(error, OSError) and error.filename is not None and not lacks_memory(error):
            # A file that the system does not let be used, where nobody foresaw it: the user can mend it all the same.
            print_error(
                f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}", "look at its rights and kind"
            )
            return 2
        tell_unexpected(error)
        return 1
