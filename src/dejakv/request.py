"""What a caller asks for: a prompt, its media, who asks, and how the answer is to be made.

Each raises InputError for a field of another type, and for text that UTF-8 cannot encode (a lone surrogate): such a text has
no tokens and no key.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol, TypeVar, cast, runtime_checkable

from dejakv.errors import InputError
from dejakv.identity import DEFAULT_PARTITION as DEFAULT_PARTITION
from dejakv.identity import Span
from dejakv.settings import Cosine, Positive, Share, Within, check_fields

Order = Literal["given", "free"]
ReuseMode = Literal["off", "exact", "adopt", "blend", "top_layer"]
"""What a request may choose: `off`, or a `config.reuse.ReuseMethod`."""
Lifetime = Annotated[float, Within(0, above=True)]
Modality = Literal["image", "audio", "video"]
MAX_PARTS = 256
MAX_PLACES = 32
"""Places of the first part that are tried."""


@dataclass(frozen=True)
class Media:
    """One picture, sound or clip, as the bytes it came in (an encoded file: PNG, JPEG, WAV...).

    Two media are the same if their bytes are: re-encoding a picture makes another medium.
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
    """How tokens are chosen. Greedy unless `temperature` is above zero.

    stop  texts after which nothing is decoded; the answer still holds the one that ended it. Not for beams
    """

    max_new_tokens: Positive = 16
    temperature: Annotated[float, Within(0)] = 0.0
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
class Frame:
    """A prompt with parts: `before`, the parts with `between` between them, `after`."""

    before: str
    between: str
    after: str
    parts: tuple[str, ...]

    def prompt(self, order: Sequence[int]) -> str:
        """The prompt with its parts in this order."""
        return self.opening(order) + self.after

    def opening(self, order: Sequence[int]) -> str:
        """The prompt up to the end of the parts that are named."""
        return self.before + self.between.join(self.parts[number] for number in order)


def check_parts(parts: Sequence[Any]) -> tuple[str, ...]:
    """Return the parts as a tuple. Raises: InputError for no part, more than `MAX_PARTS`, an empty one, a repeated one, or a non-text."""
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


def frame_of(prompt: str, parts: Sequence[str]) -> Frame:
    """Finds the parts in a prompt.

    Raises: InputError for parts that are wrong in themselves, or do not stand in the prompt as they are given.
    """
    given = check_parts(parts)
    first, *others = given
    start = -1
    for _ in range(MAX_PLACES):
        start = prompt.find(first, start + 1)
        end = start + len(first)
        second = prompt.find(others[0], end) if others else end
        if start < 0 or second < 0:
            break
        between = prompt[end:second]
        joined = between.join(given)
        if prompt.startswith(joined, start):
            return Frame(prompt[:start], between, prompt[start + len(joined) :], given)
    raise InputError(
        "the parts do not stand in the prompt in the order given, with the same text between them: give them word for word as the "
        "prompt has them, template applied"
    )


