"""AnswerCache: what hits, what is labelled, what is not kept, and what bad input does."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejakv.answers import AnswerCache, AnswerHit, Selection
from dejakv.decide.guards.lexical import LexicalGuard
from dejakv.errors import ConfigError, InputError, ModelError
from dejakv.store.budgets import now
from dejakv.store.open import open_store
from dejakv.vectors.text import ModelTextEncoder

ASKED = "please tell me what the capital of the country called france is"
NEAR = "please tell me what the capital of a country called france is"
OTHER = "please tell me what the capital of the country called spain is"


def words(text: str, dim: int = 512) -> Any:
    """A bag of words as an embedding."""
    vector = np.zeros(dim, dtype=np.float32)
    for word in text.lower().split():
        vector[sum(map(ord, word)) * 31 % dim] += 1
    return vector


ENCODER = ModelTextEncoder(words, "words")


def opened(store: Any = None, **settings: Any) -> AnswerCache:
    return AnswerCache(store, **{"encoder": ENCODER, "similarity_threshold": 0.8, **settings})


@pytest.fixture
def cache() -> Iterator[AnswerCache]:
    with opened() as cache:
        yield cache


def hit_of(cache: AnswerCache, question: str, **options: Any) -> AnswerHit:
    hit = cache.get(question, **options)
    assert hit is not None
    return hit


def test_the_very_question_hits_exactly_and_a_similar_one_with_its_label(cache: AnswerCache) -> None:
    assert cache.get(ASKED) is None
    assert cache.put(ASKED, "Paris.")
    exact, near = hit_of(cache, ASKED), hit_of(cache, NEAR)
    assert (exact.answer, exact.method, exact.score, exact.approximate) == ("Paris.", "exact", 1.0, False)
    assert (near.answer, near.method, near.level, near.approximate) == ("Paris.", "adopt", "semantic_text", True)
    assert near.question == ASKED
    assert 0.8 < near.score < 1
    assert near.label == {
        "method": "adopt", "level": "semantic_text", "score": near.score, "question": ASKED, "id": exact.id,
    }  # fmt: skip


def test_equal_text_in_another_case_is_an_approximate_hit(cache: AnswerCache) -> None:
    cache.put("Where is the cat?", "On the mat.")
    hit = hit_of(cache, "where is  the cat?")
    assert (hit.method, hit.level) == ("adopt", "exact_text")


def test_a_guard_refuses_what_the_score_proposes(cache: AnswerCache) -> None:
    cache.put(ASKED, "Paris.")
    assert cache.get(OTHER) is None
    assert cache.stats().rejections["lexical"] == 1
    with opened(lexical_guard=False) as unguarded:
        unguarded.put(ASKED, "Paris.")
        assert hit_of(unguarded, OTHER).answer == "Paris."  # what a threshold alone does


def test_a_guard_of_the_callers_own_takes_the_defaults_place() -> None:
    with opened(guards=[LexicalGuard({"nation": "country"})]) as cache:
        cache.put(ASKED, "Paris.")
        assert hit_of(cache, ASKED.replace("country", "nation")).approximate


def test_nothing_crosses_partitions_or_contexts(cache: AnswerCache) -> None:
    cache.put(ASKED, "Paris.", partition="ann", context="model-1")
    for question in (ASKED, NEAR):
        assert cache.get(question, partition="bob", context="model-1") is None
        assert cache.get(question, partition="ann", context="model-2") is None
        assert cache.get(question, partition="ann", context="model-1") is not None


def test_a_threshold_of_a_call_is_only_stricter(cache: AnswerCache) -> None:
    cache.put(ASKED, "Paris.")
    assert cache.get(NEAR, threshold=0.99) is None
    assert cache.get(ASKED, threshold=0.99) is not None
    cache.put("alpha beta", "x")
    assert cache.get("alpha gamma", threshold=-1.0) is None


def test_without_similar_only_the_very_question_hits_and_nothing_is_embedded() -> None:
    def fails(text: str) -> Any:
        raise AssertionError("it was embedded")

    with opened(encoder=ModelTextEncoder(fails, "fails")) as cache:
        assert cache.put(ASKED, "Paris.", similar=False)
        assert cache.get(NEAR, similar=False) is None
        assert hit_of(cache, ASKED, similar=False).method == "exact"


def test_the_latest_answer_counts(cache: AnswerCache) -> None:
    cache.put(ASKED, "Lyon.")
    cache.put(ASKED, "Paris.")
    assert (hit_of(cache, ASKED).answer, hit_of(cache, NEAR).answer, len(cache)) == ("Paris.", "Paris.", 1)


def test_empty_questions_and_answers_are_not_kept(cache: AnswerCache) -> None:
    assert not cache.put(ASKED, " ")
    assert not cache.put(" ", "Paris.")
    assert len(cache) == 0
    assert cache.get(" ") is None


def test_values_that_are_no_text_are_refused(cache: AnswerCache) -> None:
    with pytest.raises(InputError, match="finished_text"):
        cache.put(ASKED, {"choices": []})  # type: ignore[arg-type]
    with pytest.raises(InputError):
        cache.get(7)  # type: ignore[arg-type]
    with pytest.raises(InputError):
        cache.get(ASKED, partition=7)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="ttl"):
        cache.put(ASKED, "Paris.", ttl=0)


def test_a_dry_run_removes_nothing_and_a_selection_takes_no_more_than_it_says(cache: AnswerCache) -> None:
    for partition in ("ann", "bob"):
        for context in ("one", "two"):
            cache.put(ASKED, "Paris.", partition=partition, context=context)
    # With the question as tokens, this one would begin with the removed one, and leave with it.
    cache.put(f"{ASKED} now", "Paris.", partition="ann", context="one")
    wrong = Selection(donors=(hit_of(cache, ASKED, partition="ann", context="one").id,))
    assert (cache.invalidate(wrong, dry_run=True).prompts, len(cache)) == (1, 5)
    assert (cache.invalidate(wrong).prompts, len(cache)) == (1, 4)
    assert cache.get(f"{ASKED} now", partition="ann", context="one") is not None
    assert cache.invalidate(Selection(epoch=cache.epoch("two"))).prompts == 2
    assert cache.invalidate(Selection("bob")).prompts == 1
    assert cache.invalidate(Selection()).prompts == 1
    assert len(cache) == 0


def test_a_removed_answer_is_found_by_no_similar_question(cache: AnswerCache) -> None:
    cache.put(ASKED, "Paris.")
    cache.invalidate(Selection(donors=(hit_of(cache, NEAR).id,)))
    assert cache.get(NEAR) is None


def test_the_least_recently_used_leaves_first() -> None:
    with opened(max_entries=2) as cache:
        cache.put("alpha", "1")
        cache.put("beta", "2")
        assert cache.get("alpha") is not None
        cache.put("gamma", "3")
        assert [cache.get(name) is not None for name in ("alpha", "beta", "gamma")] == [True, False, True]


def test_a_partition_evicts_only_its_own() -> None:
    with opened(max_entries=4, partitions=2) as cache:
        cache.put("alpha", "1", partition="ann")
        for number in range(5):
            cache.put(f"question {number}", "x", partition="bob")
        assert cache.get("alpha", partition="ann") is not None
        assert len(cache) == 3


def test_answers_survive_a_restart_without_being_embedded_again(tmp_path: Path) -> None:
    with opened(tmp_path / "answers") as cache:
        cache.put(ASKED, "Paris.")
    asked: list[str] = []

    def counted(text: str) -> Any:
        asked.append(text)
        return words(text)

    with opened(tmp_path / "answers", encoder=ModelTextEncoder(counted, "words")) as cache:
        assert asked == []
        assert hit_of(cache, ASKED).method == "exact"
        assert hit_of(cache, NEAR).approximate
        assert asked == [NEAR]


# Bad input


def test_vectors_of_another_encoder_are_never_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path / "answers") as cache:
        cache.put(ASKED, "Paris.")
    # Every text has one direction: with the stored vectors anything would be similar.
    constant = ModelTextEncoder(lambda text: np.ones(512), "constant")
    with caplog.at_level(logging.WARNING), opened(tmp_path / "answers", encoder=constant, lexical_guard=False) as cache:
        assert "1 of 1 stored answers have vectors of another encoder" in caplog.text
        assert "embedded again" not in caplog.text
        assert cache.get(NEAR) is None
        assert cache.get("something else") is None
        assert hit_of(cache, ASKED).method == "exact"
        cache.put(ASKED, "Paris.")  # stored again: with a vector of this encoder
        assert hit_of(cache, NEAR).approximate


def test_another_encoder_of_another_dimension_is_no_error(tmp_path: Path) -> None:
    with opened(tmp_path / "answers") as cache:
        cache.put(ASKED, "Paris.")
    smaller = ModelTextEncoder(lambda text: words(text, 64), "64 words")
    with opened(tmp_path / "answers", encoder=smaller) as cache:
        assert cache.get(NEAR) is None
        cache.put(OTHER, "Madrid.")
        assert hit_of(cache, OTHER.replace("the country", "a country")).answer == "Madrid."


def test_an_encoder_that_changes_its_dimension_is_an_error_that_says_so(tmp_path: Path) -> None:
    with opened(tmp_path / "answers") as cache:
        cache.put(ASKED, "Paris.")
    liar = ModelTextEncoder(lambda text: words(text, 64), "words")
    with (
        opened(tmp_path / "answers", encoder=liar) as cache,
        pytest.raises(ConfigError, match="of dimension 512: use the encoder that the index was made for"),
    ):
        cache.get(NEAR)


def test_an_encoder_that_fails_costs_similar_hits_alone() -> None:
    broken = False

    def sometimes(text: str) -> Any:
        if broken:
            raise ConnectionError("the service is away")
        return words(text)

    with opened(encoder=ModelTextEncoder(sometimes, "sometimes")) as cache:
        cache.put(ASKED, "Paris.")
        broken = True
        assert cache.get(NEAR) is None
        assert hit_of(cache, ASKED).answer == "Paris."


def test_an_answer_beyond_the_budget_is_refused_and_counted() -> None:
    with opened(max_bytes=20_000) as cache:
        assert not cache.put(ASKED, "x" * 30_000)
        assert cache.get(ASKED) is None
        assert cache.store.stats().refused == {"too_large": 1}
        assert cache.put(ASKED, "Paris.")


def test_a_full_disk_costs_the_answer_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "answers") as cache:
        cache.put(ASKED, "Paris.")

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("os.write", full)
            patch.setattr("os.writev", full)
            patch.setattr("builtins.open", full)
            patch.setattr("io.open", full)
            patch.setattr("os.open", full)
            assert not cache.put(OTHER, "Madrid.")
        assert "see that there is space" in caplog.text
        assert cache.get(OTHER) is None
        assert hit_of(cache, ASKED).answer == "Paris."
        assert cache.put(OTHER, "Madrid.")


def test_an_answer_expires_by_the_shorter_of_two_lifetimes() -> None:
    ahead = 0.0
    with opened(open_store(clock=lambda: now() + ahead), ttl=100) as cache:
        cache.put(ASKED, "Paris.")
        cache.put(OTHER, "Madrid.", ttl=10)
        ahead = 50.0
        assert cache.get(OTHER) is None
        assert cache.get(NEAR) is not None
        ahead = 101.0
        assert cache.get(ASKED) is None
        assert cache.get(NEAR) is None


@pytest.mark.parametrize("jump", [-3600.0, 7200.0])
def test_a_clock_that_jumps_makes_no_answer_younger(jump: float) -> None:
    ahead = 0.0
    with opened(open_store(clock=lambda: now() + ahead), ttl=3600) as cache:
        cache.put(ASKED, "Paris.")
        ahead = jump
        # From the future: its age is unknown, and counts as over.
        assert cache.get(ASKED) is None
        assert cache.get(NEAR) is None


def test_a_damaged_store_is_a_miss(tmp_path: Path) -> None:
    with opened(tmp_path / "answers") as cache:
        cache.put(ASKED, "Paris.")
        cache.put(OTHER, "Madrid.")
    for path in (tmp_path / "answers").rglob("catalog.sqlite*"):
        path.write_bytes(b"damaged")
    with opened(tmp_path / "answers") as cache:
        for question, answer in ((ASKED, "Paris."), (OTHER, "Madrid.")):
            hit = cache.get(question)
            assert hit is None or hit.answer == answer


def test_settings_that_an_answer_cache_cannot_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="decides reuse itself"):
        AnswerCache(reuse="blend")
    with pytest.raises(ConfigError, match="needs labels"):
        opened(error_bound=0.01)
    with pytest.raises(ConfigError, match="similarity_treshold"):
        opened(similarity_treshold=0.8)
    with pytest.raises(ModelError, match="index_encoder"):
        AnswerCache(index_encoder="model")


def test_switched_off_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEJAKV_OFF", "1")
    with opened() as cache:
        assert not cache.put(ASKED, "Paris.")
        assert cache.get(ASKED) is None


# The decorator, and asyncio


def test_a_decorated_function_runs_once_and_its_hits_are_labelled(cache: AnswerCache) -> None:
    calls: list[str] = []

    @cache.cached(context="model-1", partition=lambda question, user="ann": user)
    def ask(question: str, user: str = "ann") -> str:
        calls.append(question)
        return f"Paris, {user}."

    first, again, near = ask(ASKED), ask(question=ASKED), ask(NEAR)
    assert (first, again, near) == ("Paris, ann.",) * 3
    assert not hasattr(first, "hit")
    assert (again.hit.method, near.hit.method, near.hit.question) == ("exact", "adopt", ASKED)  # type: ignore[attr-defined]
    assert ask(ASKED, user="bob") == "Paris, bob."
    assert calls == [ASKED, ASKED]


def test_other_arguments_and_other_functions_are_other_contexts(cache: AnswerCache) -> None:
    @cache.cached()
    def ask(question: str, model: str = "small", *, style: str = "") -> str:
        return f"{model} {style}"

    @cache.cached()
    def other(question: str) -> str:
        return "other"

    assert [ask(ASKED), ask(ASKED, "large"), ask(ASKED, style="rude"), other(ASKED)] == [
        "small ", "large ", "small rude", "other",
    ]  # fmt: skip


def test_errors_and_no_answer_are_not_kept(cache: AnswerCache) -> None:
    outcomes: list[Any] = [ValueError("away"), None, "", "Paris."]

    @cache.cached()
    def ask(question: str) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with pytest.raises(ValueError, match="away"):
        ask(ASKED)
    assert [ask(ASKED), ask(ASKED), ask(ASKED), ask(ASKED)] == [None, "", "Paris.", "Paris."]


def test_an_answer_that_is_no_text_says_what_to_return(cache: AnswerCache) -> None:
    @cache.cached()
    def ask(question: str) -> Any:
        return {"choices": []}

    with pytest.raises(InputError, match="finished_text"):
        ask(ASKED)


def test_coroutines_are_cached_like_functions(cache: AnswerCache) -> None:
    calls: list[str] = []

    @cache.cached()
    async def ask(question: str) -> str:
        calls.append(question)
        return "Paris."

    async def all_of_it() -> None:
        assert await ask(ASKED) == "Paris."
        near: Any = await ask(NEAR)
        assert near.hit.approximate
        assert calls == [ASKED]
        assert await cache.aput("Where is the cat?", "On the mat.")
        hit = await cache.aget("Where is the cat?")
        assert hit is not None
        assert (await cache.ainvalidate(Selection(donors=(hit.id,)), dry_run=True)).prompts == 1
        assert (await cache.ainvalidate(Selection())).prompts == 2

    asyncio.run(all_of_it())


def test_many_threads_put_and_get_at_once(tmp_path: Path) -> None:
    async def storm(cache: AnswerCache) -> None:
        await asyncio.gather(*(cache.aput(f"question number {n}", str(n)) for n in range(80)))
        hits = await asyncio.gather(*(cache.aget(f"question number {n}") for n in range(80)))
        assert [hit.answer for hit in hits if hit is not None] == [str(n) for n in range(80)]

    with opened(tmp_path / "answers") as cache:
        asyncio.run(storm(cache))
