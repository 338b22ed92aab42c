"""Settings of the server, from flags, the environment (`DEJAKV_...`) or a `.env` file. All limits and their defaults are here."""

from dataclasses import fields
from pathlib import Path

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dejakv.config.reuse import PrunePolicy, ReuseMethod
from dejakv.config.text import TextSettings
from dejakv.pictures import LIMITS
from dejakv.reuse.quality import DEFAULT, MAX_GENERATION, BlendQuality
from dejakv.trust.differs import differs_of
from dejakv.trust.settings import TrustSettings

SIM_THRESHOLD = 0.8
"""Least cosine of a donor on the server, and the default of a request's `sim_threshold` (SemShareKV's)."""


class TrustPart(BaseSettings):
    """`TrustSettings` as flags and the environment give them; `trust_groups` as a JSON list. Partitions are named `key-` and the first
    16 hexadecimal digits of the SHA-256 of their API key."""

    error_bound: float | None = Field(default=TrustSettings.error_bound, gt=0, lt=1)
    confidence: float = Field(default=TrustSettings.confidence, gt=0, lt=1)
    explore_share: float = Field(default=TrustSettings.explore_share, gt=0, le=1)
    audit_share: float = Field(default=TrustSettings.audit_share, gt=0, le=1)
    differs: str = TrustSettings.differs
    trust_groups: tuple[str, ...] = TrustSettings.trust_groups

    @property
    def trust(self) -> TrustSettings:
        """The same for the cache. Raises: ConfigError for groups that cannot be read."""
        return TrustSettings(**{item.name: getattr(self, item.name) for item in fields(TrustSettings)})

    @model_validator(mode="after")
    def _readable(self) -> "TrustPart":
        _ = self.trust
        differs_of(self.differs)
        return self


