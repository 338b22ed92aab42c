"""The samples of every data set: a question, its context or pictures, and the right answer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dejakv.request import Media


@dataclass(frozen=True)
class Sample:
    """One question of a data set.

    Attributes
    ----------
    id : str
        Name of the sample in its data set.
    question : str
        The question, which ends the prompt.
    answer : str or None
        The right answer, if it is known.
    media : tuple[Media, ...]
        Pictures, in the order of the prompt.
    context : str
        Text the question is about (a document); empty for a question about a picture.
    fields : mapping
        Further fields of the record (GQA: imageId, semanticStr, groups, types, ...), from which
        `chunk_source` picks.
    messages : tuple of (role, text)
        A conversation, ending with the user's message, which is also the question; empty for a
        single question.
    parts : tuple[str, ...]
        Texts of the context whose order is free, as they stand in it; empty where none is.
    scored : bool
        Whether `answer` is meant to be said as it stands, so that answers can be counted as right.
        Otherwise it is a note for readers.
    """

    id: str
    question: str
    answer: str | None = None
    media: tuple[Media, ...] = ()
    context: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    messages: tuple[tuple[str, str], ...] = ()
    parts: tuple[str, ...] = ()
    scored: bool = True


Dataset = Iterable[Sample]
"""A source of samples. Iterating twice gives the same samples in the same order."""
