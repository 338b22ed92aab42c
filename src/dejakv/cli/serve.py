"""`dejakv serve`: the HTTP server."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dejakv.cli import keep_options as keep
from dejakv.cli import reuse_options as options
from dejakv.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from dejakv.server.settings import ServerSettings

Text = str | None


def serve_command(
    model: Annotated[
        Text,
        typer.Option(
            "--model",
            "--model-dir",
            help="Name from `dejakv models`, local folder, .gguf file or hub id (default: docs-lm).",
        ),
    ] = None,
    host: Annotated[
        Text,
        typer.Option(
            help="Address to listen on; any other than this machine's own needs API keys (default: 127.0.0.1)."
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default: 8008).")] = None,
    max_items: Annotated[
        int | None, typer.Option(help="Largest number of prompts kept; 0: no limit (default: 64).")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(help="Largest size of the kept state, in bytes (default: 4 GiB).")
    ] = None,
    reuse: Annotated[
        Text,
        typer.Option(
            help="How /v1/generate reuses state if the request does not say: exact, adopt, blend or top_layer (layer-condensed models such as docs-lckv) (default: exact)."
        ),
    ] = None,
    blend_quality: Annotated[
        Text,
        typer.Option(
            help="Rows that a blend computes: strict (most), default or loose (fewest; only for prompts whose passages stay in place)."
        ),
    ] = None,
    prune: Annotated[
        Text,
        typer.Option(
            help="Requests that allow approximate reuse are decoded from the tokens that matter most: attention, snapkv or random (default: none)."
        ),
    ] = None,
    cross_encoder: options.CrossEncoder = None,
    paraphrase_threshold: options.ParaphraseThreshold = None,
    error_bound: options.ErrorBound = None,
    confidence: options.Confidence = None,
    explore_share: options.ExploreShare = None,
    audit_share: options.AuditShare = None,
    differs: options.Differs = None,
    trust_groups: options.TrustGroups = None,
    cache_dir: Annotated[
        Text, typer.Option(help="Folder that keeps the cache across restarts; without it the cache is in memory.")
    ] = None,
    ttl: keep.Ttl = None,
    ttl_prompts: keep.TtlPrompts = None,
    ttl_rows: keep.TtlRows = None,
    ttl_encoder: keep.TtlEncoder = None,
    quotas: keep.Quotas = None,
    api_keys_file: Annotated[
        Text, typer.Option(help="File with one API key a line; each key is a partition of its own.")
    ] = None,
    max_queue: Annotated[int | None, typer.Option(help="Largest number of waiting requests (default: 256).")] = None,
    max_body_bytes: Annotated[
        int | None, typer.Option(help="Largest size of a request's body, in bytes (default: 32 MiB).")
    ] = None,
    dtype: Annotated[Text, typer.Option(help="auto, fp32, bf16 or fp16 (default: auto).")] = None,
    device: Annotated[Text, typer.Option(help="auto, cpu, cuda or cuda:N (default: auto).")] = None,
    trust_remote_code: Annotated[
        bool | None, typer.Option("--trust-remote-code", help="Run Python code from the model's repository.")
    ] = None,
) -> None:
    """Serve a model over HTTP: /v1/generate, OpenAI's endpoints, /metrics, /health, /docs. Every option is also an environment
    variable (--max-items: DEJAKV_MAX_ITEMS) or a line of .env."""
    try:
        from dejakv.server.app import create_app
        from dejakv.server.gate import Keys
        from dejakv.server.listen import address_of, bound, server_of
        from dejakv.server.startup import Startup
    except ImportError as error:
        raise MissingExtraError(error.name or "fastapi", "server", "dejakv serve") from error

    given: dict[str, Any] = {
        "model": model, "host": host, "port": port, "max_items": max_items, "max_bytes": max_bytes, "reuse": reuse,
        "blend_quality": blend_quality, "prune": prune, "cache_dir": cache_dir, "ttl": ttl, "ttl_prompts": ttl_prompts, "ttl_rows": ttl_rows,
        "ttl_encoder": ttl_encoder, "quotas": quotas or None, "api_keys_file": api_keys_file, "max_queue": max_queue, "max_body_bytes": max_body_bytes,
        "dtype": dtype, "device": device, "trust_remote_code": trust_remote_code, "error_bound": error_bound,
        "confidence": confidence, "explore_share": explore_share, "audit_share": audit_share, "differs": differs,
        "trust_groups": trust_groups or None, "cross_encoder": cross_encoder, "paraphrase_threshold": paraphrase_threshold,
    }  # fmt: skip
    settings = _settings({name: value for name, value in given.items() if value is not None})
    if settings.host not in ("127.0.0.1", "localhost", "::1") and not Keys(settings).required:
        raise ConfigError(
            f"--host {settings.host} can be reached from other machines: give --api-keys-file or DEJAKV_API_KEYS"
        )
    with bound(settings.host, settings.port) as listener:  # before the model is loaded, which may take minutes
        app = Startup(create_app(settings))
        server = server_of(app, settings, log_level="info")
        typer.echo(f"serving {settings.model} on {address_of(listener)}; Ctrl-C stops it", err=True)
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            return
        except SystemExit:  # later releases of uvicorn end so when the start fails
            if app.failure is None:
                raise
    if app.failure is not None:
        raise app.failure
    if not server.started:
        raise typer.Exit(3)


def _settings(given: dict[str, Any]) -> "ServerSettings":
    """The options given, and the environment's for the others. Raises: ConfigError, with the option or the variable by its name."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from dejakv.server.settings import ServerSettings

    try:
        return ServerSettings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        option = f"--{name.replace('_', '-')}" if name in given else f"DEJAKV_{name.upper()}"
        raise ConfigError(f"{option}: {first['msg']}" if name else first["msg"]) from error
    except SettingsError as error:
        raise ConfigError(
            f"{error}: in the environment and in .env a list is JSON, such as DEJAKV_COSTS='[1e-3, 1e-6, 0, 0]'"
        ) from error
