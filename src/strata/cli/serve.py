"""``strata serve [MODEL]``: OpenAI's interface for programs of this PC.

Lives in ``cli``: names options and loads the engine; all of HTTP is ``server``'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli.configure import Configure

if TYPE_CHECKING:
    from strata.config import Requested
    from strata.config_sources import Effect


def account(requested: Requested) -> list[Effect]:
    """What became of each option, the server's own use of them included."""
    from strata.engine.effects import effects_of
    from strata.server.status import server_effects

    return [*effects_of(requested), *server_effects(requested)]


def command(
    configure: Configure,
    name: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A pack, checkpoint folder or name.")] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="An address of this PC.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="The port; 0 takes a free one.")] = 8080,
) -> None:
    """Serves one model over HTTP until Ctrl-C."""
    requested = configure(name, effects=account)
    from strata.cli.loading import load_engine
    from strata.server.listen import bind, serve

    bound = bind(host, port)  # before the model: a port in use shows at once
    with bound, load_engine(requested) as engine:
        serve(engine, bound)
