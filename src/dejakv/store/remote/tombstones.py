"""Tells all machines of a bucket what was purged, so that what was being stored in that moment leaves too.

<prefix>/tombstones/N    what purge N took; created before anything is removed

An object says how many purges its writer knew when its put began (`Segment.purges`). Who finds one that a later purge takes removes it.
No clock is compared with another machine's.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from dejakv.store.base import ChunkMeta, CorruptChunk
from dejakv.store.keys import PrefixKeys, prefix_id, prefix_of
from dejakv.store.objects import ObjectMissing
from dejakv.store.records import decode_meta
from dejakv.store.segment import Segment
from dejakv.store.selection import Selection, chosen

KEPT_SECONDS = 3600.0
"""An upload ends within two minutes: by its client's limit, tried three times."""


class NumberedObjects(Protocol):
    """Small objects with numbers, beside the segments of a bucket. Methods raise `Unknown`."""

    def numbers(self) -> Iterable[int]: ...

    def note(self, number: int) -> bytes:
        """Content of an object. Raises: Missing"""
        ...

    def write_note(self, number: int, body: bytes) -> bool:
        """Create an object; False if the number is taken."""
        ...

    def drop_notes(self, numbers: Iterable[int]) -> None: ...


@dataclass(frozen=True)
class Tombstone:
    """One purge. `ends`: ids of the purged prompts as prefixes (`prefix_id`), to know prompts that begin with them."""

    number: int
    selection: Selection
    ends: frozenset[str] = frozenset()

    @property
    def body(self) -> bytes:
        selection = self.selection
        media = sorted(map(list, selection.media))
        fields: dict[str, Any] = {
            "partition": selection.partition,
            "epoch": selection.epoch,
            "donors": selection.donors,
            "media": media,
        }
        return json.dumps({**fields, "ends": sorted(self.ends)}).encode()

    @classmethod
    def read(cls, number: int, body: bytes) -> "Tombstone":
        """Raises: ValueError, KeyError or TypeError for another object."""
        fields = json.loads(body)
        media = frozenset((str(partition), str(digest)) for partition, digest in fields["media"])
        selection = Selection(fields["partition"], fields["epoch"], tuple(fields["donors"]), media=media)
        return cls(number, selection, frozenset(fields["ends"]))

    def takes(self, segments: Iterable[Segment]) -> Iterator[str]:
        """Yield names of segments whose writing began before this purge, and that it takes."""
        named = self.selection.donors or self.selection.media
        # Its writer did not know of this purge: it may have begun before it.
        late = [segment for segment in segments if segment.purges < self.number and self._in_scope(segment)]
        ids, keys = set(self.selection.donors), {prefix[1] for end in self.ends if (prefix := prefix_of(end))}
        ids |= {segment.record for segment in late if segment.about and self._takes_record(segment)}

        for segment in late:
            if (
                not named
                or segment.record in ids
                or not ids.isdisjoint(segment.lineage)
                or not keys.isdisjoint(segment.keys)
            ):
                yield segment.name

    def _in_scope(self, segment: Segment) -> bool:
        # No age is compared: a purge by age writes no tombstone (`Store.purge`).
        return self.selection.takes(segment.partition, segment.epoch, segment.created, segment.created)

    def _takes_record(self, segment: Segment) -> bool:
        try:
            meta = decode_meta(segment.about)
        except CorruptChunk:
            return False
        return bool(chosen([meta], self.selection, segment.created)) or not self.ends.isdisjoint(
            _prefixes(meta, self.ends)
        )


class TombstoneSet:
    """The tombstones known to this machine.

    number  of the last one carried out here; 0: none
    clock   monotonic seconds
    """

    def __init__(self, notes: NumberedObjects, clock: Callable[[], float] = time.monotonic) -> None:
        self.number = 0
        self._looked = False
        self._notes, self._clock = notes, clock
        self._known: dict[int, tuple[Tombstone, float]] = {}

    def look(self) -> list[Tombstone]:
        """Return the tombstones new since the last call, none at the first. Deletes those known for an hour, but for the last, which has
        the count. Raises: Unknown"""
        numbers, new, now = sorted(self._notes.numbers()), list[Tombstone](), self._clock()
        for number in numbers:
            if number not in self._known:
                with suppress(ObjectMissing, ValueError, KeyError, TypeError):
                    self._known[number] = (Tombstone.read(number, self._notes.note(number)), now)
                    new.append(self._known[number][0])

        old = [n for n in numbers[:-1] if n in self._known and self._known[n][1] + KEPT_SECONDS < now]
        self._notes.drop_notes(old)
        self._known = {n: entry for n, entry in self._known.items() if n in numbers and n not in old}
        # The first call: the index is built after it, without what these purges took.
        first, self._looked, self.number = not self._looked, True, max([self.number, *numbers])
        return [] if first else new

    def write(self, selection: Selection, purged: Iterable[ChunkMeta] = ()) -> Tombstone:
        """Write and return the next one. `purged`: prompts named by the selection. Raises: Unknown"""
        ends = {prefix_id(meta.num_tokens, _key(meta, meta.num_tokens)) for meta in purged if meta.num_tokens}
        number = max([self.number, *self._notes.numbers()])
        # Another machine may take the same number at the same time; one of them gets it.
        while True:
            number += 1
            tombstone = Tombstone(number, selection, frozenset(ends))
            if self._notes.write_note(number, tombstone.body):
                self._known[number], self.number = (tombstone, self._clock()), number
                return tombstone

    def since(self, number: int) -> list[Tombstone]:
        """Known ones after `number`."""
        return [tombstone for n, (tombstone, _) in sorted(self._known.items()) if n > number]

    def buried(self, candidates: Iterable[Segment]) -> set[str]:
        """Names of those objects that a purge takes."""
        segments = list(candidates)
        return {name for tombstone in self.since(0) for name in tombstone.takes(segments)}


def _key(meta: ChunkMeta, tokens: int) -> bytes:
    return PrefixKeys(meta.partition, meta.epoch, meta.token_ids, meta.spans).at(tokens)


def _prefixes(meta: ChunkMeta, ends: Iterable[str]) -> set[str]:
    """Ids of the prefixes of a prompt that are as long as these."""
    lengths = {prefix[0] for end in ends if (prefix := prefix_of(end)) and prefix[0] <= meta.num_tokens}
    return {prefix_id(length, _key(meta, length)) for length in lengths}
