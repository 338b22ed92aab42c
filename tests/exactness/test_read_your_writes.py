"""A prompt that comes again as soon as its answer is there hits, whatever the store is doing; and what is queued is removed as what is
stored is."""

import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.documents import ADOPT, COSTS, DOCUMENT, OTHER, request, wordings
from tests.serving import until

import dejakv
from dejakv import SemanticCacheConfig
from dejakv.build import build_cache
from dejakv.pipeline import Pipeline
from dejakv.request import Request
from dejakv.store.base import StoredState
from dejakv.store.selection import Selection
from dejakv.store.store import Store
from dejakv_models.docs import make_document, prompt_of

PLAIN = SemanticCacheConfig(semantic_text=False, costs=COSTS)
TEXTS = [make_document(random.Random(seed), facts=20).text for seed in range(3)]


class Slow(Store):
    """Writes nothing before `opened` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()

    def put(self, stored_state: StoredState) -> bool:
        assert self.opened.wait(60), "nobody opened the store"
        return super().put(stored_state)


@contextmanager
def serving(engine: Any, config: SemanticCacheConfig = PLAIN, store: Any = None) -> Iterator[Pipeline]:
    with closing(build_cache(config, engine, store=store)) as cache:
        try:
            yield Pipeline(engine, cache)
        finally:
            if isinstance(store, Slow):
                store.opened.set()


def prompt(text: str, **more: Any) -> Request:
    return request("Where does ann live?", text, **more)


def longer(wanted: Request, more: str = " And who lives there with her?") -> Request:
    return replace(wanted, prompt=wanted.prompt + more)


STORES: dict[str, dict[str, Any]] = {
    "memory": {},
    "folder": {"cache_dir": "kv", "memory_bytes": 0},
    "folder and memory": {"cache_dir": "kv"},
    "budget": {"max_bytes": 64 << 20, "max_cached_blocks": 20, "cache_dir": "kv"},
    "parts": {"partitions": 2, "cache_dir": "kv"},
    "quotas": {"quotas": ("default=32000000",), "max_bytes": 64 << 20, "partitions": 2},
    "ttl": {"ttl": 3600.0, "cache_dir": "kv"},
}


@pytest.mark.parametrize("name", STORES)
def test_repeats_and_longer_prompts_hit_at_once(name: str, docs_engine: Any, tmp_path: Path) -> None:
    settings = dict(STORES[name])
    if "cache_dir" in settings:
        settings["cache_dir"] = str(tmp_path / "kv")
    with serving(docs_engine, replace(PLAIN, **settings)) as pipeline:
        for text in TEXTS:
            first = pipeline.answer(prompt(text))
            again, more = pipeline.answer(prompt(text)), pipeline.answer(longer(prompt(text)))
            assert (again.record.method, again.record.computed_tokens) == ("exact", 1)
            assert again.token_ids == first.token_ids
            assert more.record.method == "prefix"
            assert more.token_ids == Pipeline(docs_engine).answer(longer(prompt(text))).token_ids


def test_a_store_that_does_not_write_holds_up_neither_answers_nor_hits(docs_engine: Any) -> None:
    store = Slow()
    with serving(docs_engine, store=store) as pipeline:
        for text in TEXTS:
            first, again = pipeline.answer(prompt(text)), pipeline.answer(prompt(text))
            assert (first.record.method, first.record.stored) == ("none", True)
            assert (again.record.method, again.token_ids) == ("exact", first.token_ids)
            assert pipeline.answer(longer(prompt(text))).record.method == "prefix"
        assert store.stats().entries == 0
        store.opened.set()
        pipeline.cache.flush()  # type: ignore[union-attr]
        assert store.stats().entries == 2 * len(TEXTS)
        assert pipeline.answer(prompt(TEXTS[0])).record.method == "exact"


def test_another_wording_adopts_a_donor_that_is_not_written(docs_engine: Any) -> None:
    one, other = wordings()
    with serving(docs_engine, replace(ADOPT, lexical_guard=False), Slow()) as pipeline:
        donor = pipeline.answer(request(one))
        assert pipeline.answer(request(other)).record.donor == donor.record.key


def test_a_blend_takes_copied_text_from_donors_that_are_not_written(docs_engine: Any) -> None:
    blend = SemanticCacheConfig(reuse="blend", index_encoder="model", min_gain=1, costs=COSTS)
    with serving(docs_engine, blend, Slow()) as pipeline:
        donor = pipeline.answer(prompt(DOCUMENT.text))
        blended = pipeline.answer(prompt(f"{OTHER.text[:200]}\n{DOCUMENT.text}"))
        assert (blended.record.method, blended.record.donor) == ("blend", donor.record.key)


def test_what_idle_time_computed_is_hit_before_it_is_written(docs_engine: Any) -> None:
    blend = SemanticCacheConfig(reuse="blend", index_encoder="model", min_gain=1, costs=COSTS)
    with closing(build_cache(blend, docs_engine, store=(store := Slow()))) as cache:
        pipeline, wanted = Pipeline(docs_engine, cache, promotes=True), prompt(f"{OTHER.text[:200]}\n{DOCUMENT.text}")
        pipeline.answer(prompt(DOCUMENT.text))
        assert pipeline.answer(wanted).record.method == "blend"
        assert pipeline.promote_one()
        assert pipeline.answer(wanted).record.method == "exact"
        store.opened.set()


def test_other_partitions_do_not_find_what_is_queued(docs_engine: Any) -> None:
    with serving(docs_engine, store=Slow()) as pipeline:
        pipeline.answer(prompt(TEXTS[0], partition="one"))
        assert pipeline.answer(prompt(TEXTS[0], partition="two")).record.method == "none"
        assert pipeline.answer(longer(prompt(TEXTS[0], partition="three"))).record.method == "none"


def test_nothing_is_queued_of_a_request_that_stores_nothing(docs_engine: Any) -> None:
    with serving(docs_engine, store=Slow()) as pipeline:
        pipeline.answer(prompt(TEXTS[0], no_store=True))
        assert pipeline.answer(prompt(TEXTS[0], no_store=True)).record.method == "none"
        assert list(pipeline.cache.store.metas()) == []  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["all", "partition", "key", "clear"])
def test_a_purge_removes_what_is_queued(how: str, docs_engine: Any) -> None:
    store = Slow()
    with serving(docs_engine, store=store) as pipeline:
        key = pipeline.answer(prompt(TEXTS[0], partition="p")).record.key
        assert key is not None
        selections = {"all": Selection(), "partition": Selection("p"), "key": Selection(donors=(key,))}

        def remove() -> object:
            chosen = selections.get(how)
            return pipeline.cache.clear("p") if chosen is None else pipeline.purge(chosen)  # type: ignore[union-attr]

        purge = threading.Thread(target=remove)
        purge.start()
        store.opened.set()
        purge.join(60)
        assert not purge.is_alive()
        assert list(pipeline.cache.store.metas()) == []  # type: ignore[union-attr]
        assert store.stats().entries == 0
        assert pipeline.answer(prompt(TEXTS[0], partition="p")).record.method == "none"
        pipeline.purge(Selection())
        assert pipeline.answer(longer(prompt(TEXTS[0], partition="p"))).record.method == "none"


def test_what_is_queued_expires(docs_engine: Any) -> None:
    with serving(docs_engine, store=Slow()) as pipeline:
        key = pipeline.answer(prompt(TEXTS[0], ttl=0.05)).record.key
        until(lambda: pipeline.cache.store.meta(key) is None)  # type: ignore[union-attr, arg-type]
        assert pipeline.answer(prompt(TEXTS[0])).record.method == "none"


def test_attach_hits_at_once(docs_engine: Any) -> None:
    model, tokenizer = docs_engine.model, docs_engine.tokenizer
    records: list[Any] = []
    with (
        closing(build_cache(PLAIN, docs_engine, store=(store := Slow()))) as cache,
        dejakv.attach(model, tokenizer, cache=cache, on_record=records.append),
    ):
        for text in TEXTS[:3]:
            inputs = tokenizer(prompt_of(text, "Where does ann live?"), return_tensors="pt")
            both = [model.generate(**inputs, max_new_tokens=4, do_sample=False) for _ in range(2)]
            assert torch.equal(*both)
        store.opened.set()
    assert [record.method for record in records] == ["none", "exact"] * 3
