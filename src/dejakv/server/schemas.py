"""Requests and responses of the endpoints.

The OpenAI ones follow OpenAI's API reference (completions, chat completions).
"""

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dejakv.errors import former_names
from dejakv.request import MAX_PARTS, ReuseMode
from dejakv.server.settings import SIM_THRESHOLD

MAX_STOP_CHARACTERS, MAX_STOPS = 256, 4
MAX_CHOICES = 16
Text = Annotated[str, Field(min_length=1)]
Lifetime = Annotated[float | None, Field(gt=0, le=1e12)]
"""Seconds during which stored state of the request may be used; can only shorten the server's."""
Parts = Annotated[list[Text], Field(max_length=MAX_PARTS)]


class GenerateRequest(BaseModel):
    """Request to SemShareKV's endpoint.

    `use_semshare=true` asks for approximate reuse, `false` for exact reuse; without it the server's
    `--reuse` decides. `sim_threshold` is the least similarity of a donor; it can only tighten the
    server's. `store_key` names the stored state of this prompt, in the caller's own partition;
    names of other partitions are never visible. `no_store` (or the header `Cache-Control:
    no-store`) keeps nothing of the request; `ttl` are the seconds for which its stored state may be
    used.
    """

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"prompt": "ann lives in paris."}]}
    )

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


class AnswerTimings(BaseModel):
    """Times of an answer, in milliseconds."""

    ttft_ms: float
    latency_ms: float
    lookup_ms: float
    inject_ms: float


class StateOrigin(BaseModel):
    """Origin of an answer's state, by its `Record`.

    `reason` says why nothing was reused, why state was not used, or why the prompt ran exactly;
    else it is empty.
    """

    model_config = ConfigDict(from_attributes=True, populate_by_name=True)

    level: str
    reuse: str = Field(validation_alias="method")
    approximate: bool
    arithmetic: str
    bitwise: bool
    answer: str
    reason: str
    tokens_reused: int = Field(validation_alias="reused_tokens")
    tokens_computed: int = Field(validation_alias="computed_tokens")


class AnswerProvenance(StateOrigin):
    """Origin of an answer's state.

    `provenance` is `miss`, `hit (prefix)`, `hit (text:exact)`, `hit (copied)` and the like.
    `reason` says why nothing was reused, why state was not used, or why the prompt ran exactly;
    else it is empty. `order` is the order of `parts` in which they ran; empty if it is the given
    one.
    """

    provenance: str
    score: float | None
    order: list[int]


class GenerateResponse(StateOrigin):
    """Origin of the answer's state, and SemShareKV's fields.

    `cache_hit` says whether state of an earlier prompt was used at any level, `used_semshare`
    whether a similar donor's KV was. `store_key` is null for an approximate answer, whose state is
    never kept as its prompt's.
    """

    text: str
    used_semshare: bool
    cache_hit: bool
    ref_key: str | None
    retrieved_sim: float | None
    store_key: str | None
    timings: AnswerTimings


class PurgeRequest(BaseModel):
    """Selection of entries that are removed, with everything that was made from them.

    An entry is selected if all conditions of the request hold. `all` must be true where there is no
    condition. `donor` is a `store_key`, a `ref_key` or an id; `older_than` are seconds; `partition`
    is for the operator. `dry_run` removes nothing.
    """

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"older_than": 3600, "dry_run": True}]}
    )

    all: bool = False
    partition: str | None = Field(default=None, max_length=10_000)
    epoch: str | None = Field(default=None, max_length=1000)
    donor: str | None = Field(default=None, min_length=1, max_length=64)
    older_than: float | None = Field(default=None, ge=0, le=1e12)
    dry_run: bool = False


class ReuseOptions(BaseModel):
    """DejaKV's own options in an OpenAI request (`extra_body={"dejakv": {...}}`).

    `reuse=null` leaves the choice to the server's `--reuse`; `off` returns no stored answer and
    still takes exact prefixes. `threshold` is the least similarity of a donor and can only tighten
    the server's; `ttl` is in seconds. `no_cache` computes in full: no stored state serves the
    request, and none of its own is stored. `parts` are texts of the prompt, word for word as after
    the chat template, one after the other with the same text between them; `order="free"` lets them
    be served in another order.
    """

    model_config = ConfigDict(extra="forbid")

    reuse: ReuseMode | None = None
    threshold: float | None = Field(default=None, ge=-1, le=1)
    no_store: bool = False
    no_cache: bool = False
    ttl: Lifetime = None
    parts: Parts = []
    order: Literal["given", "free"] = "given"


WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
"""OpenAI's fields that change no answer here, whatever they hold."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "best_of": (1,), "echo": (False,), "frequency_penalty": (0,), "function_call": ("none",),
    "logit_bias": ({},), "modalities": (["text"],), "presence_penalty": (0,),
    "reasoning_effort": ("none",), "response_format": ({"type": "text"},), "store": (False,),
    "suffix": ("",), "tool_choice": ("none", "auto"), "verbosity": ("medium",),
    # vLLM's
    "add_generation_prompt": (True,), "chat_template_kwargs": ({},),
    "continue_final_message": (False,), "ignore_eos": (False,),
    "include_stop_str_in_output": (False,), "length_penalty": (1,), "min_p": (0,),
    "min_tokens": (0,), "priority": (0,), "repetition_penalty": (1,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}  # fmt: skip
"""Values without effect, of unsupported fields. Null and an empty list have none in any field."""


class _Plain(BaseModel):
    """Model that accepts unsupported fields without effect, and refuses all others by name."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        declared, fields = cls.model_fields, cast(dict[str, Any], data).items()
        return {
            n: v
            for n, v in fields
            if v is not None and (n in declared or not cls.asks_nothing(n, v))
        }

    @classmethod
    def asks_nothing(cls, name: str, value: Any) -> bool:
        """Return whether an unsupported field has a value without effect."""
        return value == []


class StreamOptions(_Plain):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Random characters that hide the lengths of pieces.

    There are none here, and no client needs them.
    """


class OpenAIRequest(_Plain):
    """Common fields of completions and chat completions."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: list[str] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    dejakv: ReuseOptions = ReuseOptions()

    @classmethod
    def asks_nothing(cls, name: str, value: Any) -> bool:
        """Return whether the value has no effect here, by `WITHOUT_EFFECT` and `NEUTRAL`."""
        neutral = ([], *NEUTRAL.get(name, ()))
        # In Python 1 == True, and to a client they differ.
        same = (
            value == neutral_value and isinstance(value, bool) == isinstance(neutral_value, bool)
            for neutral_value in neutral
        )
        return name in WITHOUT_EFFECT or any(same)

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> list[str]:
        stops: list[Any] = [value] if isinstance(value, str) else value
        fits = isinstance(stops, list) and len(stops) <= MAX_STOPS  # pyright: ignore[reportUnnecessaryIsInstance]
        if not fits or not all(
            isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops
        ):
            raise ValueError(
                f"give a text, or a list of up to {MAX_STOPS}, of 1 to {MAX_STOP_CHARACTERS} "
                "characters each"
            )

        return stops


class CompletionRequest(OpenAIRequest):
    """Request for a completion."""

    prompt: Text
    logprobs: Annotated[int, Field(ge=0, le=5, strict=True)] | Literal[False] | None = None

    @property
    def top_tokens(self) -> int | None:
        """Number of likeliest tokens that are asked for at each place; None: no logprobs."""
        return None if self.logprobs is False else self.logprobs

    @field_validator("prompt", mode="before")
    @classmethod
    def _single_prompt(cls, value: Any) -> Any:
        """Unpack a list with a single text."""
        if (
            isinstance(value, list)
            and len(cast(list[Any], value)) == 1
            and isinstance(value[0], str)
        ):
            return value[0]

        if isinstance(value, list):
            raise ValueError(
                "give one text: several prompts in a request, and token ids, are not supported"
            )

        return value


class _InMessage(_Plain):
    """Model of a part of a message.

    `cache_control`, in which Anthropic's clients mark a prefix, changes no answer: prefixes are
    found unmarked.
    """

    @classmethod
    def asks_nothing(cls, name: str, value: Any) -> bool:
        """Accept `cache_control` with any value."""
        return name == "cache_control" or super().asks_nothing(name, value)


class ImageUrl(_Plain):
    """Address of a picture: a data URL."""

    url: str
    detail: Literal["auto"] = "auto"


class ContentPart(_InMessage):
    """Part of a message: a text or a picture."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None


class ChatMessage(_InMessage):
    """Message of a chat."""

    name: Annotated[str, Field(pattern=r"^[^\s:]{1,64}$")] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]


class ChatRequest(OpenAIRequest):
    """Request for a chat completion."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)

    @property
    def top_tokens(self) -> int | None:
        """Number of likeliest tokens that are asked for at each place; None: no logprobs."""
        return self.top_logprobs if self.logprobs else None


class OpenAIError(BaseModel):
    """OpenAI's error object."""

    error: dict[str, Any]


__getattr__ = former_names(__name__, Origin="StateOrigin")
