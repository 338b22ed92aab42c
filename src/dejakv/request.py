"""A request: prompt, media, caller, and sampling.

Each class raises InputError for a field of another type, and for text that UTF-8 cannot encode (a lone surrogate), which has no
tokens and no key.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar, cast

from dejakv.errors import InputError
from dejakv.identity import DEFAULT_PARTITION as DEFAULT_PARTITION
from dejakv.identity import MediumSpan
from dejakv.settings import Cosine, NumberRange, Positive, Share, check_fields

Order = Literal["given", "free"]
ReuseMode = Literal["off", "exact", "adopt", "blend", "top_layer"]
"""What a request may choose: `off`, or a `config.reuse.ReuseMethod`."""
Lifetime = Annotated[float, NumberRange(0, above=True)]
Modality = Literal["image", "audio", "video"]
MAX_PARTS = 256
MAX_PLACES = 32
"""Places of the first part that are tried."""


@dataclass(frozen=True)
class Media:
    """One picture, sound or clip, as its encoded file (PNG, JPEG, WAV...).

    Media are equal if their bytes are: a re-encoded picture is another medium.
    """

    data: bytes = field(repr=False)
    modality: Modality = "image"
    name: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, error=InputError, nul=True)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the bytes, 64 hexadecimal digits."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Sampling:
    """Choice of tokens, greedy unless `temperature` is above zero.

    stop  texts that end the answer; the one found stays in it. Not for beams
    """

    max_new_tokens: Positive = 16
    temperature: Annotated[float, NumberRange(0)] = 0.0
    top_p: Share = 1.0
    seed: int | None = None
    num_beams: Positive = 1
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class PartFrame:
    """A prompt with parts: `before`, the parts joined by `between`, `after`."""

    before: str
    between: str
    after: str
    parts: tuple[str, ...]

    def prompt(self, order: Sequence[int]) -> str:
        """The prompt with its parts in this order."""
        return self.opening(order) + self.after

    def opening(self, order: Sequence[int]) -> str:
        """The prompt up to the end of the named parts."""
        return self.before + self.between.join(self.parts[number] for number in order)


def check_parts(parts: Sequence[Any]) -> tuple[str, ...]:
    """Return the parts as a tuple. Raises: InputError for no part, more than `MAX_PARTS`, an empty one, a repeated one, or a non-text."""
    # A text is a sequence of texts too: its letters would become the parts.
    if isinstance(parts, str) or not all(isinstance(part, str) for part in parts):
        raise InputError("parts are a list of texts: give each passage as a string of its own")
    if not parts:
        raise InputError("order='free' needs the parts whose order is free: give parts=[...], or leave the order out")
    if len(parts) > MAX_PARTS:
        raise InputError(f"{len(parts)} parts are too many: give {MAX_PARTS} at most, or join some")
    if not all(part.strip() for part in parts):
        empty = next(number for number, part in enumerate(parts) if not part.strip())
        raise InputError(f"part {empty} is empty: leave it out")

    if len(set(parts)) < len(parts):
        twice = next(number for number, part in enumerate(parts) if part in parts[:number])
        raise InputError(f"part {twice} is given twice: leave one out")
    return tuple(parts)


def frame_of(prompt: str, parts: Sequence[str]) -> PartFrame:
    """Find the parts in a prompt.

    Raises: InputError for invalid parts, or parts not found in the prompt as given.
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
        "the parts do not stand in the prompt in the order given, with the same text between them: give them word for word as the "
        "prompt has them, template applied"
    )


