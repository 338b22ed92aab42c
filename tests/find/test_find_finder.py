"""One finder for all: what a request asks for, what it may have, and what it is told."""

from dataclasses import replace
from typing import Any

import pytest
from tests.find.conftest import (
    ASKED,
    PREFIXED,
    SIMILAR,
    WORDS,
    Likes,
    copied,
    finder_of,
    id_of,
    like,
    prompt,
    similar,
    state_of,
)

from dejakv.cache import HierarchicalCache
from dejakv.decide.costs import ReuseCosts
from dejakv.decide.finder import space_of
from dejakv.decide.guards.base import ThresholdGuard
from dejakv.decide.guards.lexical import LexicalGuard
from dejakv.decide.plan import ReuseRequest
from dejakv.errors import ConfigError
from dejakv.identity import MediumSpan
from dejakv.request import Media
from dejakv.store.open import open_store


@pytest.mark.parametrize("mode", ["adopt", "blend"])
def test_a_donor_is_used_as_it_is_asked_for(mode: Any) -> None:
    made = finder_of(SIMILAR, level=similar(), guards=(ThresholdGuard({"semantic_text": 0.8}),))
    assert made.decide(ASKED, ReuseRequest(mode)).plan.method == mode
    refused = made.decide(ASKED, ReuseRequest("exact")).plan
    assert (refused.method, "not asked for" in refused.reason) == ("none", True)


@pytest.mark.parametrize(("own", "method"), [(0.5, "adopt"), (0.95, "none")])
def test_a_request_can_only_tighten_the_threshold(own: float, method: str) -> None:
    made = finder_of(SIMILAR, level=similar(0.9), guards=(ThresholdGuard({"semantic_text": 0.8}),))
    assert made.decide(ASKED, ReuseRequest("adopt", threshold=own)).plan.method == method
    strict = finder_of(SIMILAR, level=similar(0.7), guards=(ThresholdGuard({"semantic_text": 0.8}),))
    assert strict.decide(ASKED, ReuseRequest("adopt", threshold=own)).plan.method == "none"


def test_the_reason_is_the_best_candidates_rejection() -> None:
    other = prompt(tuple(range(500, 600)), "who was it?")
    level = Likes({id_of(SIMILAR): 0.7, id_of(other): 0.6})
    made = finder_of(SIMILAR, other, level=level, guards=(ThresholdGuard({"semantic_text": 0.8}),))
    assert made.decide(ASKED, ReuseRequest("adopt")).plan.reason == "threshold: score 0.700 is below 0.8"


def test_blend_does_without_the_guards_of_words_and_adopt_does_not() -> None:
    far = replace(SIMILAR, request=replace(SIMILAR.request, chunk="turn off the lamp", prompt="turn off the lamp"))
    guards = (ThresholdGuard({"semantic_text": 0.8}), LexicalGuard())
    made = finder_of(far, level=Likes({id_of(far): 0.9}), guards=guards)
    assert made.decide(ASKED, ReuseRequest("blend")).plan.method == "blend"
    assert made.decide(ASKED, ReuseRequest("adopt")).plan.reason.startswith("lexical")


def test_a_prefix_that_does_not_pay_is_not_used() -> None:
    made = finder_of(PREFIXED)
    masked = ReuseCosts(row=1e-3, pair=1e-3)  # 36 rows with 82 tokens each in the mean, or 100 with 50
    decision = made.decide(ASKED, ReuseRequest(), costs=masked)
    assert (decision.plan.method, decision.statuses["kv_cache"]) == ("prefix", "hit")
    assert str(decision) == "full 5.1 s, exact prefix 3 s: exact prefix"
    slow_disk = replace(masked, byte=1.0, token_bytes=1.0)
    decision = made.decide(ASKED, ReuseRequest(), costs=slow_disk)
    assert (decision.plan.method, decision.exact.method, decision.statuses["kv_cache"]) == ("none", "none", "miss")


def test_a_blend_takes_the_exact_prefix_of_another_donor_along() -> None:
    made = finder_of(
        SIMILAR, PREFIXED, level=similar(), guards=(ThresholdGuard({"semantic_text": 0.8}),), copied_text=False
    )
    decision = made.decide(ASKED, ReuseRequest("blend"), costs=ReuseCosts(row=1e-3))
    assert [meta.id for meta in decision.plan.donors] == [id_of(SIMILAR), id_of(PREFIXED)]
    assert (decision.plan.prefix_tokens, decision.plan.reused) == (64, 93)  # a fifth of the 36 rows behind the prefix
    assert made.decide(ASKED, ReuseRequest("blend", donors=1), costs=ReuseCosts(row=1e-3)).plan.prefix_tokens == 0


