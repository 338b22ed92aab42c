"""`dejakv serve`: the HTTP server."""

from typing import Annotated, Any

import typer

from dejakv.errors import ConfigError, MissingExtraError

Text = str | None


def serve_command(
    model: Annotated[Text, typer.Option("--model", "--model-dir", help="Bundled name, local folder or hub id.")] = None,
    host: Annotated[Text, typer.Option(help="Address to listen on; others than 127.0.0.1 need API keys.")] = None,
    port: Annotated[int | None, typer.Option(help="8008 unless given.")] = None,
    max_items: Annotated[int | None, typer.Option(help="Prompts kept; 0: no limit.")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Bytes of state kept.")] = None,
    reuse: Annotated[
        Text,
        typer.Option(
            help="What /v1/generate does for a request that does not say: exact (unless given), adopt or blend."
        ),
    ] = None,
    blend_quality: Annotated[Text, typer.Option(help="strict, default or loose: rows that a blend computes.")] = None,
    cache_dir: Annotated[Text, typer.Option(help="Keep the cache here over restarts.")] = None,
    api_keys_file: Annotated[Text, typer.Option(help="One key a line; each is a partition of its own.")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Requests that may wait.")] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Bytes of a request's body.")] = None,
    dtype: Annotated[Text, typer.Option()] = None,
    device: Annotated[Text, typer.Option()] = None,
    trust_remote_code: Annotated[bool | None, typer.Option("--trust-remote-code")] = None,
) -> None:
    """Serve a model over HTTP: /v1/generate, OpenAI's endpoints, /metrics, /health, /docs."""
    try:
        from pydantic import ValidationError

        from dejakv.server.app import create_app
        from dejakv.server.gate import Keys
        from dejakv.server.listen import bound, server_of
        from dejakv.server.settings import ServerSettings
    except ImportError as error:
        raise MissingExtraError(error.name or "fastapi", "server", "dejakv serve") from error

    given: dict[str, Any] = {
        "model": model, "host": host, "port": port, "max_items": max_items, "max_bytes": max_bytes, "reuse": reuse,
        "blend_quality": blend_quality,
        "cache_dir": cache_dir, "api_keys_file": api_keys_file, "max_queue": max_queue, "max_body_bytes": max_body_bytes,
        "dtype": dtype, "device": device, "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    try:
        settings = ServerSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        flag = f"--{str(first['loc'][0]).replace('_', '-')}: " if first["loc"] else ""
        raise ConfigError(f"{flag}{first['msg']}") from error
    if settings.host not in ("127.0.0.1", "localhost", "::1") and not Keys(settings).required:
        raise ConfigError(f"--host {settings.host} is open to others: give --api-keys-file or DEJAKV_API_KEYS")
    with bound(settings.host, settings.port) as listener:  # before the model is loaded, which may take minutes
        server = server_of(create_app(settings), settings, log_level="info")
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            return
    if not server.started:
        raise typer.Exit(3)
