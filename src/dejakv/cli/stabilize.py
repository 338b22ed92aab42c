"""`dejakv stabilize`: a proxy that keeps the prefix of requests to any server."""

from typing import Annotated

import typer

from dejakv.cli.options import echo
from dejakv.errors import MissingExtraError
from dejakv.stabilize.rules import DEFAULT_RULES, RULES
from dejakv.stabilize.settings import StabilizeSettings


def stabilize_command(
    url: Annotated[
        str,
        typer.Argument(
            help="Address of a server of OpenAI's chat completions or Anthropic's messages."
        ),
    ],
    rules: Annotated[
        str, typer.Option(help=f"Rules that act, with commas; all are {', '.join(RULES)}.")
    ] = ",".join(DEFAULT_RULES),
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help=(
                "Send both forms of a changed request, answer with that of the client's own form,"
                " and compare the answers where the temperature is 0."
            ),
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Model whose tokenizer counts prefixes (default: characters)."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; API keys are checked by the server behind.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8009,
) -> None:
    """Forward requests to any server of OpenAI's or Anthropic's protocol, changed by listed rules
    so that they keep their prefix. Bodies that are not known in full are passed on byte for byte.
    Headers x-dejakv-* and /stabilize/metrics say what was changed and what it gained.
    """
    try:
        import uvicorn

        from dejakv.server.app import address_of, listening_socket
    except ImportError as error:
        raise MissingExtraError(error.name or "uvicorn", "server", "dejakv stabilize") from error
    from dejakv.stabilize import ForwardingApp, StabilizeMiddleware

    names = tuple(name for name in rules.split(",") if name)
    settings = StabilizeSettings(rules=names, check=check, model=model)
    app = StabilizeMiddleware(ForwardingApp(url), settings)
    with listening_socket(host, port) as listener:
        config = uvicorn.Config(app, http="h11", ws="none", server_header=False, date_header=False)
        echo(f"{address_of(listener)} forwards to {url}; Ctrl-C stops it", err=True)
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            return
