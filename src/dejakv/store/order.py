"""The order in which entries of a store in memory are evicted: by the policy, children before their parents.

An entry that is the parent of others holds rows that they need. It is no victim; a prompt that leaves nevertheless becomes a
node, and a node goes with its last child.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from dejakv.store.eviction import Policy, Usage

Item = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class Leaving:
    """What a removal takes. `gone`: entries in the order of their removal; `nodes`: prompts that became nodes."""

    gone: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Entry:
    nbytes: int
    usage: Usage
    parent: str
    node: bool


class EvictionOrder:
    """Entries of a store in memory. `touch` costs O(log n), amortised; the length is the number of prompts, without nodes.

    A heap of entries without children: a use pushes a new item, and the old one is skipped later; it is rebuilt when more
    than half is old.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._clock = 0
        self._entries: dict[str, _Entry] = {}
        self._children: dict[str, set[str]] = {}
        self._heap: list[Item] = []
        self._nodes = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries) - self._nodes

    def __contains__(self, id: object) -> bool:
        return id in self._entries

    def size(self, id: str) -> int:
        """Size of the entry in bytes; 0 if it is unknown."""
        return self._entries[id].nbytes if id in self._entries else 0

    def is_prompt(self, id: str) -> bool:
        """Whether it is known, and no node."""
        return id in self._entries and not self._entries[id].node

    def add(self, id: str, nbytes: int, parent: str = "", *, node: bool = False) -> Leaving:
        """A new entry, or a known one with new content: its past uses are forgotten, its children stay.

        Returns the nodes that had no other child than this one.
        """
        old = self._take(id)
        self._insert(id, _Entry(nbytes, Usage(), parent, node))
        self.touch(id, hits=0)
        return Leaving(tuple(self._childless(old.parent)) if old is not None and old.parent != parent else ())

    def split(self, node: str, nbytes: int, rest: str, rest_nbytes: int, *, is_node: bool) -> None:
        """Puts `node` between the known entry `rest` and its parent. Uses of `rest` are kept."""
        old = self._entries[rest]
        self.add(node, nbytes, old.parent, node=is_node)
        self._take(rest)
        self._insert(rest, replace(old, nbytes=rest_nbytes, parent=node))

    def to_split(self, id: str) -> set[str]:
        """What must not be evicted while an entry is split: itself, and of a node one child, without which it would be none."""
        return {id} if self.is_prompt(id) else {id, *list(self.children(id))[:1]}

    def resize(self, id: str, nbytes: int) -> None:
        """Notes the size of an entry that became a node."""
        entry = self._entries[id]
        self.bytes += nbytes - entry.nbytes
        self._entries[id] = replace(entry, nbytes=nbytes)

    def touch(self, id: str, *, hits: int = 1) -> None:
        """Notes a use of a known entry."""
        entry = self._entries[id]
        self._clock += 1
        self._entries[id] = replace(entry, usage=Usage(entry.usage.hits + hits, self._clock))
        self._offer(id)

    def remove(self, id: str) -> Leaving:
        """A prompt leaves. With children it becomes a node; without, nodes above it may go too."""
        entry = self._entries.get(id)
        if entry is None or (entry.node and id in self._children):
            return Leaving()
        if id in self._children:
            self._entries[id] = replace(entry, node=True)
            self._nodes += 1
            return Leaving(nodes=(id,))
        self._take(id)
        return Leaving((id, *self._childless(entry.parent)))

    def discard(self, id: str) -> Leaving:
        """An entry leaves, known or not, with all that is below it, and nodes above that have no other child."""
        below = list(self._below(id))
        parent = self._entries[id].parent if id in self._entries else ""
        gone = [one for one in reversed(below) if self._take(one) is not None]
        return Leaving((*gone, *self._childless(parent)))

    def evict(self, nbytes: int, entries: int, protected: Collection[str] = (), kept: str = "") -> Leaving | None:
        """Removes entries until at least `nbytes` bytes and `entries` prompts are free.

        protected  entries that stay as they are
        kept       an entry of which the rows must stay; as a prompt it may leave

        Prompts that have children become nodes where nothing else can make room for an entry: a long conversation would not
        fit otherwise. Returns None, without any change, if what is not protected does not suffice.
        """
        choice = _Choice(self, {*protected, kept})
        for item in self._popped(choice):
            if choice.freed >= nbytes and choice.prompts >= entries:
                self._push(item)
                break
            choice.take(item)
        self._push(*choice.aside)
        missing = max(0, entries - choice.prompts)
        nodes = tuple(self._inner_prompts(choice, protected)[:missing]) if missing and choice.freed >= nbytes else ()
        if choice.freed < nbytes or choice.prompts + len(nodes) < entries:
            self._push(*choice.items)
            return None
        gone = list(choice.gone)
        for id in gone:
            self._take(id)
        for id in nodes:
            self.remove(id)
        return Leaving(tuple(gone), nodes)

    def entry(self, id: str) -> _Entry | None:
        return self._entries.get(id)

    def children(self, id: str) -> Collection[str]:
        return self._children.get(id, ())

    def item(self, id: str) -> Item:
        return self._policy.priority(self._entries[id].usage), id

    def _popped(self, choice: "_Choice") -> Iterator[Item]:
        """Entries without children, the first victim first."""
        while self._heap or choice.freshly:
            for id in choice.freshly:
                self._push(self.item(id))
            choice.freshly.clear()
            item = heapq.heappop(self._heap)
            id = item[1]
            if id in self._entries and id not in choice.gone and item == self.item(id) and choice.is_leaf(id):
                yield item

    def _inner_prompts(self, choice: "_Choice", protected: Collection[str]) -> list[str]:
        left = (id for id, entry in self._entries.items() if not entry.node and id not in choice.gone)
        inner = [id for id in left if id not in protected and not choice.is_leaf(id)]
        return sorted(inner, key=self.item)

    def _childless(self, id: str) -> Iterator[str]:
        """Removes a node without children, and those above it."""
        while (entry := self._entries.get(id)) is not None and id not in self._children:
            if not entry.node:
                return
            self._take(id)
            yield id
            id = entry.parent

    def _below(self, id: str) -> Iterator[str]:
        """An entry and all below it, parents first."""
        waiting = [id]
        while waiting:
            one = waiting.pop()
            yield one
            waiting += self._children.get(one, ())

    def _insert(self, id: str, entry: _Entry) -> None:
        self._entries[id] = entry
        self.bytes += entry.nbytes
        self._nodes += entry.node
        if entry.parent:
            self._children.setdefault(entry.parent, set()).add(id)

    def _take(self, id: str) -> _Entry | None:
        entry = self._entries.pop(id, None)
        if entry is None:
            return None
        self.bytes -= entry.nbytes
        self._nodes -= entry.node
        siblings = self._children.get(entry.parent)
        if siblings is not None:
            siblings.discard(id)
            if not siblings:
                del self._children[entry.parent]
                if entry.parent in self._entries:
                    self._offer(entry.parent)
        return entry

    def _offer(self, id: str) -> None:
        """Makes an entry a candidate, if it has no children."""
        if id not in self._children:
            self._push(self.item(id))

    def _push(self, *items: Item) -> None:
        for item in items:
            heapq.heappush(self._heap, item)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [self.item(id) for id in self._entries if id not in self._children]
            heapq.heapify(self._heap)


