"""Requests and responses of the endpoints. The OpenAI ones follow OpenAI's API reference (completions, chat completions)."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dejakv.parts import MAX_PARTS
from dejakv.request import ReuseMode
from dejakv.server.settings import SIM_THRESHOLD

Stop = Annotated[str, Field(max_length=256)]
Text = Annotated[str, Field(min_length=1)]
Lifetime = Annotated[float | None, Field(gt=0, le=1e12)]
"""Seconds for which what is kept of the request may be used; it can only shorten the server's."""
Parts = Annotated[list[Text], Field(max_length=MAX_PARTS)]


class GenerateRequest(BaseModel):
    """`use_semshare=true` asks for approximate reuse, `false` for exact reuse; without it the server's `--reuse` decides.
    `sim_threshold` is the least similarity of a donor; it can only tighten the server's. `store_key` names the stored state
    of this prompt, in the caller's own partition; names of other partitions are never visible. `no_store` (or the header
    `Cache-Control: no-store`) keeps nothing of the request; `ttl` are the seconds for which what is kept may be used."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"prompt": "ann lives in paris."}]})

    prompt: Text
    max_new_tokens: int = Field(default=128, ge=1, le=1_000_000)
    temperature: float = Field(default=0.7, ge=0, le=10)
    top_p: float = Field(default=0.9, gt=0, le=1)
    use_semshare: bool | None = None
    sim_threshold: float = Field(default=SIM_THRESHOLD, ge=-1, le=1)
    store_key: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,64}$")
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    no_store: bool = False
    ttl: Lifetime = None


class Timings(BaseModel):
    ttft_ms: float
    latency_ms: float
    lookup_ms: float
    inject_ms: float


class GenerateResponse(BaseModel):
    """`cache_hit`: state of an earlier prompt was used at any level. `used_semshare`: a similar donor's KV was.
    `store_key` is null for an approximate answer, whose state is never kept as its prompt's. `reason`: why state that was found was not used,
    or why the prompt ran exactly; empty if there is nothing to say. `arithmetic` and `bitwise`: see `Record`."""

    text: str
    used_semshare: bool
    cache_hit: bool
    ref_key: str | None
    retrieved_sim: float | None
    store_key: str | None
    level: str
    reuse: str
    approximate: bool
    arithmetic: str
    bitwise: bool
    reason: str
    tokens_reused: int
    tokens_computed: int
    timings: Timings


class TrustStats(BaseModel):
    """The error bound: `delta` at `confidence`. Would-be hits: `explored` both ways while closed (`explored_wrong` of them), `served`
    approximately, `audited` of these (`wrong` of them), `lost` labels. `upper`: upper end of the share of wrong answers that are served
    now; null: none are. In a group of partitions these are the group's."""

    delta: float
    confidence: float
    gate: str
    rules: int
    explored: int
    explored_wrong: int
    served: int
    audited: int
    wrong: int
    upper: float | None
    lost: int


class CacheStats(BaseModel):
    """Figures of the caller's own requests; of all requests for the operator.

    `entries` and `bytes` (the present content) are null for one tenant of several, because they may depend on others.
    `stored` counts the caller's prompts that were stored since the start. Each of the `lookups` is in `hits` (by level), in
    `prefix_hits` or in `misses`. `trust` is null where there is no error bound.
    """

    entries: int | None
    bytes: int | None
    stored: int
    lookups: int
    prefix_hits: int
    hits: dict[str, int]
    misses: int
    rejections: dict[str, int]
    promotions: int
    encoder: dict[str, float]
    trust: TrustStats | None


class ClearResponse(BaseModel):
    """How many entries were removed; null for one tenant of several, as in `CacheStats`."""

    cleared: int | None


class PurgeRequest(BaseModel):
    """Which entries are removed, with everything that was made from them: those for which all that is given holds. `all` must be true
    where nothing else is given. `donor` is a `store_key`, a `ref_key` or an id; `older_than` are seconds; `partition` is for the
    operator. `dry_run` removes nothing."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"older_than": 3600, "dry_run": True}]})

    all: bool = False
    partition: str | None = Field(default=None, max_length=10_000)
    epoch: str | None = Field(default=None, max_length=1000)
    donor: str | None = Field(default=None, min_length=1, max_length=64)
    older_than: float | None = Field(default=None, ge=0, le=1e12)
    dry_run: bool = False


class PurgeResponse(BaseModel):
    """What was removed, or with `dry_run` would be; all null for one tenant of several, as in `CacheStats`."""

    prompts: int | None = None
    rows: int | None = None
    parts: int | None = None
    encoder_outputs: int | None = None
    bytes: int | None = None


class ReuseOptions(BaseModel):
    """DejaKV's own options in an OpenAI request (`extra_body={"dejakv": {...}}`).

    `order="free"` says that the order of `parts` does not matter: texts of the prompt, word for word as they stand in it after the
    chat template, one after the other with the same text between them. They may then be served in another order.
    """

    model_config = ConfigDict(extra="forbid")

    reuse: ReuseMode | None = None
    threshold: float | None = Field(default=None, ge=-1, le=1)
    no_store: bool = False
    ttl: Lifetime = None
    parts: Parts = []
    order: Literal["given", "free"] = "given"


class StreamOptions(BaseModel):
    include_usage: bool = False


class OpenAIRequest(BaseModel):
    """Common fields of completions and chat completions. Unknown fields are ignored, as OpenAI's server does."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    n: int = Field(default=1, ge=1, le=1)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: list[Any] | None = None
    dejakv: ReuseOptions = ReuseOptions()


class CompletionRequest(OpenAIRequest):
    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=1)]


class ImageUrl(BaseModel):
    url: str


class Part(BaseModel):
    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(fail_fast=True)]


class ChatRequest(OpenAIRequest):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1_000_000)


class Problem(BaseModel):
    """OpenAI's error object."""

    error: dict[str, Any]
