"""What every data set yields: one question, what it is about, and the answer that is right."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dejakv.request import Media


@dataclass(frozen=True)
class Sample:
    """One question of a data set.

    context   text the question is about (a document), empty where a picture is
    messages  a conversation as (role, text), the last one the user's, which is the question too; empty for a single question
    fields    the record's further fields (GQA: imageId, semanticStr, groups, types, ...): `chunk_source` picks from them
    """

    id: str
    question: str
    answer: str | None = None
    media: tuple[Media, ...] = ()
    context: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    messages: tuple[tuple[str, str], ...] = ()


class Dataset(Protocol):
    """A named source of samples. Iterating twice gives the same samples in the same order."""

    @property
    def name(self) -> str: ...

    def __iter__(self) -> Iterator[Sample]: ...
