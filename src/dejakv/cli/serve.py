"""`dejakv serve`: a local HTTP server."""

from typing import Any

import typer

from dejakv.cli.options import FORMER_OPTIONS, HelpAll, echo, settings_command
from dejakv.errors import ConfigError, MissingExtraError
from dejakv.experiments.settings import SINGULARS, SWITCHES
from dejakv.server.settings import DECIDED, ServerSettings

GROUPS = {
    "Model": ("model", "dtype", "device", "trust_remote_code"),
    "Service": ("host", "port", "api_keys_file", "max_queue", "max_body_bytes", "max_new_tokens"),
    "Reuse": (
        "reuse",
        "allow_approximate",
        "blend_quality",
        "similarity_threshold",
        "prune",
        "error_bound",
    ),
    "Storage": ("store", "disk_dir", "feed", "max_items", "max_bytes", "ttl", "quotas"),
}
SECRETS = ("api_keys", "partition_secret", "operator_key")
"""Settings without an option: other users of a machine see command lines."""


def _serve(help_all: HelpAll = False, *, given: dict[str, Any]) -> None:
    """Serve a model over HTTP: /v1/generate, OpenAI's endpoints, /metrics, /health, /docs. Every
    option is also an environment variable (--max-items: DEJAKV_MAX_ITEMS) or a line of .env; API
    keys and secrets are variables alone (docs/reference/settings.md).
    """
    try:
        from dejakv.server.access import keys_of
        from dejakv.server.app import address_of, create_app, listening_socket, server_of
    except ImportError as error:
        raise MissingExtraError(error.name or "fastapi", "server", "dejakv serve") from error

    for name, of in (*SWITCHES.items(), *SINGULARS.items()):
        if name in given:
            value = given.pop(name)
            given[of] = not value if name in SWITCHES else value

    settings = ServerSettings.read(
        {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    )

    # Without keys whoever reaches the port could use the model and read the cache's hits.
    if settings.host not in ("127.0.0.1", "localhost", "::1") and not keys_of(settings).required:
        raise ConfigError(
            f"--host {settings.host} can be reached from other machines: give --api-keys-file or"
            " DEJAKV_API_KEYS"
        )

    # The port is taken before the model is loaded, which may take minutes.
    with listening_socket(settings.host, settings.port) as listener:
        server = server_of(create_app(settings), settings, log_level="info")
        echo(f"serving {settings.model} on {address_of(listener)}; Ctrl-C stops it", err=True)
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            return

    # uvicorn logs why it did not start, and returns as if it had ended.
    if not server.started:
        raise typer.Exit(3)


serve_command = settings_command(
    _serve,
    (ServerSettings,),
    GROUPS,
    {**SWITCHES, **SINGULARS},
    skip=(*DECIDED, *SECRETS, "exact_prefix", "free_order"),
    more={"model": ("--model-dir",), **FORMER_OPTIONS},
)
