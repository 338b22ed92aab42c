"""Lookups without an engine: nothing exact waits for an encoder, and what is confirmed is found if it is there."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dejakv.cache import HierarchicalCache
from dejakv.engines.vllm.counts import Counts
from dejakv.engines.vllm.lookups import Lookups
from dejakv.engines.vllm.scheduler import SchedulerSide
from dejakv.engines.vllm.settings import ConnectorSettings, Wish
from dejakv.engines.vllm.tracked import Tracked
from dejakv.guards.threshold import ThresholdGuard
from dejakv.levels.base import Match, Query, Search
from dejakv.store.base import Chunk, ChunkMeta, Tensor
from dejakv.store.memory import MemoryStore

STORED = tuple(range(100, 300))
LONGER = (*STORED[:160], *range(400, 480))
OTHER = tuple(range(600, 800))
ADAPTERS: Any = SimpleNamespace(base="e", epoch_of=lambda lora: "e")
BLEND = ConnectorSettings(mode="blend", lookup_timeout_s=30.0)


class SlowText:
    """A level whose encoder works until it is let go; then it knows one prompt that is like any other."""

    name = "semantic_text"
    status_names = ("semantic_text",)

    def __init__(self) -> None:
        self.go = threading.Event()
        self.donor = ""

    def search(self, query: Query) -> Search:
        assert self.go.wait()
        return Search((Match(self.donor, self.name, 0.99),) if self.donor else (), {self.name: "hit"})

    def vector(self, text: str, partition: str | None = None) -> Any:
        if not text:
            return None
        assert self.go.wait()
        return np.ones(3, np.float32)

    def add(self, donor: str, query: Query) -> None:
        """Knows its donor."""

    def remove(self, donor: str) -> None:
        """Knows its donor."""

    def __len__(self) -> int:
        return 1


def request(token_ids: tuple[int, ...]) -> Any:
    return SimpleNamespace(
        request_id="r", prompt_token_ids=list(token_ids), cache_salt=None, mm_features=[], lora_request=None
    )


@pytest.fixture
def level() -> SlowText:
    return SlowText()


@pytest.fixture
def lookups(level: SlowText) -> Any:
    guards = (ThresholdGuard({level.name: 0.8}),)
    cache = HierarchicalCache(MemoryStore(), [level], guards, BLEND.cache_config())
    made = Lookups(cache, BLEND, ADAPTERS, lambda ids: f"a text of {len(ids)}")
    yield made
    level.go.set()
    made.close()


def store(lookups: Lookups, token_ids: tuple[int, ...]) -> ChunkMeta:
    """Stores a prompt as a worker does, and has it confirmed."""
    meta = lookups.submit(request(token_ids), Wish("exact")).answer.result().save
    assert meta is not None
    lookups.cache.store.put(Chunk(meta, Tensor(np.zeros((2, 1, 1, len(token_ids), 1), np.float32), "F32")))
    lookups.index.stored(meta)
    return meta


def test_an_equal_prompt_is_answered_while_the_encoder_works(lookups: Lookups) -> None:
    store(lookups, STORED)
    for mode in ("exact", "blend"):
        found = lookups.submit(request(STORED), Wish(mode)).answer.result()
        assert (found.method, found.level, found.tokens) == ("exact", "exact_text", 199)


def test_copied_text_is_found_while_the_encoder_works(lookups: Lookups) -> None:
    meta = store(lookups, STORED)
    moved = (7, 8, 9, *STORED[50:], *range(900, 920))
    found = lookups.submit(request(moved), Wish("blend")).answer.result()
    assert (found.method, found.level, found.donors) == ("blend", "copied", (meta.id,))


def test_a_lookup_that_takes_too_long_has_its_exact_prefix_and_its_save(lookups: Lookups, level: SlowText) -> None:
    """The encoder's answer comes too late: the prefix is used, the prompt is stored, and with its text once that is known."""
    store(lookups, STORED)
    shared = (*STORED[:32], *OTHER)
    lookup = lookups.submit(request(shared), Wish("blend"))
    while lookup.early is None:
        assert not lookup.answer.done()
    found = lookup.by_now("it took too long")
    assert (found.method, found.level, found.tokens, found.reason) == ("exact", "prefix", 32, "it took too long")
    assert found.save is not None
    assert (found.save.prompt, dict(found.save.vectors)) == ("", {})
    level.go.set()
    assert lookup.answer.result().method == "exact"
    lookups.close()
    assert lookup.described is not None
    assert (lookup.described.prompt, list(lookup.described.vectors)) == ("a text of 232", ["text"])
    assert lookup.described.token_ids == found.save.token_ids