class ServerSettings(TrustPart):
    """Sizes in bytes, times in seconds.

    reuse               reuse method of `/v1/generate` for requests that do not give one; OpenAI's endpoints are exact unless the request asks
    blend_quality       `strict`, `default` or `loose` (see `dejakv.reuse.quality`); `blend_share` overrides its share
    cross_encoder       name or folder of a model that judges paraphrases, and `paraphrase_threshold`, its least probability
    prune               requests that allow approximate reuse are decoded from a pruned state (see `SemanticCacheConfig.prune`)
    allow_approximate   whether a request may ask for `adopt`, `blend` or `top_layer`; false: such a request gets 400
    costs               four constants in seconds instead of measured ones, as a JSON list (see `SemanticCacheConfig.costs`)
    max_generation      rows that a blend computed serve later blends: how often approximate state may have gone into them
    quotas              parts of the budgets of named partitions, as a JSON list of `NAME=BYTES` or `NAME=BYTES:ENTRIES`; the
                        partition of a key is `dejakv cache partition`
    ttl                 seconds for which what is stored may be used, 0 without a limit; `ttl_prompts`, `ttl_rows` and
                        `ttl_encoder` of one class alone (see `dejakv.config.expiry`)
    error_bound         largest share of wrong answers among the approximate ones that are served, and `confidence`, `explore_share`,
                        `audit_share`, `differs`, `trust_groups`: see `TrustSettings`. Labels are made in idle time, as promotions are
    promote             a prompt that was answered approximately is computed exactly when no request waits, so that it is hit
                        exactly when it comes again; `promote_after` seconds without a request
    api_keys            separated by commas, and `api_keys_file`, one a line, turn authentication on; each key is a
                        partition of its own. Without keys all callers share one partition
    partition_secret    names of partitions are made from the keys with it, so that a folder does not tell which keys they are of
    operator_key        opens `/metrics` and the figures of all callers if API keys are required
    max_headers         header lines of a request; `max_header_bytes` of all of them and the request line together
    header_seconds      until the headers of a request are complete, from the connection's beginning or the last answer
    max_connections     open at the same time; new ones beyond it are closed at once
    max_body_bytes      of one request's body; `max_bodies_bytes` of all bodies of unanswered requests together
    body_seconds        until a body is complete
    send_seconds        for which a client may refuse to read its answer
    max_json_depth      nested lists and objects; `max_json_values` items of lists and fields of objects
    max_pictures        in one request; `max_picture_pixels`, `max_picture_side` of one; `max_request_pixels` of all
    max_new_tokens      of one answer
    max_queue           requests that wait for the model
    retry_after         seconds after which a refused client may try again
    """

    model_config = SettingsConfigDict(env_prefix="DEJAKV_", env_file=".env", extra="ignore", protected_namespaces=())

    model: str = "docs-lm"
    dtype: str = "auto"
    device: str = "auto"
    attn: str = "sdpa"
    trust_remote_code: bool = False
    host: str = "127.0.0.1"
    port: int = Field(default=8008, ge=0, le=65535)
    max_items: int = Field(default=64, ge=0)
    max_bytes: int = Field(default=4 * 1024**3, ge=1)
    encoder_bytes: int = Field(default=1024**3, ge=1)
    cache_dir: str | None = None
    reuse: ReuseMethod = "exact"
    allow_approximate: bool = True
    index_encoder: str = "model"
    cross_encoder: str | None = None
    paraphrase_threshold: float = Field(default=TextSettings.paraphrase_threshold, ge=0, le=1)
    blend_quality: BlendQuality = DEFAULT
    blend_share: float | None = Field(default=None, ge=0, le=1)
    prune: PrunePolicy = "none"
    max_generation: int = Field(default=MAX_GENERATION, ge=0)
    costs: tuple[float, ...] = ()
    quotas: tuple[str, ...] = ()
    ttl: float = Field(default=0.0, ge=0)
    ttl_prompts: float | None = Field(default=None, ge=0)
    ttl_rows: float | None = Field(default=None, ge=0)
    ttl_encoder: float | None = Field(default=None, ge=0)
    promote: bool = True
    promote_after: float = Field(default=1.0, ge=0)
    api_keys: str | None = None
    api_keys_file: Path | None = None
    partition_secret: str | None = None
    operator_key: str | None = None

    max_headers: int = Field(default=100, ge=1)
    max_header_bytes: int = Field(default=16 * 1024, ge=1024)
    header_seconds: float = Field(default=10.0, gt=0)
    max_connections: int = Field(default=1024, ge=1)
    max_body_bytes: int = Field(default=32 * 1024**2, ge=1024)
    max_bodies_bytes: int = Field(default=256 * 1024**2, ge=1024)
    body_seconds: float = Field(default=60.0, gt=0)
    send_seconds: float = Field(default=30.0, gt=0)
    max_json_depth: int = Field(default=32, ge=1)
    max_json_values: int = Field(default=20_000, ge=1)
    max_pictures: int = Field(default=16, ge=0)
    max_picture_pixels: int = Field(default=LIMITS.pixels, ge=1, le=LIMITS.pixels)
    max_picture_side: int = Field(default=LIMITS.side, ge=1, le=LIMITS.side)
    max_request_pixels: int = Field(default=2 * LIMITS.pixels, ge=1)
    max_new_tokens: int = Field(default=4096, ge=1)
    max_queue: int = Field(default=256, ge=1)
    retry_after: int = Field(default=1, ge=1)
    shutdown_seconds: float = Field(default=20.0, gt=0)

    @model_validator(mode="after")
    def _fit(self) -> "ServerSettings":
        if self.reuse != "exact" and not self.allow_approximate:
            raise ValueError(
                f"reuse={self.reuse} is approximate, but allow_approximate=false: set reuse=exact, or allow_approximate=true"
            )
        if self.prune != "none" and not self.allow_approximate:
            raise ValueError(
                f"prune={self.prune} is approximate, but allow_approximate=false: set prune=none, or allow_approximate=true"
            )
        if self.prune != "none" and self.error_bound is not None:
            raise ValueError(
                f"prune={self.prune} changes answers without any reuse, which error_bound={self.error_bound} does not see: leave one out"
            )
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_bodies_bytes={self.max_bodies_bytes} has no room for a body of max_body_bytes={self.max_body_bytes}: "
                "make it larger"
            )
        return self
