"""A request: prompt, media, caller, and sampling.

Each class raises InputError for a field of another type, and for text that UTF-8 cannot encode (a
lone surrogate), which has no tokens and no key.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import InstanceOf, field_validator

from dejakv.errors import InputError, former_fields
from dejakv.identity import DEFAULT_PARTITION as DEFAULT_PARTITION
from dejakv.identity import MediumSpan
from dejakv.settings import (
    Cosine,
    NumberRange,
    Positive,
    RegisteredMethod,
    Share,
    strict_dataclass,
)

Order = Literal["given", "free"]
ReuseMode = Annotated[str, RegisteredMethod("off")]
"""Ways of reuse that a request may choose: `off`, or the name of a method (`dejakv.plugins`)."""
Lifetime = Annotated[float, NumberRange(0, above=True)]
Modality = Literal["image", "audio", "video"]
MAX_PARTS = 256
MAX_PLACES = 32
"""Places of the first part that are tried."""


@strict_dataclass(error=InputError, nul=True)
class Media:
    """One picture, sound or clip, as its encoded file (PNG, JPEG, WAV...).

    Media are equal if their bytes are: a re-encoded picture is another medium.

    Attributes
    ----------
    data : bytes
        Content of the encoded file.
    modality : {"image", "audio", "video"}
        Kind of the medium.
    name : str or None
        Name for messages.
    """

    data: bytes = field(repr=False)
    modality: Modality = "image"
    name: str | None = None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the bytes, 64 hexadecimal digits."""
        return hashlib.sha256(self.data).hexdigest()


@strict_dataclass(error=InputError)
class Sampling:
    """Choice of tokens, greedy unless `temperature` is above zero.

    Attributes
    ----------
    max_new_tokens : int
        Most tokens of the answer.
    temperature, top_p : float
        As in transformers.
    seed : int or None
        Seed of the draws; None draws from the process's generators.
    num_beams : int
        Beams of the search; 1 for none.
    stop : tuple[str, ...]
        Texts that end the answer. The text that ended it stays in it. Not for beams.
    """

    max_new_tokens: Positive = 16
    temperature: Annotated[float, NumberRange(0)] = 0.0
    top_p: Share = 1.0
    seed: int | None = None
    num_beams: Positive = 1
    stop: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return self.temperature == 0.0


@dataclass(frozen=True)
class Retention:
    """What may be stored of a request, and for how long.

    Attributes
    ----------
    no_store : bool
        Store nothing, anywhere.
    ttl : float or None
        Seconds of use for everything stored; None sets no limit.
    """

    no_store: bool = False
    ttl: float | None = None


@dataclass(frozen=True)
class PartFrame:
    """A prompt with parts: `before`, the parts joined by `between`, `after`."""

    before: str
    between: str
    after: str
    parts: tuple[str, ...]

    def prompt(self, order: Sequence[int]) -> str:
        """Return the prompt with its parts in this order."""
        return self.opening(order) + self.after

    def opening(self, order: Sequence[int]) -> str:
        """Return the prompt up to the end of the named parts."""
        return self.before + self.between.join(self.parts[number] for number in order)


def check_parts(parts: Sequence[Any]) -> tuple[str, ...]:
    """Return the parts as a tuple.

    Raises
    ------
    InputError
        There is no part or there are more than `MAX_PARTS`, or a part is empty, repeated or no
        text.
    """
    # A text is a sequence of texts too: its letters would become the parts.
    if isinstance(parts, str) or not all(isinstance(part, str) for part in parts):
        raise InputError("parts are a list of texts: give each passage as a string of its own")
    if not parts:
        raise InputError(
            "order='free' needs the parts whose order is free: give parts=[...], or leave the "
            "order out"
        )
    if len(parts) > MAX_PARTS:
        raise InputError(f"{len(parts)} parts are too many: give {MAX_PARTS} at most, or join some")

    if not all(part.strip() for part in parts):
        empty = next(number for number, part in enumerate(parts) if not part.strip())
        raise InputError(f"part {empty} is empty: leave it out")

    if len(set(parts)) < len(parts):
        twice = next(number for number, part in enumerate(parts) if part in parts[:number])
        raise InputError(f"part {twice} is given twice: leave one out")
    return tuple(parts)