def test_similar_prompts_are_blended_once_they_are_found(lookups: Lookups, level: SlowText) -> None:
    level.donor = store(lookups, STORED).id
    level.go.set()
    found = lookups.submit(request(OTHER), Wish("blend")).answer.result()
    assert (found.method, found.level, found.donors) == ("blend", "semantic_text", (level.donor,))


def test_a_request_that_is_over_takes_no_time_of_the_encoder(lookups: Lookups, level: SlowText) -> None:
    """While one prompt is compared, others wait: those of requests that were answered or ended meanwhile are left out."""
    compared: list[int] = []
    text_of = lookups._text_of
    assert text_of is not None
    lookups._text_of = lambda ids: (compared.append(len(ids)), text_of(ids))[1]
    under_way, over, waiting = (lookups.submit(request(OTHER[:count]), Wish("blend")) for count in (60, 80, 100))
    while waiting.early is None:
        assert not waiting.answer.done()
    side = SchedulerSide(BLEND, lookups, 32, Counts())
    ended = SimpleNamespace(
        request_id="r", status=None, num_computed_tokens=0, num_prompt_tokens=80, num_output_tokens=0,
        kv_transfer_params=None,
    )  # fmt: skip
    side.requests["r"] = Tracked(ended, Wish("blend"), over, 0.0)
    assert side.finished(ended, ()) == (False, {})
    level.go.set()
    assert waiting.answer.result().method == "none"
    lookups.close()
    assert compared == [60, 100]
    assert under_way.answer.done()
    assert not over.answer.done()
    assert lookups.texts.idle, "none is waited for any more"


def test_an_encoder_that_fails_costs_its_own_hits(lookups: Lookups, level: SlowText, monkeypatch: Any) -> None:
    store(lookups, STORED)
    level.go.set()
    monkeypatch.setattr(lookups, "_text_of", lambda ids: 1 / 0)
    found = lookups.submit(request((*STORED[:32], *OTHER)), Wish("blend")).answer.result()
    assert (found.method, found.level) == ("exact", "prefix")
    assert found.save is not None
    assert "ZeroDivisionError" in found.reason
    counts = Counts()
    counts.looked_up(found)
    assert counts.take()["comparisons_failed|ZeroDivisionError"] == 1


def test_what_was_evicted_before_it_was_confirmed_is_not_found_and_stored_again(lookups: Lookups) -> None:
    meta = lookups.submit(request(STORED), Wish("exact")).answer.result().save
    assert meta is not None
    lookups.index.stored(meta)  # the store never had it, or has it no more
    for asked in (LONGER, STORED):
        found = lookups.submit(request(asked), Wish("exact")).answer.result()
        assert found.method == "none"
        assert found.save is not None
    assert len(lookups.cache.finder._prefix) == 0


def test_a_confirmation_is_seen_by_the_next_lookup(lookups: Lookups, monkeypatch: Any) -> None:
    """Indexing runs in a thread; a lookup that comes after the confirmation waits for it."""
    stored, slow = lookups.cache.stored, threading.Event()
    monkeypatch.setattr(lookups.cache, "stored", lambda meta: (slow.wait(5), stored(meta)))
    store(lookups, STORED)
    lookup = lookups.submit(request(STORED), Wish("exact"))
    assert not lookup.answer.done()
    slow.set()
    assert lookup.answer.result().level == "exact_text"


def test_what_is_kept_has_the_lifetime_of_the_settings_or_the_requests_shorter_one() -> None:
    settings = ConnectorSettings(ttl=60)
    lookups = Lookups(HierarchicalCache(MemoryStore(), config=settings.cache_config()), settings, ADAPTERS)
    for wish, ttl in ((Wish("exact"), 60), (Wish("exact", ttl=5), 5), (Wish("exact", ttl=500), 60)):
        meta = lookups.submit(request(STORED), wish).answer.result().save
        assert meta is not None
        assert meta.ttl == ttl
    lookups.close()
