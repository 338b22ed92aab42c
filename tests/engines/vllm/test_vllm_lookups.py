"""Lookups without an engine: what is confirmed is found if it is there."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dejakv.cache import HierarchicalCache
from dejakv.engines.vllm.lookups import Lookups
from dejakv.engines.vllm.settings import ConnectorSettings, Wish
from dejakv.store.base import Chunk, ChunkMeta, Tensor
from dejakv.store.open import open_store

STORED = tuple(range(100, 300))
LONGER = (*STORED[:160], *range(400, 480))
OTHER = tuple(range(600, 800))
ADAPTERS: Any = SimpleNamespace(base="e", epoch_of=lambda lora: "e")
BLEND = ConnectorSettings(mode="blend", lookup_timeout_s=30.0)


def request(token_ids: tuple[int, ...]) -> Any:
    return SimpleNamespace(
        request_id="r", prompt_token_ids=list(token_ids), cache_salt=None, mm_features=[], lora_request=None
    )


@pytest.fixture
def lookups() -> Any:
    made = Lookups(HierarchicalCache(open_store(), config=BLEND.cache_config()), BLEND, ADAPTERS)
    yield made
    made.close()


def store(lookups: Lookups, token_ids: tuple[int, ...]) -> ChunkMeta:
    """Stores a prompt as a worker does, and has it confirmed."""
    meta = lookups.submit(request(token_ids), Wish("exact")).result().save
    assert meta is not None
    lookups.cache.store.put(Chunk(meta, Tensor(np.zeros((2, 1, 1, len(token_ids), 1), np.float32), "F32")))
    lookups.index.stored(meta)
    return meta


def test_an_equal_prompt_is_an_exact_hit_in_each_mode(lookups: Lookups) -> None:
    store(lookups, STORED)
    for mode in ("exact", "blend"):
        found = lookups.submit(request(STORED), Wish(mode)).result()
        assert (found.method, found.level, found.tokens) == ("exact", "exact_text", 199)


def test_copied_text_is_found(lookups: Lookups) -> None:
    meta = store(lookups, STORED)
    moved = (7, 8, 9, *STORED[50:], *range(900, 920))
    found = lookups.submit(request(moved), Wish("blend")).result()
    assert (found.method, found.level, found.donors) == ("blend", "copied", (meta.id,))


def test_what_was_evicted_before_it_was_confirmed_is_not_found_and_stored_again(lookups: Lookups) -> None:
    meta = lookups.submit(request(STORED), Wish("exact")).result().save
    assert meta is not None
    lookups.index.stored(meta)  # the store never had it, or has it no more
    for asked in (LONGER, STORED):
        found = lookups.submit(request(asked), Wish("exact")).result()
        assert found.method == "none"
        assert found.save is not None


def test_a_confirmation_is_seen_by_the_next_lookup(lookups: Lookups, monkeypatch: Any) -> None:
    """Indexing runs in a thread; a lookup that comes after the confirmation waits for it."""
    stored, slow = lookups.cache.stored, threading.Event()
    monkeypatch.setattr(lookups.cache, "stored", lambda meta: (slow.wait(5), stored(meta)))
    store(lookups, STORED)
    lookup = lookups.submit(request(STORED), Wish("exact"))
    assert not lookup.done()
    slow.set()
    assert lookup.result().level == "exact_text"


def test_what_is_kept_has_the_lifetime_of_the_settings_or_the_requests_shorter_one() -> None:
    settings = ConnectorSettings(ttl=60)
    lookups = Lookups(HierarchicalCache(open_store(), config=settings.cache_config()), settings, ADAPTERS)
    for wish, ttl in ((Wish("exact"), 60), (Wish("exact", ttl=5), 5), (Wish("exact", ttl=500), 60)):
        meta = lookups.submit(request(STORED), wish).result().save
        assert meta is not None
        assert meta.ttl == ttl
    lookups.close()
