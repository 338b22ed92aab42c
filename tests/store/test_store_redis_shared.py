"""Two clients of one Redis: what one removes, the other is not told of, and learns by a miss."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.find.finders import WORDS, chunk_of, copied, id_of, prompt

from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.find.ask import Ask
from dejakv.find.space import space_of
from dejakv.guards.threshold import ThresholdGuard
from dejakv.levels.exact import ExactTextCache
from dejakv.store.deltas import DeltaStore
from dejakv.store.redis import RedisStore

STORED = copied((1, 2, 3), WORDS[:200], text="what is it?")
LONGER = prompt((1, 2, 3, *WORDS[:200], *range(40)), "what begins like it?")
OTHER = prompt(tuple(range(500, 700)), "WHAT is it?")
BLEND = copied((7, 8), WORDS[:200], text="what else?")


@pytest.fixture
def clients(redis_server: Any, tmp_path: Path) -> Iterator[tuple[HierarchicalCache, DeltaStore]]:
    """A cache in this process, and the store as another process has it open."""
    mine, theirs = (
        DeltaStore(RedisStore(redis_server.url, namespace=str(tmp_path), timeout=5.0)) for _ in ("mine", "theirs")
    )
    guards = [ThresholdGuard({}, default=-1.0)]
    cache = HierarchicalCache(mine, [ExactTextCache()], guards, config=SemanticCacheConfig(reuse="blend"))
    chunk = chunk_of(STORED, space=space_of(STORED, "exact"))
    assert mine.put(chunk)
    cache.stored(chunk.meta)
    yield cache, theirs
    theirs.clear()
    theirs.close()
    cache.close()


def indexed(cache: HierarchicalCache) -> tuple[int, int, int]:
    """Prompts that the level, the prefixes and copied text can find."""
    finder = cache.finder
    assert finder.copied.index is not None
    return len(finder.levels[0]), len(finder._prefix), len(finder.copied.index)


@pytest.mark.parametrize(
    ("asked", "ask", "found"),
    [
        (LONGER, Ask("exact"), "prefix"),
        (OTHER, Ask("adopt"), "adopt"),
        (BLEND, Ask("blend"), "blend"),
    ],
)
def test_what_another_client_removed_is_a_miss_and_leaves_the_indexes(
    clients: tuple[HierarchicalCache, DeltaStore], asked: Any, ask: Ask, found: str
) -> None:
    cache, theirs = clients
    assert cache.find(asked, ask).plan.method == found
    assert theirs.delete(id_of(STORED))
    assert cache.find(asked, ask).plan.method == "none"
    assert cache.stats(None).lookups == 2
    assert indexed(cache) == (0, 0, 0)


def test_a_prompt_of_which_another_client_left_the_rows_that_others_need_is_gone(
    clients: tuple[HierarchicalCache, DeltaStore],
) -> None:
    cache, theirs = clients
    assert theirs.put(chunk_of(LONGER))
    assert theirs.delete(id_of(STORED))
    assert cache.find(OTHER, Ask("adopt")).plan.method == "none"
    assert indexed(cache) == (0, 0, 0)


def test_a_server_that_does_not_answer_has_lost_nothing(
    redis_server: Any, clients: tuple[HierarchicalCache, DeltaStore]
) -> None:
    cache, _ = clients
    redis_server.stop()
    assert cache.find(OTHER, Ask("adopt")).plan.method == "none"
    assert cache.store.get(id_of(STORED)) is None
    assert indexed(cache) == (1, 1, 1)
    redis_server.start()
