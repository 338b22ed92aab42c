"""Values in the memory of this process within a budget, and the order in which they are evicted."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from dejakv.store.budgets import NoRoom, PolicyName

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True, eq=False)
class _MemoryItem(Generic[Value]):
    value: Value
    nbytes: int
    uses: int
    rank: int = 0


class MemoryTier(Generic[Key, Value]):
    """Values by key with their sizes in bytes, within a budget. Not thread-safe.

    Every change is all or nothing. The value of the lowest rank is evicted first, and among equal
    ranks the least recently used. Under `lru` all ranks are equal; under `lfu` the rank is `age +
    uses`, where `age` is the rank of the last value evicted (LFU with dynamic ageing; Arlitt et
    al., "Evaluating content management techniques for Web proxy caches", 2000).

    Parameters
    ----------
    max_bytes : int
        Budget in bytes.
    max_entries : int
        Budget in entries; 0: no limit.
    policy : str
        `lru` or `lfu`.

    Examples
    --------
    >>> tier = MemoryTier[str, bytes](max_bytes=8)
    >>> for name in ("one", "two"):
    ...     _ = tier.put(name, b"1234", 4)
    >>> tier.use("one"), tier.put("three", b"1234", 4)
    (b'1234', ('bytes', ['two']))
    """

    def __init__(self, max_bytes: int, max_entries: int = 0, policy: PolicyName = "lru") -> None:
        self.nbytes = 0
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._policy = policy
        self._age = 0
        self._items: dict[Key, _MemoryItem[Value]] = {}
        self._ranks: dict[int, OrderedDict[Key, None]] = {}
        """Keys by rank, the least recently used first.

        An `OrderedDict`, since a plain dictionary looks for its first key behind all removed ones.
        """

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[tuple[Key, Value]]:
        return ((key, item.value) for key, item in self._items.items())

    def get(self, key: Key) -> Value | None:
        """Return a value without counting a use; None for an unknown key."""
        item = self._items.get(key)
        return None if item is None else item.value

    def use(self, key: Key) -> Value | None:
        """Return a value and count the use; None for an unknown key."""
        item = self._items.get(key)
        if item is None:
            return None
        item.uses += 1
        if self._policy == "lru":
            self._ranks[item.rank].move_to_end(key)
        else:
            self._leave_rank(key, item)
            self._rank(key, item)

        return item.value

    def put(self, key: Key, value: Value, nbytes: int, keep: int = 0) -> tuple[str, list[Key]]:
        """Store a value, evicting others to make room.

        A value of the same key is replaced, and its uses are taken over.

        Parameters
        ----------
        key, value : Key, Value
            The value and its name.
        nbytes : int
            Size of the value.
        keep : int
            The fewest values that evictions may leave.

        Returns
        -------
        tuple[str, list[Key]]
            `entries` if their number would have been exceeded, else `bytes`; and the evicted keys.

        Raises
        ------
        NoRoom
            With the reason, `oversized` or `minimum` (of `keep`). Nothing has changed then.
        """
        if nbytes > self._max_bytes:
            raise NoRoom("oversized")

        old = self._items.get(key)
        count = len(self._items) + (old is None) - self._max_entries if self._max_entries else 0
        limit = "entries" if count > 0 else "bytes"
        excess = self.nbytes - (old.nbytes if old else 0) + nbytes - self._max_bytes
        evicted_keys: list[Key] = []

        # First the whole choice, then the changes: a refusal must leave everything as it was.
        for candidate in self._order():
            if count <= 0 and excess <= 0:
                break
            # The key's own value leaves anyway, and its bytes are subtracted already.
            if candidate == key:
                continue
            if len(self._items) - len(evicted_keys) <= keep:
                raise NoRoom("minimum")
            evicted_keys.append(candidate)
            count -= 1
            excess -= self._items[candidate].nbytes

        for candidate in evicted_keys:
            # New values begin at this age, so that old favourites do not stay for ever.
            self._age = max(self._age, self._items[candidate].rank)
            self.drop(candidate)

        self.drop(key)
        item = _MemoryItem(value, nbytes, old.uses if old else 1)
        self._items[key] = item
        self.nbytes += nbytes
        self._rank(key, item)
        return limit, evicted_keys

    def drop(self, key: Key) -> bool:
        """Remove a value; return False for an unknown key."""
        item = self._items.pop(key, None)
        if item is None:
            return False
        self.nbytes -= item.nbytes
        self._leave_rank(key, item)
        return True

    def _order(self) -> Iterator[Key]:
        for rank in sorted(self._ranks):
            yield from self._ranks[rank]

    def _rank(self, key: Key, item: _MemoryItem[Value]) -> None:
        item.rank = self._age + item.uses if self._policy == "lfu" else 0
        self._ranks.setdefault(item.rank, OrderedDict())[key] = None

    def _leave_rank(self, key: Key, item: _MemoryItem[Value]) -> None:
        keys = self._ranks[item.rank]
        del keys[key]
        # Empty ranks would pile up under `lfu`, and `_order` sorts all of them.
        if not keys:
            del self._ranks[item.rank]
