"""Which entries a purge takes, and which entries were made from them and leave with them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dejakv import errors
from dejakv.errors import InputError
from dejakv.identity import common_prefix
from dejakv.store.base import KV, OFFLOAD_CHUNK, ROWS, StateInfo
from dejakv.store.budgets import is_older

DONORS = "donors"
"""Entry of the `metadata` of rows: ids of the entries whose state went into them."""
PROMPT = "prompt"
"""Entry of the `metadata` of rows: key of the prompt."""

Medium = tuple[str, str]
"""Partition and digest of a picture, sound or clip."""


@dataclass(frozen=True)
class Selection:
    """Entries that meet all conditions; without a condition: all entries.

    Attributes
    ----------
    partition : str | None
        Entries of this tenant.
    epoch : str | None
        State of this model (or encoder).
    donors : tuple[str, ...]
        These prompts and rows, by id.
    older_than : float | None
        Entries stored at least so many seconds ago.
    media : frozenset[Medium]
        Encoder outputs of these media, beside those that belong to `donors`.

    Raises
    ------
    InputError
        For an age that is negative or no number.
    """

    partition: str | None = None
    epoch: str | None = None
    donors: tuple[str, ...] = ()
    older_than: float | None = None
    media: frozenset[Medium] = frozenset()

    def __post_init__(self) -> None:
        # Written so that NaN is refused too.
        if self.older_than is not None and not 0 <= self.older_than < float("inf"):
            raise InputError(
                f"older_than={self.older_than} is no age: give a number of seconds, 0 or more"
            )

    def for_output_stores(self, purged: "PurgeResult") -> "Selection":
        """Return the selection for stores of encoder outputs and fusion states.

        They know nothing of prompts but ids and media.

        Parameters
        ----------
        purged : PurgeResult
            What the purge of prompts has taken.

        Returns
        -------
        Selection
            By partition, ids and media; this one, if it names no donors.
        """
        if not self.donors:
            return self
        # Without epoch and age: those of an encoder output are not those of the prompt.
        return Selection(self.partition, donors=(*self.donors, *purged.ids), media=purged.media)

    def covers_output(self, key: tuple[str, str, str, str], born: float, now: float) -> bool:
        """Return whether an encoder output is taken.

        Parameters
        ----------
        key : tuple[str, str, str, str]
            Partition, encoder epoch, modality and digest of the medium.
        born : float
            When it was computed, in seconds since 1970.
        now : float
            Seconds since 1970.

        Returns
        -------
        bool
            Whether the output leaves.
        """
        partition, epoch, _, digest = key
        named = bool(self.donors or self.media)
        return self.covers(partition, epoch, born, now) and (
            not named or (partition, digest) in self.media
        )

    def covers(self, partition: str, epoch: str, created: float, now: float) -> bool:
        """Return whether an entry is taken, as far as `donors` and `media` do not decide it.

        Parameters
        ----------
        partition, epoch : str
            Partition and epoch of the entry.
        created, now : float
            When it was computed, and the present, in seconds since 1970.

        Returns
        -------
        bool
            Whether the entry leaves.
        """
        return (
            self.partition in (None, partition)
            and self.epoch in (None, epoch)
            and (self.older_than is None or is_older(created, self.older_than, now))
        )


@dataclass(frozen=True)
class PurgeResult:
    """What a purge removed, or would remove.

    Attributes
    ----------
    prompts : int
        Number of prompts with exact state.
    rows : int
        Number of runs of rows that blends had computed.
    parts : int
        Number of segments of prompts that had left before, or were never finished.
    encoder_outputs : int
        Number of outputs of encoders and states of fusion modules.
    bytes : int
        Bytes of objects and descriptions. Rows that other prompts need stay, and do not count.
    ids : frozenset[str]
        Ids of the entries.
    media : frozenset[Medium]
        Their media, for what belongs to them in other stores.
    offload_chunks : int
        Number of chunks of vLLM's offloading.
    """

    prompts: int = 0
    rows: int = 0
    parts: int = 0
    encoder_outputs: int = 0
    bytes: int = 0
    ids: frozenset[str] = field(default=frozenset(), repr=False)
    media: frozenset[Medium] = field(default=frozenset(), repr=False)
    offload_chunks: int = 0

    def __add__(self, other: "PurgeResult") -> "PurgeResult":
        return PurgeResult(
            self.prompts + other.prompts,
            self.rows + other.rows,
            self.parts + other.parts,
            self.encoder_outputs + other.encoder_outputs,
            self.bytes + other.bytes,
            self.ids | other.ids,
            self.media | other.media,
            self.offload_chunks + other.offload_chunks,
        )

    def __str__(self) -> str:
        counts = (
            (self.prompts, "prompt"),
            (self.rows, "blended run"),
            (self.parts, "leftover segment"),
            (self.encoder_outputs, "encoder output"),
            (self.offload_chunks, "offload chunk"),
        )
        return ", ".join(
            [
                *(errors.count_noun(number, noun) for number, noun in counts if number),
                f"{self.bytes:,} bytes",
            ]
        )


def select_entries(metas: Sequence[StateInfo], selection: Selection, now: float) -> list[StateInfo]:
    """Select the entries that a purge removes.

    With a prompt leaves everything made from it, and with a named donor also every prompt that
    begins with it.
    """
    fit = {
        meta.id: meta
        for meta in metas
        if selection.covers(meta.partition, meta.epoch, meta.created, now)
    }

    if selection.donors or selection.media:
        named = set(selection.donors)
        roots = [meta for id, meta in fit.items() if id in named]
        # Their first rows are those of the purged prompt.
        roots += [
            meta for root in roots if root.kind == KV for meta in _continuing(fit.values(), root)
        ]
        sources = named | {meta.id for meta in roots}
        roots += [
            meta for meta in fit.values() if _belongs_to_media(meta, sources, selection.media)
        ]
        fit = {meta.id: meta for meta in roots}
        # Also of a donor that has left, or of which only rows are there.
        first = [*named, *fit]
    else:
        first = list(fit)

    every = {meta.id: meta for meta in metas}
    fit |= {id: every[id] for id in derived_rows(metas, *first)}
    return list(fit.values())


def count_purged(metas: Iterable[StateInfo]) -> PurgeResult:
    """Count these entries as removed, but for bytes and parts."""
    metas = list(metas)
    counted = (KV, ROWS, OFFLOAD_CHUNK)
    kinds = Counter(meta.kind if meta.kind in counted else "" for meta in metas)
    media = frozenset((meta.partition, span.digest) for meta in metas for span in meta.spans)
    return PurgeResult(
        kinds[KV],
        kinds[ROWS],
        0,
        kinds[""],
        ids=frozenset(meta.id for meta in metas),
        media=media,
        offload_chunks=kinds[OFFLOAD_CHUNK],
    )


def derived_rows(metas: Iterable[StateInfo], *sources: str) -> list[str]:
    """List the ids of rows that hold text of these prompts or were computed from their state.

    Rows that come from them through other rows count too. Each id stands before those made from it.
    """
    made_from: dict[str, list[str]] = {}
    for meta in metas:
        if meta.kind != KV:
            for source in (*meta.metadata.get(DONORS, ()), meta.metadata.get(PROMPT, "")):
                made_from.setdefault(source, []).append(meta.id)

    derived_ids: dict[str, None] = {}
    # First in, first out: each before those made from it.
    waiting = list(sources)
    while waiting:
        for id in made_from.get(waiting.pop(0), ()):
            # Only once: rows of two donors are reached from both.
            if id not in derived_ids:
                derived_ids[id] = None
                waiting.append(id)

    return list(derived_ids)


def _continuing(metas: Iterable[StateInfo], source: StateInfo) -> list[StateInfo]:
    """List the prompts of its partition and epoch that begin with all of it.

    They hold its text, and their first rows are its rows.
    """
    length = source.num_tokens
    return [
        meta
        for meta in metas
        if meta.kind == KV
        and (meta.partition, meta.epoch) == (source.partition, source.epoch)
        and meta.num_tokens > length
        and common_prefix(
            source.token_ids,
            meta.token_ids,
            source.spans,
            [span for span in meta.spans if span.start < length],
        )
        == length
    ]


def _belongs_to_media(meta: StateInfo, prompts: set[str], media: frozenset[Medium]) -> bool:
    """Return whether it is an encoder output of these media or a fusion state of these prompts."""
    if meta.kind in (KV, ROWS):
        return False
    about = meta.metadata
    return (meta.partition, about.get("content_hash")) in media or about.get("chunk") in prompts
