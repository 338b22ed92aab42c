"""The whole path over the bundled documents model: what is exact stays exact, what is not is asked for and never kept."""

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.documents import ADOPT, DOCUMENT, EXACT, OTHER, request, uncached, wordings

from dejakv.build import build_cache
from dejakv.decide.plan import FULL, Plan
from dejakv.engines.base import Completion, Engine
from dejakv.errors import InputError
from dejakv.pipeline import Pipeline
from dejakv.request import Prepared, Request
from dejakv_models.docs import ask


@pytest.mark.shows("exact", model="docs-lm")
def test_an_exact_hit_gives_the_uncached_tokens(docs_engine: Any, served: Any) -> None:
    pipeline, wanted = served(EXACT), request(wordings()[0])
    plain = uncached(docs_engine, wanted)
    first, second = pipeline.answer(wanted), pipeline.answer(wanted)
    assert (first.record.provenance, first.record.stored) == ("miss", True)
    assert (second.record.provenance, second.record.method) == ("hit (text:exact)", "exact")
    assert second.record.computed_tokens == 1
    assert plain.token_ids == first.token_ids == second.token_ids
    assert second.record.statuses["exact_text"] == "hit"
    assert second.record.statuses["semantic_text"] == "skip"


class HoldsPrefixes(Engine):
    """An engine with a prefix cache of its own, as vLLM is: a prompt's first 16 tokens are served from it when it comes again."""

    name, holds_state, epoch = "holds-prefixes", True, "e"

    def __init__(self) -> None:
        self._seen: set[tuple[int, ...]] = set()

    def prepare(self, request: Request) -> Prepared:
        return Prepared(request, tuple(request.prompt.encode()), ())

    def run(self, prepared: Prepared, plan: Plan = FULL, store: Any = None, *, on_token: Any = None) -> Completion:
        tokens, first = len(prepared.token_ids), prepared.token_ids[:16]
        held = 16 if first in self._seen else 0
        self._seen.add(first)
        return Completion("yes", (1,), tokens, tokens - held, 0, 0.1, 0.1)


def test_a_prefix_that_the_engine_held_itself_is_recorded_as_a_prefix() -> None:
    config = replace(EXACT, exact_text=False, semantic_text=False, copied_text=False, exact_prefix=False)
    engine = HoldsPrefixes()
    for cache in (None, build_cache(config, engine)):
        pipeline = Pipeline(HoldsPrefixes(), cache)
        prompts = ("a document of many words. Who?", "a document of many words. Where?")
        full, behind = (pipeline.answer(request(prompt)).record for prompt in prompts)
        assert (full.method, full.level, full.provenance, full.reused_tokens) == ("none", "", "miss", 0)
        assert (behind.method, behind.level, behind.provenance) == ("prefix", "prefix", "hit (prefix)")
        assert (behind.reused_tokens, behind.approximate) == (16, False)
        if cache is not None:
            assert (full.statuses["kv_cache"], behind.statuses["kv_cache"]) == ("miss", "hit")
            assert behind.plans.endswith(": exact prefix")


def test_adopt_is_never_served_to_who_did_not_ask(served: Any) -> None:
    pipeline = served(replace(ADOPT, reuse="exact", lexical_guard=False))
    one, other = wordings()
    pipeline.answer(request(one))
    answer = pipeline.answer(request(other))
    assert answer.record.method == "prefix"
    assert "not asked for" in answer.record.reason


def test_adopt_runs_the_donors_prompt(served: Any) -> None:
    pipeline = served(replace(ADOPT, lexical_guard=False))
    one, other = wordings()
    donor = pipeline.answer(request(one))
    adopted = pipeline.answer(request(other))
    assert (adopted.record.method, adopted.record.provenance) == ("adopt", "hit (text:semantic)")
    assert (adopted.record.approximate, adopted.record.stored) == (True, False)
    assert adopted.record.donor == donor.record.key
    assert (adopted.token_ids, adopted.cached_answer) == (donor.token_ids, donor.text)


def test_a_request_may_switch_reuse_off_for_itself(served: Any) -> None:
    pipeline = served(replace(ADOPT, lexical_guard=False))
    one, other = wordings()
    pipeline.answer(request(one))
    assert not pipeline.answer(request(other, reuse="off")).record.approximate
    assert pipeline.answer(request(one, reuse="off")).record.method == "exact"


def test_questions_on_one_document_share_its_rows_and_hit_exactly_after_a_restart(
    docs_engine: Any, tmp_path: Path
) -> None:
    config = replace(EXACT, cache_dir=str(tmp_path / "cache"))
    asked = [request(ask(DOCUMENT.facts[number], random.Random(number))) for number in range(3)]
    whole = 0
    with closing(build_cache(config, docs_engine)) as cache:
        for wanted in asked:
            answer = Pipeline(docs_engine, cache).answer(wanted)
            cache.flush()
            stored_state = cache.store.get(answer.record.key)
            assert stored_state is not None
            whole += stored_state.tensor.nbytes
        assert cache.store.stats().bytes < 0.6 * whole
    with closing(build_cache(config, docs_engine)) as cache:
        for wanted in asked:
            answer = Pipeline(docs_engine, cache).answer(wanted)
            assert (answer.record.method, answer.record.computed_tokens) == ("exact", 1)
            assert answer.token_ids == uncached(docs_engine, wanted).token_ids
        found = cache.find(replace(docs_engine.prepare(asked[0]), epoch="another epoch")).donor_search
        assert (found.match, found.prefix) == (None, None)


def test_an_empty_prompt_is_refused(served: Any) -> None:
    with pytest.raises(InputError, match="empty"):
        served(EXACT).answer(Request("r", " ", ""))


def test_a_donor_that_vanishes_between_lookup_and_load_is_a_miss(docs_engine: Any, served: Any) -> None:
    pipeline = served(replace(ADOPT, lexical_guard=False))
    one, other = wordings()
    pipeline.answer(request(one))
    plain = uncached(docs_engine, request(other))
    store = pipeline.cache.store
    get, get_parts = store.get, store.get_parts
    store.get, store.get_parts = lambda *_: None, lambda *_: None
    answer = pipeline.answer(request(other))
    store.get, store.get_parts = get, get_parts
    assert (answer.record.method, answer.token_ids) == ("none", plain.token_ids)
    assert "could not be read" in answer.record.reason


def test_the_prompts_own_state_goes_before_others_with_equal_text(served: Any) -> None:
    pipeline = served(replace(ADOPT, exact_prefix=False, min_gain=0))
    mine = request(wordings()[0])
    pipeline.answer(mine)
    newer = request(wordings()[0] + "  ", chunk=wordings()[0].upper(), reuse="off")
    pipeline.answer(replace(newer, prompt=newer.prompt.replace("?", "? ?", 1)))
    assert pipeline.answer(mine).record.method == "exact"


def test_the_guards_follow_what_the_request_asks_for(served: Any) -> None:
    pipeline = served(replace(ADOPT, reuse="blend"))
    question = wordings()[0]
    pipeline.answer(request(question, OTHER.text))
    adopted = pipeline.answer(request(question, reuse="adopt"))
    assert adopted.record.method != "adopt"
    assert "context" in adopted.record.reason