def find_frame(prompt: str, parts: Sequence[str]) -> PartFrame:
    """Split a prompt around its parts.

    Raises
    ------
    InputError
        Parts are invalid, or do not stand in the prompt as given.
    """
    checked_parts = check_parts(parts)
    first, *later_parts = checked_parts

    start = -1
    # The first part may also stand in the text before the parts, as in an example.
    for _ in range(MAX_PLACES):
        start = prompt.find(first, start + 1)
        end = start + len(first)
        second = prompt.find(later_parts[0], end) if later_parts else end
        if start < 0 or second < 0:
            break
        between = prompt[end:second]

        joined = between.join(checked_parts)
        if prompt.startswith(joined, start):
            return PartFrame(prompt[:start], between, prompt[start + len(joined) :], checked_parts)
    raise InputError(
        "the parts do not stand in the prompt in the order given, with the same text between them: "
        "give them word for word as the "
        "prompt has them, template applied"
    )


@strict_dataclass(error=InputError, nul=True)
class Request:
    """One request on its way through the cache. Lists of media and parts become tuples.

    Attributes
    ----------
    id : str
        Name of the request in records.
    prompt : str
        Text for the model, template applied, media placeholders included.
    chunk : str
        Text for the levels to compare (picked by `chunk_source`; by default the prompt).
    media : tuple[Media, ...]
        Media in the order of their placeholders.
    partition : str
        Tenant: entries, scores and statistics never cross it.
    sampling : Sampling
        How tokens are chosen.
    reuse : ReuseMode or None
        Way of reuse; None for the cache's. `off` computes in full, exact prefixes apart.
    threshold : float or None
        Least score of a donor, in [-1, 1]; it only tightens the cache's.
    parts : tuple[str, ...]
        Texts of the prompt in free order (retrieved passages), as they stand in it: consecutive,
        with the same text between.
    order : {"given", "free"}
        `given` runs the prompt as it is; `free` allows other orders of its parts for a longer
        stored prefix.
    no_store : bool
        Store nothing of this request, anywhere. Stored state may still serve it.
    no_cache : bool
        Compute everything, pictures included: no stored state serves this request. Nothing of it is
        stored either.
    ttl : float or None
        Seconds of use for everything stored of this request; it only shortens the cache's.
    metadata : Mapping[str, Any]
        Values for hooks and reports (dataset fields, image id); never part of a key.
    question : str
        The question, if the chunk is another text (a program, a group). Guards of words read it
        instead of the chunk.

    Raises
    ------
    InputError
        A value is wrong.
    """

    id: str
    prompt: str
    chunk: str
    media: tuple[Media, ...] = ()
    partition: str = DEFAULT_PARTITION
    sampling: Sampling = Sampling()
    reuse: ReuseMode | None = None
    threshold: Cosine | None = None
    parts: tuple[str, ...] = ()
    order: Order = "given"
    no_store: bool = False
    no_cache: bool = False
    ttl: Lifetime | None = None
    metadata: InstanceOf[Mapping[str, Any]] = field(default_factory=dict[str, Any])
    question: str = ""

    @field_validator("media", "parts", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        return tuple(cast(list[object], value)) if isinstance(value, list) else value

    def __post_init__(self) -> None:
        # The frame raises for parts that the prompt does not have.
        if self.order == "free":
            _ = self.frame
        elif self.parts:
            raise InputError(
                "the request has parts and order='given': give order='free', or leave the parts out"
            )

    @classmethod
    def from_store(cls, prompt: str, chunk: str, partition: str) -> "Request":
        """Make the request of a stored prompt, without checks.

        Its texts were checked when it came: checking 100,000 again takes seconds.

        Parameters
        ----------
        prompt : str
            Text for the model.
        chunk : str
            Text for the levels to compare.
        partition : str
            Tenant.

        Returns
        -------
        Request
            The request with these texts, without id, media or metadata.
        """
        request = object.__new__(cls)
        vars(request).update(id="", prompt=prompt, chunk=chunk, partition=partition, metadata={})
        return request

    @property
    def retention(self) -> Retention:
        """What may be stored of this request."""
        return Retention(self.no_store or self.no_cache, self.ttl)

    @cached_property
    def frame(self) -> PartFrame:
        """The prompt around its parts.

        Raises
        ------
        InputError
            There are no parts, they do not stand in the prompt, or the request has media.
        """
        if self.media:
            raise InputError(
                "order='free' is for texts, and the request has pictures: leave its order out"
            )
        return find_frame(self.prompt, self.parts)


@former_fields(piece="prefill_unit")
@dataclass(frozen=True)
class Prepared:
    """A tokenized request.

    Attributes
    ----------
    request : Request
        The request.
    token_ids : tuple[int, ...]
        Tokens of the prompt, media placeholders expanded.
    spans : tuple[MediumSpan, ...]
        Places of the media, ascending.
    inputs : Any
        Values of the engine's own (lazily processed pixels, position ids, ...).
    epoch : str
        The engine's epoch at the lookup; empty to use no state. An engine with another epoch raises
        ModelChangedError before it computes. Set by `prepare` where prompts of one length have an
        epoch of their own.
    prefill_unit : int
        Tokens of a prefill unit, which exact reuse is made of; 1 for any number.
    order : tuple[int, ...]
        Given places of the prompt's parts in the chosen order; empty if they stand as given.
    order_s : float
        Seconds of choosing the order.
    """

    request: Request
    token_ids: tuple[int, ...]
    spans: tuple[MediumSpan, ...] = ()
    inputs: Any = field(default=None, repr=False)
    epoch: str = ""
    prefill_unit: int = 1
    order: tuple[int, ...] = ()
    order_s: float = 0.0

    def sampled(self, sampling: Sampling) -> "Prepared":
        """Return a copy with another sampling."""
        return replace(self, request=replace(self.request, sampling=sampling))


def prefill_boundaries(
    tokens: int, prefill_unit: int, spans: Sequence[MediumSpan] = ()
) -> list[int]:
    """Return the places where a prompt is divided into prefill units.

    They are at every `prefill_unit` tokens, or behind a picture that stands there. The last unit
    has at least one token, and longer prompts with this beginning are divided alike.

    Parameters
    ----------
    tokens : int
        Tokens of the prompt.
    prefill_unit : int
        Tokens of a prefill unit; 1 does not divide.
    spans : Sequence[MediumSpan]
        Places of the media.
    """
    if prefill_unit == 1:
        return []

    # A picture is never divided: an end inside of it moves behind it.
    ends = {
        next(
            (
                span.start + span.length
                for span in spans
                if span.start < place < span.start + span.length
            ),
            place,
        )
        for place in range(prefill_unit, tokens, prefill_unit)
    }
    return sorted(end for end in ends if end < tokens)


def reusable_tokens(
    prefix_tokens: int, tokens: int, prefill_unit: int, spans: Sequence[MediumSpan] = ()
) -> int:
    """Count the tokens to reuse from exact state of a prompt's first `prefix_tokens` tokens.

    These are whole prefill units, at most all but the last token.
    """
    if prefill_unit == 1:
        return max(0, min(prefix_tokens, tokens - 1))
    # Where full computation divides too: only then rounding is the same.
    return max(
        (
            place
            for place in prefill_boundaries(tokens, prefill_unit, spans)
            if place <= prefix_tokens
        ),
        default=0,
    )


T = TypeVar("T")


@dataclass(frozen=True)
class _RetentionScope:
    """A request's retention, and values made for the request alone."""

    retention: Retention = Retention()
    scratch: dict[Any, Any] = field(default_factory=dict[Any, Any])


_NO_LIMITS = _RetentionScope()

# A context and no argument: foreign code stands between a request and the encoder cache. An
# embedding hook calls `llm.embed_image(picture, partition)`, and somebody's own engine a
# `VisualKVCache`. One that forgot to pass the retention on would store what must not be stored.
_scope: ContextVar[_RetentionScope] = ContextVar("dejakv_retention", default=_NO_LIMITS)


def current_retention() -> Retention:
    """Return the retention of the request that this thread or task serves."""
    return _scope.get().retention


def request_scratch(key: Any, make: Callable[[], T]) -> T:
    """Return a value that is made once for the request and dropped with it.

    Call it only for a request with `no_store`.
    """
    scope = _scope.get()
    assert scope.retention.no_store
    if key not in scope.scratch:
        scope.scratch[key] = make()
    return scope.scratch[key]


def after_waiting(request: Request, seconds: float) -> Request:
    """Return the request after some seconds of waiting, by which its `ttl` is shorter.

    Once the `ttl` is over, nothing is stored of it.
    """
    if request.ttl is None:
        return request

    remaining_ttl = request.ttl - seconds
    # Not 0, which would mean no limit.
    return (
        replace(request, ttl=remaining_ttl)
        if remaining_ttl > 0
        else replace(request, ttl=None, no_store=True)
    )


@contextmanager
def retention_scope(retention: Retention) -> Generator[None]:
    """Open a context in which everything is stored as the retention of a request says."""
    token = _scope.set(_RetentionScope(retention))
    try:
        yield
    finally:
        _scope.reset(token)


def asks_no_store(values: Iterable[str]) -> bool:
    """Tell whether a `Cache-Control` header's values (RFC 9111, 5.2.1) include `no-store`."""
    directives = ",".join(values).split(",")
    return any(directive.strip().lower() == "no-store" for directive in directives)
