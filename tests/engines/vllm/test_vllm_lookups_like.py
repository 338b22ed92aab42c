"""Donors that are only like a prompt, beside those of copied text: who waits for them, and what runs where nothing comes of it.

With real stores and the bundled model's input embeddings; where it matters what the encoder is doing, it is one that the test holds.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm_harness import DOCS, tokens

from dejakv.build import build_guards, build_levels
from dejakv.cache import HierarchicalCache
from dejakv.costs import SEEN
from dejakv.engines.base import Prepared
from dejakv.engines.vllm.counts import Counts
from dejakv.engines.vllm.embeddings import InputEmbeddings
from dejakv.engines.vllm.limits import Limit, Would
from dejakv.engines.vllm.lookups import Lookup, Lookups
from dejakv.engines.vllm.scheduler import SchedulerSide
from dejakv.engines.vllm.settings import ConnectorSettings, Wish
from dejakv.engines.vllm.tracked import Tracked
from dejakv.find.ask import Ask
from dejakv.find.bound import setting_of
from dejakv.request import Request
from dejakv.store.base import Chunk, Tensor
from dejakv.store.memory import MemoryStore

ADAPTERS: Any = SimpleNamespace(base="e", epoch_of=lambda lora: "e", doubt=lambda lora: "")
SETTINGS = ConnectorSettings(mode="blend", index_encoder="model", similarity_threshold=0.5)
BLEND = Wish("blend")
UNSTORED = replace(BLEND, no_store=True)
"""Nothing is kept of it, so that it is not described as text either."""


def reworded(passage: list[int]) -> list[int]:
    """The passage with every sixteenth token another one: no run of it is long enough for the index of copied text."""
    return [token if place % 16 else token % 400 + 9 for place, token in enumerate(passage)]


PASSAGE, OTHER = tokens(128, 1), tokens(160, 2)
HOLDS = tokens(9, 3) + PASSAGE
LIKE = tokens(12, 4) + reworded(OTHER) + tokens(20, 5)
ASKED = tokens(8, 6) + PASSAGE + OTHER + tokens(24, 7)


class Held(InputEmbeddings):
    """Embeds while it is let."""

    def __init__(self) -> None:
        super().__init__(DOCS, AutoTokenizer.from_pretrained(DOCS), "e")
        self.free, self.began = threading.Event(), threading.Event()
        self.free.set()

    def embed_text(self, text: str) -> Any:
        self.began.set()
        assert self.free.wait()
        return super().embed_text(text)


@pytest.fixture
def encoder() -> Held:
    return Held()


@pytest.fixture
def lookups(encoder: Held) -> Iterator[Lookups]:
    config = SETTINGS.cache_config()
    levels = build_levels(config, encoder)
    cache = HierarchicalCache(MemoryStore(), levels, build_guards(config, levels), config)
    made = Lookups(cache, SETTINGS, ADAPTERS, encoder.text_of)
    for prompt in (HOLDS, LIKE):
        store(made, prompt)
    made.pace.seen(1.0)
    yield made
    encoder.free.set()
    made.close()


def submit(lookups: Lookups, prompt: list[int], wish: Wish = BLEND) -> Lookup:
    request = SimpleNamespace(
        request_id="r", prompt_token_ids=prompt, cache_salt=None, mm_features=[], lora_request=None
    )
    return lookups.submit(request, wish)


def store(lookups: Lookups, prompt: list[int]) -> None:
    """Stores a prompt as a worker does, with its text, and has it confirmed."""
    lookup = submit(lookups, prompt, Wish("exact"))
    lookup.answer.result()
    lookup.jobs[-1].result()
    settle(lookups)
    meta = lookup.described
    assert meta is not None
    assert meta.vectors
    lookups.cache.store.put(Chunk(meta, Tensor(np.zeros((2, 1, 1, len(prompt), 1), np.float32), "F32")))
    lookups.index.stored(meta)


def settle(lookups: Lookups) -> None:
    """Waits until the encoder has no work."""
    work = lookups.texts.submit(lambda: None)
    assert work is not None
    work.result()
    while not lookups.texts.idle:
        pass


def ids(lookups: Lookups, *prompts: list[int]) -> set[str]:
    return {meta.id for meta in lookups.cache.store.metas() if list(meta.token_ids) in prompts}


def test_donors_of_both_kinds_join_one_blend(lookups: Lookups) -> None:
    found = submit(lookups, ASKED).answer.result()
    assert (found.method, found.level, found.reason, found.failed) == ("blend", "copied", "", "")
    assert set(found.donors) == ids(lookups, HOLDS, LIKE)
    assert found.save is not None


def test_and_no_more_of_them_than_the_connector_takes(lookups: Lookups) -> None:
    lookups.cache.finder.config = replace(lookups.cache.finder.config, blend_donors=1)
    found = submit(lookups, ASKED).answer.result()
    assert set(found.donors) == ids(lookups, HOLDS)


@pytest.mark.parametrize("prompt", [ASKED, OTHER])
def test_a_lookup_that_compares_text_counts_once(lookups: Lookups, prompt: list[int]) -> None:
    before = lookups.cache.stats(None)
    found = submit(lookups, prompt).answer.result()
    assert found.method == "blend"
    after = lookups.cache.stats(None)
    assert after.lookups - before.lookups == 1
    assert after.hits == {**before.hits, found.level: 1}


@pytest.mark.parametrize(
    ("prompt", "wish"),
    [
        (ASKED[:191], BLEND),  # 63 tokens are new
        (ASKED, Wish("exact")),
        (ASKED, Wish("off")),
        (ASKED, Wish("blend", limit=Limit(1.0, "e", setting_of("blend", SETTINGS.cache_config())))),
        (ASKED, Wish("blend", limit=Limit(-1.0, "e", "another"))),
    ],
)
def test_who_does_not_wait_for_the_encoder(lookups: Lookups, encoder: Held, prompt: list[int], wish: Wish) -> None:
    encoder.free.clear()
    found = submit(lookups, prompt, wish).answer.result()
    assert set(found.donors) <= ids(lookups, HOLDS)


def test_nor_does_one_that_names_its_donors(lookups: Lookups, encoder: Held) -> None:
    encoder.free.clear()
    (named,) = ids(lookups, HOLDS)
    assert submit(lookups, ASKED, Wish("blend", donors=(named,))).answer.result().donors == (named,)


def test_nobody_waits_before_a_row_was_timed_or_where_asking_takes_about_as_long(
    lookups: Lookups, encoder: Held
) -> None:
    encoder.free.clear()
    for _ in range(SEEN):
        lookups.pace.seen(1e-3)
        lookups.cache.finder.likeness.seconds.add(0.1)
    assert set(submit(lookups, ASKED, UNSTORED).answer.result().donors) == ids(lookups, HOLDS)
    lookups.pace._row = None
    assert set(submit(lookups, ASKED, UNSTORED).answer.result().donors) == ids(lookups, HOLDS)


def test_nor_where_the_answer_would_come_too_late(lookups: Lookups, encoder: Held) -> None:
    """Until that has been so for a while, as everywhere."""
    encoder.free.clear()
    for _ in range(SEEN):
        lookups.cache.finder.likeness.seconds.add(0.6)
    for _ in range(SEEN):
        assert set(submit(lookups, ASKED, UNSTORED).answer.result().donors) == ids(lookups, HOLDS)
    encoder.free.set()
    assert set(submit(lookups, ASKED).answer.result().donors) == ids(lookups, HOLDS, LIKE)


def test_nor_where_so_many_rows_are_computed_in_any_case(lookups: Lookups, encoder: Held) -> None:
    encoder.free.clear()
    lookups.cache.config = replace(lookups.cache.config, blend_share=0.7)
    assert set(submit(lookups, ASKED).answer.result().donors) == ids(lookups, HOLDS)


def test_nor_while_the_encoder_works_for_another_prompt(lookups: Lookups, encoder: Held) -> None:
    """However long that takes, one request waits for it."""
    encoder.free.clear()
    encoder.began.clear()
    first = submit(lookups, ASKED)
    assert encoder.began.wait()
    second = submit(lookups, [*tokens(10, 8), *ASKED]).answer.result()
    assert set(second.donors) == ids(lookups, HOLDS)
    assert not first.answer.done()
    encoder.free.set()
    assert set(first.answer.result().donors) == ids(lookups, HOLDS, LIKE)


def test_a_lookup_that_takes_too_long_blends_what_is_copied(lookups: Lookups, encoder: Held) -> None:
    encoder.free.clear()
    encoder.began.clear()
    lookup = submit(lookups, ASKED)
    assert encoder.began.wait()
    found = lookup.by_now("it took too long")
    assert (found.method, found.level, found.reason) == ("blend", "copied", "it took too long")
    assert set(found.donors) == ids(lookups, HOLDS)
    assert found.save is not None


def test_the_engine_loop_goes_on_with_that(lookups: Lookups, encoder: Held) -> None:
    encoder.free.clear()
    encoder.began.clear()
    lookup = submit(lookups, ASKED)
    assert encoder.began.wait()
    asked: Any = SimpleNamespace(
        request_id="r", num_prompt_tokens=len(ASKED), lora_request=None, block_hashes=[bytes(32)] * (len(ASKED) // 32)
    )
    side = SchedulerSide(SETTINGS, lookups, 32, Counts())
    tracked = side.requests["r"] = Tracked(asked, BLEND, lookup, deadline=0.0)
    assert side.matched_tokens(asked, 0) == (len(ASKED) - SETTINGS.blend_tail, True)
    assert tracked.found is not None
    assert set(tracked.found.donors) == ids(lookups, HOLDS)
    assert tracked.reason == "the lookup took longer than 0.5 s"


@pytest.mark.parametrize("failing", ["text_of", "embed_text"])
def test_an_encoder_that_fails_costs_the_donors_that_are_only_like(
    lookups: Lookups, encoder: Held, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The copied text is blended all the same; the failure is told and counted, whoever notices it."""

    def gone(*_: Any) -> Any:
        raise ConnectionError("the encoder's process has ended")

    if failing == "text_of":
        monkeypatch.setattr(lookups, "_text_of", gone)
    else:
        (level,) = [level for level in lookups.cache.finder.levels if level.name == "semantic_text"]
        monkeypatch.setattr(level, "_encode", gone)
    found = submit(lookups, ASKED).answer.result()
    assert (found.method, found.level, set(found.donors)) == ("blend", "copied", ids(lookups, HOLDS))
    assert "ConnectionError" in found.reason
    counts = Counts()
    counts.looked_up(found)
    assert counts.take()["comparisons_failed|ConnectionError"] == 1


def test_what_a_blend_with_like_text_would_be_is_told_as_the_finder_plans_it(lookups: Lookups) -> None:
    """Copied text alone saves nothing beyond the exact prefix here. The setting is that of every blend, as on transformers."""
    prompt = HOLDS + OTHER
    config = lookups.cache.config
    lookup = submit(lookups, prompt, Wish("blend", limit=Limit(1.0, "e", setting_of("blend", config))))
    found = lookup.answer.result()
    assert (found.method, set(found.donors)) == ("blend", ids(lookups, HOLDS, LIKE))
    assert found.would is not None
    settle(lookups)
    described = lookup.described
    assert described is not None
    request = Request("r", described.prompt, described.chunk, partition=described.partition)
    prepared = Prepared(request, described.token_ids, epoch="e")
    decision = lookups.cache.find(prepared, Ask("blend"))
    assert decision.plan.like == 1
    assert found.would == Would.of(decision, "e", setting_of("blend", config))
