"""What a caller asks for: a prompt, its media, who asks, and how the answer is to be made.

Each raises InputError for a field of another type, and for text that UTF-8 cannot encode (a lone surrogate): such a text has
no tokens and no key.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, cast

from dejakv.errors import InputError
from dejakv.parts import Frame, frame_of
from dejakv.settings import Cosine, Positive, Share, Within, check_fields

Order = Literal["given", "free"]
ReuseMode = Literal["off", "exact", "adopt", "blend", "top_layer"]
"""What a request may choose: `off`, or a `config.reuse.ReuseMethod`."""
Lifetime = Annotated[float, Within(0, above=True)]
Modality = Literal["image", "audio", "video"]

DEFAULT_PARTITION = "default"


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