@dataclass(frozen=True)
class Request:
    """One request on its way through the cache. Lists of media and parts are kept as tuples.

    prompt     the text the model is given, template applied, media placeholders included
    chunk      the text the levels compare (`chunk_source` picks it; the prompt if nothing does)
    question   what is asked, where the chunk is another text (a program, a group): guards of words read it instead of the chunk
    media      in the order of their placeholders
    partition  tenant: entries, scores and statistics never cross it
    reuse      this request's own way of reuse; None: the cache's. `off`: computed in full, exact prefixes apart
    threshold  this request's own least score of a donor, in [-1, 1]; it can only tighten the cache's
    parts      texts of the prompt whose order is free (retrieved passages), as they stand in it: one after the other, with the same
               text between them
    no_store   nothing of this request is kept, wherever it comes by; state that is there already may serve it
    ttl        seconds for which what is kept of this request may be used; it can only shorten the cache's
    order      `given`: the prompt runs as it is; `free`: its parts may be rearranged, so that more of it has been computed before
    metadata   anything a hook or a report wants (dataset fields, image id); never part of a key
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
            given = getattr(self, name)
            if isinstance(given, list):
                object.__setattr__(self, name, tuple(cast(list[object], given)))
        check_fields(self, error=InputError, nul=True)
        if self.order == "free":
            _ = self.frame  # raises for parts that the prompt does not have
        elif self.parts:
            raise InputError("the request has parts and order='given': give order='free', or leave the parts out")

    @cached_property
    def frame(self) -> Frame:
        """The prompt around its parts. Raises: InputError for parts that do not stand in it, and for none."""
        if self.media:
            raise InputError("order='free' is for texts, and the request has pictures: leave its order out")
        return frame_of(self.prompt, self.parts)


@dataclass(frozen=True)
class Prepared:
    """A tokenized request. `inputs` is the engine's own (lazily processed pixels, position ids, ...).

    epoch  the engine's epoch when state was looked up for it; empty if no state is to be used. An engine that finds another epoch
           before it computes raises ModelChangedError. `prepare` sets it where prompts of one length have an epoch of their own.
    piece  tokens of the pieces in which the engine prefills prompts, so that exact state is reused piece by piece; 1: any number
    order  places of the prompt's parts as they were given, in the order chosen; empty: as given. `order_s`: seconds of choosing
    """

    request: Request
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    inputs: Any = field(default=None, repr=False)
    epoch: str = ""
    piece: int = 1
    order: tuple[int, ...] = ()
    order_s: float = 0.0

    def sampled(self, sampling: Sampling) -> "Prepared":
        """The same prompt with another way of choosing tokens."""
        return replace(self, request=replace(self.request, sampling=sampling))


def pieces(tokens: int, piece: int, spans: Sequence[Span] = ()) -> list[int]:
    """Where a prompt of `tokens` tokens is divided: every `piece` tokens, or behind the picture that stands there; nowhere for 1.
    What is behind the last of these places has a token at least. Longer prompts with this beginning are divided there as well."""
    if piece == 1:
        return []
    ends = {
        next((span.start + span.length for span in spans if span.start < place < span.start + span.length), place)
        for place in range(piece, tokens, piece)
    }
    return sorted(end for end in ends if end < tokens)


def reusable(held: int, tokens: int, piece: int, spans: Sequence[Span] = ()) -> int:
    """How many tokens of a prompt need not be computed if exact state of the first `held` is there: whole pieces, at most all
    tokens but the last."""
    if piece == 1:
        return max(0, min(held, tokens - 1))
    return max((place for place in pieces(tokens, piece, spans) if place <= held), default=0)


T = TypeVar("T")


@dataclass(frozen=True)
class _Scope:
    """What its request says: nothing is kept of it, or for so many seconds; and what is made for it alone."""

    no_store: bool = False
    ttl: float | None = None
    scratch: dict[Any, Any] = field(default_factory=dict[Any, Any])


_NO_LIMITS = _Scope()
_scope: ContextVar[_Scope] = ContextVar("dejakv_retention", default=_NO_LIMITS)


@runtime_checkable
class Forgets(Protocol):
    """A part that remembers something of partitions' requests for speed."""

    def forget(self, partition: str | None) -> None:
        """Forgets what it remembers of one partition, or of all."""
        ...


def forget(parts: Iterable[object], partition: str | None) -> None:
    """Has those of the parts that remember something forget it."""
    for part in parts:
        if isinstance(part, Forgets):
            part.forget(partition)


def nothing_is_kept() -> bool:
    """Whether the request that this thread or task serves leaves nothing behind."""
    return _scope.get().no_store


def kept_for() -> float | None:
    """Seconds for which what is kept of the request may be used; None: it does not say."""
    return _scope.get().ttl


def for_this_request(key: Any, make: Callable[[], T]) -> T:
    """What is made once for the request and dropped with it. Call it only where `nothing_is_kept`."""
    scope = _scope.get()
    assert scope.no_store
    if key not in scope.scratch:
        scope.scratch[key] = make()
    return scope.scratch[key]


def after_waiting(request: Request, seconds: float) -> Request:
    """The request that has waited for so many seconds: its own time is shorter by them, and nothing is kept once it is over."""
    if request.ttl is None:
        return request
    left = request.ttl - seconds
    return replace(request, ttl=left) if left > 0 else replace(request, ttl=None, no_store=True)


@contextmanager
def keeping(*, no_store: bool = False, ttl: float | None = None) -> Generator[None]:
    """Inside, nothing is kept if `no_store`, and no longer than `ttl` seconds where that is given."""
    token = _scope.set(_Scope(no_store, ttl))
    try:
        yield
    finally:
        _scope.reset(token)


def asks_no_store(values: Iterable[str]) -> bool:
    """Whether one of the values of a `Cache-Control` header (RFC 9111, 5.2.1) has the directive `no-store`."""
    directives = ",".join(values).split(",")
    return any(directive.strip().lower() == "no-store" for directive in directives)
