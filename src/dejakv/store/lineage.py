"""What was made from a stored prompt's state, through all generations."""

from collections.abc import Iterable

from dejakv.identity import Span, common_prefix
from dejakv.store.base import KV, NODE, ROWS, ChunkMeta

DONORS = "donors"
"""Entry of the `metadata` of rows: ids of the chunks whose state went into them."""
PROMPT = "prompt"
"""Entry of the `metadata` of rows: key of the prompt that was blended, whose own text they hold."""


def derived(metas: Iterable[ChunkMeta], *sources: str) -> list[str]:
    """Ids of the chunks of rows that hold text of these prompts or were computed from their state, directly or through others,
    each before those made from it."""
    made_from: dict[str, list[str]] = {}
    for meta in metas:
        if meta.kind == ROWS:
            for source in (*meta.metadata.get(DONORS, ()), meta.metadata.get(PROMPT, "")):
                made_from.setdefault(source, []).append(meta.id)
    found: dict[str, None] = {}
    waiting = list(sources)
    while waiting:
        for id in made_from.get(waiting.pop(0), ()):
            if id not in found:
                found[id] = None
                waiting.append(id)
    return list(found)


def continuing(metas: Iterable[ChunkMeta], source: ChunkMeta) -> list[ChunkMeta]:
    """The prompts, and parts of prompts, of its partition and epoch that begin with all of it: they hold its text, and their first rows
    are its."""
    length = len(source.token_ids)
    return [
        meta
        for meta in metas
        if meta.kind in (KV, NODE)
        and (meta.partition, meta.epoch) == (source.partition, source.epoch)
        and len(meta.token_ids) > length
        and common_prefix(source.token_ids, meta.token_ids, source.spans, _before(meta, length)) == length
    ]


def _before(meta: ChunkMeta, tokens: int) -> tuple[Span, ...]:
    return tuple(span for span in meta.spans if span.start < tokens)
