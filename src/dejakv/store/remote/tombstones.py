"""Tombstones: messages in a bucket that tell all machines what was purged.

    <prefix>/tombstones/N    what purge N took; created before anything is removed

So what was being stored in that moment leaves too. An object says how many purges its writer knew
when its put began (`Segment.purges`). A machine that meets an object that a later purge takes
removes it. No clock is compared with another machine's.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from dejakv.store.base import CorruptState, StateInfo, decode_meta
from dejakv.store.objects import ObjectMissing
from dejakv.store.prefix_keys import PrefixKeys, parse_prefix_id, prefix_id
from dejakv.store.segment import Segment
from dejakv.store.selection import Selection, select_entries

RETENTION_SECONDS = 3600.0
"""Seconds for which a tombstone stays.

An upload ends within two minutes: by its client's limit, tried three times.
"""


class NumberedObjects(Protocol):
    """Small objects with numbers, beside the segments of a bucket.

    All methods raise `StoreUnavailable`.
    """

    def numbers(self) -> Iterable[int]:
        """Return the numbers of all objects."""
        ...

    def note(self, number: int) -> bytes:
        """Return the content of an object.

        Raises
        ------
        ObjectMissing
            If there is none.
        """
        ...

    def write_note(self, number: int, body: bytes) -> bool:
        """Create an object; False if the number is taken."""
        ...

    def drop_notes(self, numbers: Iterable[int]) -> None:
        """Remove objects; missing ones are ignored."""
        ...


@dataclass(frozen=True)
class Tombstone:
    """One purge.

    Attributes
    ----------
    number : int
        Number of the purge.
    selection : Selection
        What it takes.
    ends : frozenset[str]
        Ids of the purged prompts as prefixes (`prefix_id`), to know prompts that begin with them.
    """

    number: int
    selection: Selection
    ends: frozenset[str] = frozenset()

    @property
    def body(self) -> bytes:
        """Content of its object."""
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
        """Read a tombstone from the content of its object.

        Raises
        ------
        ValueError, KeyError, TypeError
            For another object.
        """
        fields = json.loads(body)
        media = frozenset((str(partition), str(digest)) for partition, digest in fields["media"])
        selection = Selection(
            fields["partition"], fields["epoch"], tuple(fields["donors"]), media=media
        )
        return cls(number, selection, frozenset(fields["ends"]))

    def covered_names(self, segments: Iterable[Segment]) -> Iterator[str]:
        """Yield the names of segments that this purge takes and whose writer did not know it."""
        named = self.selection.donors or self.selection.media
        # Its writer did not know of this purge: it may have begun before it.
        late = [
            segment
            for segment in segments
            if segment.purges < self.number and self._in_scope(segment)
        ]

        ids, keys = (
            set(self.selection.donors),
            {prefix[1] for end in self.ends if (prefix := parse_prefix_id(end))},
        )
        ids |= {
            segment.entry_id for segment in late if segment.about and self._covers_entry(segment)
        }

        for segment in late:
            if (
                not named
                or segment.entry_id in ids
                or not ids.isdisjoint(segment.lineage)
                or not keys.isdisjoint(segment.keys)
            ):
                yield segment.name

    def _in_scope(self, segment: Segment) -> bool:
        # No age is compared: a purge by age writes no tombstone (`Store.purge`).
        return self.selection.covers(
            segment.partition, segment.epoch, segment.created, segment.created
        )

    def _covers_entry(self, segment: Segment) -> bool:
        try:
            meta = decode_meta(segment.about)
        except CorruptState:
            return False
        return bool(
            select_entries([meta], self.selection, segment.created)
        ) or not self.ends.isdisjoint(_prefixes(meta, self.ends))


class TombstoneSet:
    """The tombstones known to this machine.

    Parameters
    ----------
    notes : NumberedObjects
        Where they are.
    clock : Callable[[], float]
        Seconds that only grow.

    Attributes
    ----------
    number : int
        Highest number of a purge that is known here; 0: none.
    """

    def __init__(self, notes: NumberedObjects, clock: Callable[[], float] = time.monotonic) -> None:
        self.number = 0
        self._looked = False
        self._notes, self._clock = notes, clock
        self._tombstones: dict[int, tuple[Tombstone, float]] = {}

    def read_new(self) -> list[Tombstone]:
        """Return the tombstones that are new since the last call; none at the first call.

        Those known for an hour are deleted, except the last, which has the count.

        Raises
        ------
        StoreUnavailable
            If they cannot be listed or read.
        """
        numbers, new, now = sorted(self._notes.numbers()), list[Tombstone](), self._clock()
        for number in numbers:
            if number not in self._tombstones:
                with suppress(ObjectMissing, ValueError, KeyError, TypeError):
                    self._tombstones[number] = (
                        Tombstone.read(number, self._notes.note(number)),
                        now,
                    )
                    new.append(self._tombstones[number][0])

        old = [
            n
            for n in numbers[:-1]
            if n in self._tombstones and self._tombstones[n][1] + RETENTION_SECONDS < now
        ]

        self._notes.drop_notes(old)
        self._tombstones = {
            n: entry for n, entry in self._tombstones.items() if n in numbers and n not in old
        }

        # The first call: the index is built after it, without what these purges took.
        first, self._looked, self.number = not self._looked, True, max([self.number, *numbers])
        return [] if first else new

    def write(self, selection: Selection, purged: Iterable[StateInfo] = ()) -> Tombstone:
        """Write the next tombstone, and return it.

        Parameters
        ----------
        selection : Selection
            What the purge takes.
        purged : Iterable[StateInfo]
            Prompts that the selection names.

        Raises
        ------
        StoreUnavailable
            If it cannot be written.
        """
        ends = {
            prefix_id(meta.num_tokens, _key(meta, meta.num_tokens))
            for meta in purged
            if meta.num_tokens
        }

        number = max([self.number, *self._notes.numbers()])
        # Another machine may take the same number at the same time; one of them gets it.
        while True:
            number += 1
            tombstone = Tombstone(number, selection, frozenset(ends))
            if self._notes.write_note(number, tombstone.body):
                self._tombstones[number], self.number = (tombstone, self._clock()), number
                return tombstone

    def since(self, number: int) -> list[Tombstone]:
        """Return the known tombstones after `number`."""
        return [tombstone for n, (tombstone, _) in sorted(self._tombstones.items()) if n > number]

    def covered_names(self, candidates: Iterable[Segment]) -> set[str]:
        """Return the names of those segments that a purge takes."""
        segments = list(candidates)
        return {name for tombstone in self.since(0) for name in tombstone.covered_names(segments)}


def _key(meta: StateInfo, tokens: int) -> bytes:
    return PrefixKeys(meta.partition, meta.epoch, meta.token_ids, meta.spans).prefix_key(tokens)


def _prefixes(meta: StateInfo, ends: Iterable[str]) -> set[str]:
    """Return the ids of the prefixes of a prompt that are as long as these."""
    lengths = {
        prefix[0]
        for end in ends
        if (prefix := parse_prefix_id(end)) and prefix[0] <= meta.num_tokens
    }
    return {prefix_id(length, _key(meta, length)) for length in lengths}