def test_a_level_that_fails_costs_its_own_hits_alone() -> None:
    made = finder_of(PREFIXED, level=Likes({}, RuntimeError("down")))
    decision = made.decide(ASKED, ReuseRequest("adopt"))
    assert (decision.plan.method, decision.statuses["semantic_text"]) == ("prefix", "skip")
    assert decision.plan.reason == "semantic_text: the level failed: RuntimeError"


def test_a_level_whose_settings_are_wrong_is_no_miss() -> None:
    with pytest.raises(ConfigError, match="wrong"):
        finder_of(level=Likes({}, ConfigError("wrong"))).decide(ASKED, ReuseRequest("adopt"))


def test_a_named_donor_needs_no_level_and_no_guard() -> None:
    made = finder_of(SIMILAR, guards=(LexicalGuard(),))
    chosen = made.decide(ASKED, ReuseRequest("blend", named=(id_of(SIMILAR),))).plan
    assert (chosen.method, chosen.donors[0].id) == ("blend", id_of(SIMILAR))
    assert made.decide(ASKED, ReuseRequest("exact", named=(id_of(SIMILAR),))).plan.method == "none"


def test_several_named_donors_come_in_their_order_and_each_once() -> None:
    others = [prompt(like(place), f"text {place}") for place in (3, 4, 5)]
    made = finder_of(SIMILAR, *others, blend_donors=3)
    first, second, third, last = (id_of(each) for each in (others[1], SIMILAR, others[0], others[2]))
    chosen = made.decide(ASKED, ReuseRequest("blend", named=(first, second, first, "0" * 40, third, last))).plan
    assert (chosen.method, [meta.id for meta in chosen.donors]) == ("blend", [first, second, third])


def test_without_levels_copied_text_is_still_found() -> None:
    level = similar()
    stored = copied((1, 2, 3), WORDS[:100])
    made = finder_of(stored, SIMILAR, level=level)
    assert made.decide(copied((7, 8), WORDS[:100]), ReuseRequest("blend", levels=False)).plan.donors[0].id == id_of(
        stored
    )
    assert made.decide(ASKED, ReuseRequest("blend", levels=False)).plan.method == "none"
    assert level.asked == 0


@pytest.mark.parametrize("other", [{"partition": "q"}, {"epoch": "f"}])
def test_a_named_donor_of_another_tenant_or_model_is_unknown(other: dict[str, str]) -> None:
    foreign = prompt(SIMILAR.token_ids, "what was it?", **other)
    made = finder_of(foreign, PREFIXED)
    decision = made.decide(ASKED, ReuseRequest("blend", named=(id_of(foreign),)))
    assert (decision.plan.method, decision.plan.reused) == ("prefix", 64)
    assert "not known in its partition" in decision.plan.reason


def test_an_exact_decision_compares_nothing_and_is_no_lookup() -> None:
    level = similar()
    made = finder_of(SIMILAR, PREFIXED, level=level)
    decision = made.decide_exact(ASKED)
    assert (decision.key, decision.plan.method, decision.plan.reused) == (id_of(ASKED), "prefix", 64)
    assert made.decide_exact(ASKED, costs=ReuseCosts(row=1.0, byte=1.0, token_bytes=2.0)).plan.method == "none"
    assert (level.asked, made.counts.for_partition("p").lookups) == (0, 0)


def test_every_find_counts_one_lookup_and_its_rejections() -> None:
    made = HierarchicalCache(open_store(), [similar(0.1)], [ThresholdGuard({"semantic_text": 0.8})], background=False)
    made.store.put(state_of(SIMILAR))
    made.finder.fill()
    for mode in ("off", "exact", "adopt", "blend"):
        made.find(ASKED, ReuseRequest(mode))
    counts = made.stats("p")
    assert (counts.lookups, counts.rejections, counts.hits) == (4, {"threshold": 4}, {})
    made.finder.guards = (ThresholdGuard({"semantic_text": 0.05}),)
    made.find(ASKED, ReuseRequest("adopt"))
    assert (made.stats("p").hits, made.stats("p").misses) == ({"semantic_text": 1}, 4)


def test_media_keep_spaces_apart_however_they_are_known() -> None:
    picture = Media(b"1")
    text = replace(ASKED, request=replace(ASKED.request, media=()))
    by_bytes = replace(ASKED, request=replace(ASKED.request, media=(picture,)))
    by_digest = replace(text, spans=(MediumSpan(2, 3, picture.digest),))
    assert space_of(by_bytes, "exact") == space_of(by_digest, "exact") != space_of(text, "exact")
    other = replace(text, spans=(MediumSpan(2, 3, Media(b"2").digest),))
    assert space_of(other, "exact") != space_of(by_digest, "exact")
    assert space_of(other, "similar") == space_of(by_digest, "similar") != space_of(text, "similar")
