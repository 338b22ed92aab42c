"""The order of eviction: all or nothing, by the policy, children before their parents."""

from hypothesis import given
from hypothesis import strategies as st

from dejakv.store.eviction import POLICIES, Usage, policy_named
from dejakv.store.order import EvictionOrder, Leaving


def filled(policy: str, sizes: dict[str, int]) -> EvictionOrder:
    order = EvictionOrder(policy_named(policy))
    for id, size in sizes.items():
        order.add(id, size)
    return order


def test_what_cannot_be_freed_changes_nothing() -> None:
    order = filled("lru", {"a": 10, "b": 20, "c": 30})
    assert order.evict(31, 0, {"c"}) is None
    assert order.evict(0, 3, {"c"}) is None
    assert order.evict(61, 0) is None
    assert (len(order), order.bytes) == (3, 60)
    assert order.evict(30, 0, {"c"}) == Leaving(("a", "b"))
    assert (len(order), order.bytes) == (1, 30)
    assert order.evict(0, 0) == Leaving()


def test_no_more_goes_than_must() -> None:
    order = filled("lru", {"a": 10, "b": 20, "c": 30})
    order.touch("a")
    assert order.evict(1, 0) == Leaving(("b",))
    assert order.evict(1, 1, {"c"}) == Leaving(("a",))


def test_the_heap_does_not_grow_with_uses() -> None:
    order = filled("lfu", {str(number): 1 for number in range(50)})
    for number in range(10_000):
        order.touch(str(number % 49))
    assert len(order._heap) <= 2 * 50 + 65
    assert order.evict(1, 0) == Leaving(("49",))


@given(
    policy=st.sampled_from(["lru", "lfu"]),
    uses=st.lists(st.integers(0, 9), max_size=300),
    want=st.integers(0, 60),
    protected=st.sets(st.integers(0, 9).map(str)),
)
def test_against_sorting(policy: str, uses: list[int], want: int, protected: set[str]) -> None:
    order = filled(policy, {str(number): number + 1 for number in range(10)})
    usage = {str(number): Usage(0, number) for number in range(10)}
    for clock, number in enumerate(uses, start=10):
        order.touch(str(number))
        usage[str(number)] = Usage(usage[str(number)].hits + 1, clock)
    free = sorted((id for id in usage if id not in protected), key=lambda id: POLICIES[policy].priority(usage[id]))
    expected: list[str] = []
    while sum(int(id) + 1 for id in expected) < want and free:
        expected.append(free.pop(0))
    possible = sum(int(id) + 1 for id in expected) >= want
    assert order.evict(want, 0, protected) == (Leaving(tuple(expected)) if possible else None)


def family() -> EvictionOrder:
    """A node with the prompts b and c, c with d below it, and e by itself; each of 10 bytes."""
    order = EvictionOrder(policy_named("lru"))
    order.add("a", 10, node=True)
    for id, parent in (("b", "a"), ("c", "a"), ("d", "c"), ("e", "")):
        order.add(id, 10, parent)
    return order


def test_children_leave_before_their_parents_and_nodes_with_the_last_child() -> None:
    order = family()
    assert (len(order), order.bytes) == (4, 50)
    order.touch("d")
    assert order.evict(20, 0) == Leaving(("b", "e"))
    assert order.evict(11, 0) == Leaving(("d", "c", "a"))
    assert (len(order), order.bytes) == (0, 0)


def test_a_prompt_with_children_leaves_as_a_node_where_nothing_else_makes_room_for_an_entry() -> None:
    order = family()
    assert order.evict(0, 1, {"b", "d", "e"}) == Leaving(nodes=("c",))
    assert (len(order), order.bytes) == (3, 50)
    assert order.evict(1, 0, {"b", "d", "e"}) is None, "that frees no bytes"
    assert order.evict(0, 1, {"b", "d"}, kept="e") is None, "what is kept has no children to stay for yet"
    assert order.remove("c") == Leaving(), "it has left"
    assert order.remove("d") == Leaving(("d", "c"))
    assert order.remove("b") == Leaving(("b", "a"))


def test_what_is_kept_stays_even_without_children() -> None:
    order = family()
    assert order.evict(0, 1, kept="a") == Leaving(("b",))
    assert order.evict(30, 0, kept="a") == Leaving(("d", "c", "e"))
    assert order.evict(1, 0, kept="a") is None
    assert "a" in order
    assert order.evict(1, 0) == Leaving(("a",))


def test_a_split_entry_keeps_its_uses_and_its_children() -> None:
    order = family()
    order.split("n", 6, "c", 5, is_node=True)
    assert order.bytes == 51
    assert order.evict(0, 2) == Leaving(("b", "d")), "the split is no use"
    assert order.evict(5, 0) == Leaving(("c", "n", "a"))


def test_another_parent_may_cost_the_old_one() -> None:
    order = EvictionOrder(policy_named("lru"))
    order.add("a", 1, node=True)
    order.add("b", 1, "a")
    assert order.add("b", 2, "") == Leaving(("a",))
    assert (len(order), order.bytes) == (1, 2)


def test_a_lost_entry_takes_all_below_it() -> None:
    order = family()
    assert order.discard("c") == Leaving(("d", "c"))
    assert order.discard("a") == Leaving(("b", "a"))
    assert order.discard("unknown") == Leaving()
    assert len(order) == 1


FAMILIES = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11), st.booleans()), max_size=14)


@given(
    policy=st.sampled_from(["lru", "lfu"]),
    births=FAMILIES,
    uses=st.lists(st.integers(0, 11), max_size=20),
    want=st.tuples(st.integers(0, 40), st.integers(0, 6)),
    protected=st.sets(st.integers(0, 11).map(str), max_size=3),
)
def test_eviction_against_one_victim_at_a_time(
    policy: str, births: list[tuple[int, int, bool]], uses: list[int], want: tuple[int, int], protected: set[str]
) -> None:
    """Whatever tree there is: what `evict` takes is what taking the first childless entry again and again takes."""
    order, parents, nodes, usage = EvictionOrder(policy_named(policy)), {}, set(), {}
    clock = 0
    for id, parent, node in births:
        if str(id) not in parents and (str(parent) in parents or parent == id):
            clock += 1
            parents[str(id)] = "" if parent == id else str(parent)
            usage[str(id)] = Usage(0, clock)
            nodes |= {str(id)} if node else set()
            order.add(str(id), id + 1, parents[str(id)], node=node)
    for number in filter(lambda number: str(number) in parents, uses):
        clock += 1
        order.touch(str(number))
        usage[str(number)] = Usage(usage[str(number)].hits + 1, clock)
    left, gone = dict(parents), []

    def enough() -> bool:
        return sum(int(id) + 1 for id in gone) >= want[0] and sum(id not in nodes for id in gone) >= want[1]

    while not enough():
        free = [id for id in left if id not in left.values() and id not in protected]
        if not free:
            break
        id = min(free, key=lambda id: POLICIES[policy].priority(usage[id]))
        while id and (not gone or id not in gone):
            gone.append(id)
            above = left.pop(id)
            id = above if above in nodes and above not in left.values() and above not in protected else ""
    before = (len(order), order.bytes)
    found = order.evict(*want, protected)
    if enough():
        assert found == Leaving(tuple(gone))
    elif found is not None:
        assert sum(int(id) + 1 for id in found.gone) >= want[0], "only entries can be made room for otherwise"
        assert all(id not in nodes and id in left.values() for id in found.nodes)
    else:
        assert (len(order), order.bytes) == before
        assert order.evict(0, 0) == Leaving()
    assert order.bytes == sum(int(id) + 1 for id in parents if id in order)
