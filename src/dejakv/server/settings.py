"""Settings of the server, from flags, the environment (`DEJAKV_...`) or a `.env` file."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ServerSettings(BaseSettings):
    """`api_keys` (comma-separated) or `api_keys_file` (one a line, `#` comments) turn authentication on; each key is a
    partition of its own. `operator_key` opens `/metrics` then.
    Without keys everybody is one partition, so bind to another address than 127.0.0.1 only with keys.

    Sizes in bytes, times in seconds.
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
    reuse: Literal["exact", "adopt", "blend"] = "blend"
    index_encoder: str = "model"
    blend_share: float = Field(default=0.15, ge=0, le=1)
    api_keys: str = ""
    api_keys_file: Path | None = None
    operator_key: str = ""
    max_body_bytes: int = Field(default=32 * 1024**2, ge=1024)
    max_new_tokens: int = Field(default=4096, ge=1)
    max_queue: int = Field(default=256, ge=1)
    retry_after: int = Field(default=1, ge=1)
    shutdown_seconds: float = Field(default=20.0, gt=0)
