"""The order of eviction, and that evicting is all or nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv.errors import ConfigError
from dejakv.store.eviction import POLICIES, Budget, Usage, policy_named
from dejakv.store.order import EvictionOrder


def filled(policy: str, sizes: dict[str, int]) -> EvictionOrder:
    order = EvictionOrder(policy_named(policy))
    for id, size in sizes.items():
        order.add(id, size)
    return order


def test_priorities_of_the_policies() -> None:
    often, lately = Usage(hits=9, last_used=1), Usage(hits=0, last_used=2)
    assert POLICIES["lru"].priority(often) < POLICIES["lru"].priority(lately)
    assert POLICIES["lfu"].priority(often) > POLICIES["lfu"].priority(lately)


def test_what_cannot_be_freed_changes_nothing() -> None:
    order = filled("lru", {"a": 10, "b": 20, "c": 30})
    assert order.evict(31, 0, {"c"}) is None
    assert order.evict(0, 3, {"c"}) is None
    assert order.evict(61, 0) is None
    assert (len(order), order.bytes) == (3, 60)
    assert order.evict(30, 0, {"c"}) == ["a", "b"]
    assert (len(order), order.bytes) == (1, 30)
    assert order.evict(0, 0) == []


def test_no_more_goes_than_must() -> None:
    order = filled("lru", {"a": 10, "b": 20, "c": 30})
    order.touch("a")
    assert order.evict(1, 0) == ["b"]
    assert order.evict(1, 1, {"c"}) == ["a"]


def test_the_heap_does_not_grow_with_uses() -> None:
    order = filled("lfu", {str(number): 1 for number in range(50)})
    for number in range(10_000):
        order.touch(str(number % 49))
    assert len(order._heap) <= 2 * 50 + 65
    assert order.evict(1, 0) == ["49"]


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
    assert order.evict(want, 0, protected) == (expected if possible else None)


def test_wrong_settings_say_what_is_right() -> None:
    with pytest.raises(ConfigError, match="lru, lfu"):
        policy_named("fifo")
    with pytest.raises(ConfigError, match="max_bytes=-1 is negative"):
        Budget(max_bytes=-1)
    with pytest.raises(ConfigError, match="max_entries"):
        Budget(max_entries=-5)