@dataclass(frozen=True)
class Request:
    """One request on its way through the cache. Lists of media and parts are kept as tuples. Raises: InputError for a wrong value.

    prompt     text for the model, template applied, media placeholders included
    chunk      text for the levels to compare (picked by `chunk_source`; default: the prompt)
    question   question, if the chunk is another text (a program, a group): guards of words read it instead of the chunk
    media      in the order of their placeholders
    partition  tenant: entries, scores and statistics never cross it
    reuse      its way of reuse; None: the cache's. `off`: computed in full, exact prefixes apart
    threshold  its least score of a donor, in [-1, 1]; only tightens the cache's
    parts      texts of the prompt in free order (retrieved passages), as they stand in it: consecutive, with the same text between
    no_store   store nothing of this request, anywhere; stored state may still serve it
    ttl        seconds of use for everything stored of this request; only shortens the cache's
    order      `given`: the prompt runs as it is; `free`: its parts may be rearranged for a longer stored prefix
    metadata   values for hooks and reports (dataset fields, image id); never part of a key
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
    ttl: Lifetime | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    question: str = ""

    def __post_init__(self) -> None:
        for name in ("media", "parts"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(cast(list[object], value)))
        check_fields(self, error=InputError, nul=True)
        if self.order == "free":
            _ = self.frame  # raises for parts that the prompt does not have
        elif self.parts:
            raise InputError("the request has parts and order='given': give order='free', or leave the parts out")

    @classmethod
    def stored(cls, prompt: str, chunk: str, partition: str) -> "Request":
        """The request of a stored prompt. Its texts were checked when it came: checking 100,000 again takes seconds."""
        request = object.__new__(cls)
        vars(request).update(id="", prompt=prompt, chunk=chunk, partition=partition, metadata={})
        return request

    @cached_property
    def frame(self) -> PartFrame:
        """The prompt around its parts. Raises: InputError without parts, or for parts not found in it."""
        if self.media:
            raise InputError("order='free' is for texts, and the request has pictures: leave its order out")
        return frame_of(self.prompt, self.parts)


@dataclass(frozen=True)
class Prepared:
    """A tokenized request. `inputs` is the engine's own (lazily processed pixels, position ids, ...).

    epoch  the engine's epoch at the lookup; empty: use no state. An engine with another epoch raises ModelChangedError before it
           computes. Set by `prepare` where prompts of one length have an epoch of their own.
    piece  tokens of a prefill piece, the unit of exact reuse; 1: any number
    order  given places of the prompt's parts in the chosen order; empty: as given. `order_s`: seconds of choosing
    """

    request: Request
    token_ids: tuple[int, ...]
    spans: tuple[MediumSpan, ...] = ()
    inputs: Any = field(default=None, repr=False)
    epoch: str = ""
    piece: int = 1
    order: tuple[int, ...] = ()
    order_s: float = 0.0

    def sampled(self, sampling: Sampling) -> "Prepared":
        """Copy with another sampling."""
        return replace(self, request=replace(self.request, sampling=sampling))


def pieces(tokens: int, piece: int, spans: Sequence[MediumSpan] = ()) -> list[int]:
    """Places where a prompt of `tokens` tokens is divided: every `piece` tokens, or behind a picture there; none for 1.

    The last piece has at least one token. Longer prompts with this beginning are divided alike.
    """
    if piece == 1:
        return []
    # A picture is never divided: an end inside of it moves behind it.
    ends = {
        next((span.start + span.length for span in spans if span.start < place < span.start + span.length), place)
        for place in range(piece, tokens, piece)
    }
    return sorted(end for end in ends if end < tokens)


def reusable(prefix_tokens: int, tokens: int, piece: int, spans: Sequence[MediumSpan] = ()) -> int:
    """Tokens of a prompt to reuse from exact state of its first `prefix_tokens`: whole pieces, at most all but the last token."""
    if piece == 1:
        return max(0, min(prefix_tokens, tokens - 1))
    # Where full computation divides too: only then rounding is the same.
    return max((place for place in pieces(tokens, piece, spans) if place <= prefix_tokens), default=0)


T = TypeVar("T")


@dataclass(frozen=True)
class _RetentionScope:
    """Storage rules of a request (nothing, or for some seconds), and values made for it alone."""

    no_store: bool = False
    ttl: float | None = None
    scratch: dict[Any, Any] = field(default_factory=dict[Any, Any])


_NO_LIMITS = _RetentionScope()
_scope: ContextVar[_RetentionScope] = ContextVar("dejakv_retention", default=_NO_LIMITS)


def nothing_is_kept() -> bool:
    """Whether this thread or task serves a request with `no_store`."""
    return _scope.get().no_store


def kept_for() -> float | None:
    """Seconds of use for state of the current request; None: unlimited by it."""
    return _scope.get().ttl


def for_this_request(key: Any, make: Callable[[], T]) -> T:
    """Value made once for the request and dropped with it. Call only under `nothing_is_kept`."""
    scope = _scope.get()
    assert scope.no_store
    if key not in scope.scratch:
        scope.scratch[key] = make()
    return scope.scratch[key]


def after_waiting(request: Request, seconds: float) -> Request:
    """The request after `seconds` of waiting: its `ttl` is shorter by them; once it is over, nothing is stored."""
    if request.ttl is None:
        return request
    remaining_ttl = request.ttl - seconds
    # Not 0, which would mean no limit.
    return replace(request, ttl=remaining_ttl) if remaining_ttl > 0 else replace(request, ttl=None, no_store=True)


@contextmanager
def keeping(*, no_store: bool = False, ttl: float | None = None) -> Generator[None]:
    """Context in which nothing is stored (`no_store`), or for at most `ttl` seconds."""
    token = _scope.set(_RetentionScope(no_store, ttl))
    try:
        yield
    finally:
        _scope.reset(token)


def asks_no_store(values: Iterable[str]) -> bool:
    """Whether a `Cache-Control` header's values (RFC 9111, 5.2.1) include `no-store`."""
    directives = ",".join(values).split(",")
    return any(directive.strip().lower() == "no-store" for directive in directives)
