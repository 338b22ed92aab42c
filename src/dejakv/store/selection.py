"""Which entries a purge takes, and what was made from them and leaves with them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dejakv import errors
from dejakv.errors import InputError
from dejakv.identity import common_prefix
from dejakv.store.base import INT8, KV, ROWS, ChunkMeta
from dejakv.store.budgets import is_older

DONORS = "donors"
"""Entry of the `metadata` of rows: ids of the chunks whose state went into them."""
PROMPT = "prompt"
"""Entry of the `metadata` of rows, and of a prompt's state in 8 bits: key of the prompt."""

Medium = tuple[str, str]
"""Partition and digest of a picture, sound or clip."""


@dataclass(frozen=True)
class Selection:
    """Entries for which everything that is given holds; nothing given: all entries.

    partition   of this tenant
    epoch       of the state of this model (or encoder)
    donors      these prompts and rows, by id
    older_than  stored so many seconds ago or longer
    media       encoder outputs of these media, beside those that belong to `donors`

    Raises: InputError for an age that is negative or no number.
    """

    partition: str | None = None
    epoch: str | None = None
    donors: tuple[str, ...] = ()
    older_than: float | None = None
    media: frozenset[Medium] = frozenset()

    def __post_init__(self) -> None:
        # Written so that NaN is refused too.
        if self.older_than is not None and not 0 <= self.older_than < float("inf"):
            raise InputError(f"older_than={self.older_than} is no age: give a number of seconds, 0 or more")

    def of_others(self, purged: "PurgeResult") -> "Selection":
        """The same in the stores of encoder outputs and fusion states, which know nothing of prompts but their ids and media."""
        if not self.donors:
            return self
        # Without epoch and age: those of an encoder output are not those of the prompt.
        return Selection(self.partition, donors=(*self.donors, *purged.ids), media=purged.media)

    def takes_output(self, key: tuple[str, str, str, str], born: float, now: float) -> bool:
        """Whether an encoder output is taken: by partition, encoder epoch, modality and digest of its medium."""
        partition, epoch, _, digest = key
        named = bool(self.donors or self.media)
        return self.takes(partition, epoch, born, now) and (not named or (partition, digest) in self.media)

    def takes(self, partition: str, epoch: str, created: float, now: float) -> bool:
        """Whether an entry is taken, as far as it does not depend on `donors`."""
        return (
            self.partition in (None, partition)
            and self.epoch in (None, epoch)
            and (self.older_than is None or is_older(created, self.older_than, now))
        )


@dataclass(frozen=True)
class PurgeResult:
    """What a purge removed, or would remove.

    prompts          exact state of prompts
    rows             runs of rows that blends had computed
    parts            segments of prompts that had left before, or were never finished
    encoder_outputs  outputs of encoders, and states of fusion modules
    bytes            of objects and descriptions. Rows that other prompts need stay, and do not count
    ids, media       what it was, for what belongs to it elsewhere
    """

    prompts: int = 0
    rows: int = 0
    parts: int = 0
    encoder_outputs: int = 0
    bytes: int = 0
    ids: frozenset[str] = field(default=frozenset(), repr=False)
    media: frozenset[Medium] = field(default=frozenset(), repr=False)

    def __add__(self, other: "PurgeResult") -> "PurgeResult":
        return PurgeResult(
            self.prompts + other.prompts,
            self.rows + other.rows,
            self.parts + other.parts,
            self.encoder_outputs + other.encoder_outputs,
            self.bytes + other.bytes,
            self.ids | other.ids,
            self.media | other.media,
        )

    def __str__(self) -> str:
        counts = (
            (self.prompts, "prompt"),
            (self.rows, "blended run"),
            (self.parts, "leftover segment"),
            (self.encoder_outputs, "encoder output"),
        )
        return ", ".join(
            [*(errors.counted(number, noun) for number, noun in counts if number), f"{self.bytes:,} bytes"]
        )


def chosen(metas: Sequence[ChunkMeta], selection: Selection, now: float) -> list[ChunkMeta]:
    """The entries that a purge removes: with a prompt everything made from it, and with a named donor also prompts that begin with it."""
    fit = {meta.id: meta for meta in metas if selection.takes(meta.partition, meta.epoch, meta.created, now)}
    if selection.donors or selection.media:
        named = set(selection.donors)
        roots = [meta for id, meta in fit.items() if id in named]
        # Their first rows are those of the purged prompt.
        roots += [meta for root in roots if _is_prompt(root) for meta in _continuing(fit.values(), root)]
        sources = named | {meta.id for meta in roots}
        roots += [meta for meta in fit.values() if _belongs(meta, sources, selection.media)]
        fit = {meta.id: meta for meta in roots}
        # Also of a donor that has left, or of which only rows are there.
        first = [*named, *fit]
    else:
        first = list(fit)

    every = {meta.id: meta for meta in metas}
    fit |= {id: every[id] for id in derived(metas, *first)}
    return list(fit.values())


def counted(metas: Iterable[ChunkMeta]) -> PurgeResult:
    """Count the removal of these entries, but for bytes."""
    metas = list(metas)
    kinds = Counter(KV if _is_prompt(meta) else ROWS if meta.kind in (ROWS, INT8) else "" for meta in metas)
    media = frozenset((meta.partition, span.digest) for meta in metas for span in meta.spans)
    return PurgeResult(kinds[KV], kinds[ROWS], 0, kinds[""], ids=frozenset(meta.id for meta in metas), media=media)


def derived(metas: Iterable[ChunkMeta], *sources: str) -> list[str]:
    """Ids of rows that hold text of these prompts or were computed from their state, directly or through others, each before those made
    from it."""
    made_from: dict[str, list[str]] = {}
    for meta in metas:
        if meta.kind in (ROWS, INT8):
            for source in (*meta.metadata.get(DONORS, ()), meta.metadata.get(PROMPT, "")):
                made_from.setdefault(source, []).append(meta.id)

    derived_ids: dict[str, None] = {}
    # First in, first out: each before those made from it.
    waiting = list(sources)
    while waiting:
        for id in made_from.get(waiting.pop(0), ()):
            if id not in derived_ids:
                derived_ids[id] = None
                waiting.append(id)
    return list(derived_ids)


def _is_prompt(meta: ChunkMeta) -> bool:
    return meta.kind == KV or (meta.kind == INT8 and DONORS not in meta.metadata)


def _continuing(metas: Iterable[ChunkMeta], source: ChunkMeta) -> list[ChunkMeta]:
    """The prompts of its partition and epoch that begin with all of it: they hold its text, and their first rows are its."""
    length = source.num_tokens
    return [
        meta
        for meta in metas
        if _is_prompt(meta)
        and (meta.partition, meta.epoch) == (source.partition, source.epoch)
        and meta.num_tokens > length
        and common_prefix(
            source.token_ids, meta.token_ids, source.spans, [span for span in meta.spans if span.start < length]
        )
        == length
    ]


def _belongs(meta: ChunkMeta, prompts: set[str], media: frozenset[Medium]) -> bool:
    """Whether a record is an encoder output of these media or a fusion state of these prompts."""
    if meta.kind in (KV, ROWS, INT8):
        return False
    about = meta.metadata
    return (meta.partition, about.get("content_hash")) in media or about.get("chunk") in prompts
