"""Prompts with media on their way into the offline engine."""

from collections.abc import Sequence
from typing import Any

from dejakv.identity import Span
from dejakv.request import Media


def spans_of(rendered: Any, media: tuple[Media, ...]) -> tuple[Span, ...]:
    """Where a rendered prompt's media stand, known by the digest of their bytes."""
    places = (rendered.get("mm_placeholders") or {}).get("image", [])
    return tuple(Span(place.offset, place.length, item.digest) for place, item in zip(places, media, strict=True))


def collapsed(token_ids: Sequence[int], spans: Sequence[Span]) -> list[int]:
    """The prompt with one placeholder for each medium, which vLLM expands again."""
    ids: list[int] = []
    end = 0
    for span in spans:
        ids += [*token_ids[end : span.start], token_ids[span.start]]
        end = span.start + span.length
    return [*ids, *token_ids[end:]]