class _Choice:
    """Victims that are being chosen; nothing is removed yet."""

    def __init__(self, order: EvictionOrder, stay: Collection[str]) -> None:
        self._order = order
        self._stay = stay
        self._lost: dict[str, int] = {}
        self.gone: dict[str, None] = {}
        self.items: list[Item] = []
        self.aside: list[Item] = []
        self.freshly: list[str] = []
        self.freed = self.prompts = 0

    def is_leaf(self, id: str) -> bool:
        return len(self._order.children(id)) == self._lost.get(id, 0)

    def take(self, item: Item) -> None:
        if item[1] in self._stay:
            self.aside.append(item)
            return
        self.items.append(item)
        for id in self._with_nodes(item[1]):
            entry = self._order.entry(id)
            assert entry is not None
            self.gone[id] = None
            self.freed += entry.nbytes
            self.prompts += not entry.node
            self._lost[entry.parent] = self._lost.get(entry.parent, 0) + 1

    def _with_nodes(self, id: str) -> Iterable[str]:
        """A victim, then each node that is left without children; a prompt that is becomes a candidate."""
        yield id
        while (entry := self._order.entry(id)) is not None:
            id = entry.parent
            above = self._order.entry(id)
            if above is None or not self.is_leaf(id):
                return
            if not above.node or id in self._stay:
                self.freshly.append(id)
                return
            yield id
