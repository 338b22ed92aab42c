"""What a lookup of a long prompt asks the catalog and hashes: counted, since times say little on a busy machine."""

from collections.abc import Sequence

import pytest

from dejakv.store import Store, open_store, prefix_keys
from dejakv.store.catalog import Catalog
from dejakv.testing.stored_states import check_whole, make_prompt_state

TOKENS = 64_000


@pytest.fixture(scope="module")
def store() -> Store:
    store = open_store(None)
    assert store.put(make_prompt_state(range(TOKENS)))
    return store


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values each query of a catalog had."""
    counts: list[int] = []
    read = Catalog.read

    def counting(self: Catalog, query: str, values: Sequence[object] = ()) -> list[tuple[object, ...]]:
        counts.append(len(values))
        return read(self, query, values)

    monkeypatch.setattr(Catalog, "read", counting)
    return counts


@pytest.mark.parametrize("begin", [TOKENS, 40_000, 700, 40])
def test_a_lookup_asks_for_a_few_names_of_each_segment(store: Store, asked: list[int], begin: int) -> None:
    hit = store.find("p", "e", [*range(begin), *range(10**6, 10**6 + TOKENS)])
    assert hit is not None
    assert hit[0].tokens == begin
    assert sum(asked) < 2 * TOKENS / 256 + 150  # 4,000 blocks have names
    assert len(asked) < 20


def test_a_prompt_of_which_nothing_is_stored_is_hashed_at_its_beginning_alone(
    store: Store, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    blake2b = prefix_keys.blake2b

    def counting(data: bytes, digest_size: int) -> object:
        hashed.append(len(data))
        return blake2b(data, digest_size=digest_size)

    monkeypatch.setattr(prefix_keys, "blake2b", counting)
    assert store.find("p", "e", range(5, TOKENS + 5)) is None
    assert len(hashed) < 600  # of 4,000
    assert sum(asked) < 100


def test_prompts_that_part_often_are_still_whole(asked: list[int]) -> None:
    """A chat of 60 turns, whose segments begin and end anywhere."""
    with_turns, store = list[int](), open_store(None)
    for turn in range(60):
        with_turns += range(1000 * turn, 1000 * turn + 37 + 11 * (turn % 7))
        assert store.put(make_prompt_state(with_turns))
    asked.clear()
    hit = store.find("p", "e", [*with_turns, 7])
    assert hit is not None
    assert hit[0].tokens == len(with_turns)
    assert len(asked) < 2 * 60 + 20
    check_whole(store, [make_prompt_state(with_turns)])


@pytest.mark.parametrize("lost", [1, 2, 120, 249])
def test_behind_lost_rows_nothing_is_of_use(lost: int) -> None:
    store = open_store(None)
    assert store.put(make_prompt_state(range(TOKENS)))
    key = prefix_keys.PrefixKeys("p", "e", range(TOKENS)).prefix_key(256 * lost)
    assert store.delete(prefix_keys.prefix_id(256 * lost, key))
    store.flush()
    hit = store.find("p", "e", range(TOKENS + 1))
    assert (hit[0].tokens if hit else 0) == 256 * (lost - 1)
