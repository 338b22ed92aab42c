"""Settings of the server: the cache's with some other defaults, and limits of the service.

They come from options, the environment (`DEJAKV_...`) or a `.env` file.
"""

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

from dejakv.config import (
    FORMER,
    FindSettings,
    KeepSettings,
    ReuseSettings,
    SemanticCacheConfig,
)
from dejakv.engines.open import ModelChoice
from dejakv.errors import ConfigError
from dejakv.pictures import MAX_PIXELS
from dejakv.settings import (
    AnyPath,
    Cosine,
    Count,
    MethodName,
    NumberRange,
    Positive,
    Seconds,
    from_text,
    kinds_of,
    strict_dataclass,
)
from dejakv.trust.settings import TrustSettings

SIM_THRESHOLD = 0.8
"""Least cosine of a donor on the server, and the default of a request's `sim_threshold`
(SemShareKV's).
"""

Some = Annotated[float, NumberRange(0, above=True)]
Kilobyte = Annotated[int, NumberRange(1024)]

DECIDED = ("engine", "semantic_text", "max_cached_blocks", "partitions")
"""Settings of a cache that a server decides itself.

Its engine is transformers, `max_items` is its `max_cached_blocks`, a partition is a key, and
requests choose `adopt` themselves.
"""

_PROXY, _FIXED = "a proxy before the server limits it", "its limit is fixed"
LEFT = {
    **dict.fromkeys(
        ("max_headers", "max_header_bytes", "header_seconds", "max_connections", "send_seconds"),
        _PROXY,
    ),
    "max_bodies_bytes": "max_body_bytes limits each body",
    **dict.fromkeys(
        ("max_json_depth", "max_json_values", "max_picture_pixels", "max_picture_side"), _FIXED
    ),
    "retry_after": "clients are told one second",
}
"""Settings of earlier versions, and what took their place."""


@strict_dataclass()
class ServerSettings(ModelChoice, FindSettings, ReuseSettings, KeepSettings, TrustSettings):
    """Settings of `dejakv serve`, beside the cache's own. Sizes in bytes, times in seconds."""

    model: str = "docs-lm"
    similarity_threshold: Cosine = SIM_THRESHOLD
    index_encoder: str = "model"
    semantic_text: bool | None = True
    reuse: MethodName = ReuseSettings.reuse
    """default reuse of /v1/generate; OpenAI's endpoints are exact unless the request asks"""
    served_model_name: str | None = None
    """name that clients give the model; None: that of `model`"""
    host: str = "127.0.0.1"
    """address to listen on; any other than this machine's own needs API keys"""
    port: Annotated[int, NumberRange(0, 65535)] = 8008
    """port to listen on; 0: a free one"""
    max_items: Count = 64
    """maximum prompts kept; 0: no limit"""
    max_bytes: Positive = KeepSettings.max_bytes
    encoder_bytes: Positive = KeepSettings.encoder_bytes
    allow_approximate: bool = True
    """whether a request may ask for approximate reuse; false: such a request gets 400"""
    promote: bool = True
    """compute approximately answered prompts exactly when no request waits"""
    promote_after: Seconds = 1.0
    """seconds without a request before that"""
    api_keys: str | None = None
    """API keys with commas; each is a partition of its own, named by `dejakv cache partitions`"""
    api_keys_file: AnyPath | None = None
    """file with one API key a line"""
    partition_secret: str | None = None
    """secret in the names of partitions, to reveal nothing of keys"""
    operator_key: str | None = None
    """key of the operator, who may purge all"""

    max_body_bytes: Kilobyte = 32 * 1024**2
    """largest size of a request's body"""
    body_seconds: Some = 60.0
    """until a body is complete"""
    max_pictures: Count = 16
    """pictures in one request"""
    max_request_pixels: Positive = 2 * MAX_PIXELS
    """of all pictures of a request"""
    max_new_tokens: Positive = 4096
    """of one answer"""
    max_queue: Positive = 256
    """requests waiting for the model"""
    shutdown_seconds: Some = 20.0
    """for work under way at the end"""

    def __post_init__(self) -> None:
        if self.engine != "transformers":
            raise ConfigError(
                f"engine={self.engine}: this server is of transformers; docs/how-to/vllm.md says "
                f"how vLLM's own has the cache"
            )

        for name, value, exact in (("reuse", self.reuse, "exact"), ("prune", self.prune, "none")):
            if value != exact and not self.allow_approximate:
                raise ConfigError(
                    f"{name}={value} is approximate, but allow_approximate=false: set "
                    f"{name}={exact}, or allow_approximate=true"
                )
        # Made once to raise now for settings that do not fit each other.
        _ = self.cache(1 + len(self.quotas))

    def cache(self, partitions: int) -> SemanticCacheConfig:
        """Return the settings of the server's cache.

        Parameters
        ----------
        partitions : int
            Number of partitions that share the cache's budgets, one for each API key.

        Raises
        ------
        ConfigError
            For settings that do not fit each other.
        """
        shared = {item.name: getattr(self, item.name) for item in fields(SemanticCacheConfig)}
        return SemanticCacheConfig(
            **{**shared, "partitions": partitions, "max_cached_blocks": self.max_items}
        )

    @classmethod
    def read(cls, option_values: Mapping[str, Any] | None = None) -> "ServerSettings":
        """Read settings: the given ones, else from the environment, else from `.env`.

        Parameters
        ----------
        option_values : mapping, optional
            Settings that are given, by field.

        Raises
        ------
        ConfigError
            For a wrong value or a removed variable, with the name of the option or variable.
        """
        from dotenv import dotenv_values

        option_values = dict(option_values or {})
        # Of both, a real variable wins over the file's.
        environment = {
            **{name.upper(): value for name, value in dotenv_values(".env").items()},
            **os.environ,
        }
        for old, name in FORMER.items():
            if (value := environment.get(f"DEJAKV_{old.upper()}")) is not None:
                environment.setdefault(f"DEJAKV_{name.upper()}", value)

        for name in LEFT:
            if f"DEJAKV_{name.upper()}" in environment:
                raise ConfigError(
                    f"DEJAKV_{name.upper()} is no longer a setting: {LEFT[name]}; unset it "
                    f"(docs/how-to/server.md)"
                )

        values: dict[str, Any] = {}
        for name, kind in kinds_of(cls).items():
            text = environment.get(f"DEJAKV_{name.upper()}")
            if name in option_values or name in DECIDED or text is None:
                continue
            try:
                values[name] = from_text(text, kind)
            except ValueError as error:
                raise ConfigError(
                    f"DEJAKV_{name.upper()}: {error}: in the environment a list is JSON or has "
                    f"commas, such as 1e-3,1e-6,0,0"
                ) from error
        try:
            return cls(**{**values, **option_values})
        except ConfigError as error:
            # Such a message begins with NAME=VALUE; users know options and variables.
            name = str(error).partition("=")[0]
            option, variable = f"--{name.replace('_', '-')}: ", f"DEJAKV_{name.upper()}: "
            where = option if name in option_values else variable if name in values else ""
            raise ConfigError(f"{where}{error}") from error
