"""Poisoning: what an attacker stored, or what an approximate answer left, never reaches an exact request or another partition."""

import random
from dataclasses import replace
from typing import Any

import pytest
from tests.attacks.conftest import CONFIG, NearDuplicate, asked, near_duplicate

from dejakv import Pipeline

PAIRS = 4
APPROXIMATE = ("adopt", "blend")
WEAK = replace(CONFIG, lexical_guard=False)
"""Without the guard of words a near duplicate is adopted, and its answer is the planted fact."""


@pytest.fixture(scope="module")
def pairs() -> list[NearDuplicate]:
    rng = random.Random("poisoning")
    return [near_duplicate(rng) for _ in range(PAIRS)]


def poisoned(engine: Any, pipeline: Pipeline, pair: NearDuplicate, attacker: str, mode: str) -> tuple[bool, bool, bool]:
    """Whether the victim's answer is approximate, has tokens of a donor, and is the planted fact."""
    honest = Pipeline(engine).answer(asked(pair.prompt, "victim"))
    assert pair.planted not in honest.text.lower()
    pipeline.answer(asked(pair.duplicate, attacker))
    answer = pipeline.answer(asked(pair.prompt, "victim", mode, no_store=True))
    if not answer.record.approximate:
        assert answer.token_ids == honest.token_ids
    return answer.record.approximate, answer.record.reused_tokens > 0, pair.planted in answer.text.lower()


def test_an_exact_request_is_not_answered_from_a_near_duplicate(served: Any, docs_engine: Any, pairs: Any) -> None:
    for config in (CONFIG, WEAK):
        pipeline = served(config)
        for pair in pairs:
            approximate, _, planted = poisoned(docs_engine, pipeline, pair, "victim", "exact")
            assert not approximate
            assert not planted


@pytest.mark.parametrize("mode", ["exact", *APPROXIMATE])
def test_nothing_of_another_partition_is_used(served: Any, docs_engine: Any, pairs: Any, mode: str) -> None:
    pipeline = served(WEAK)
    for pair in pairs:
        assert poisoned(docs_engine, pipeline, pair, "attacker", mode) == (False, False, False)


def test_in_ones_own_partition_an_approximate_request_gets_the_planted_fact(
    served: Any, docs_engine: Any, pairs: Any
) -> None:
    """The checks above can fail; and with the guard of words it is not adopted."""
    weak, guarded = (
        [poisoned(docs_engine, served(config), pair, "victim", "adopt") for pair in pairs] for config in (WEAK, CONFIG)
    )
    assert (True, True, True) in weak
    assert not any(approximate for approximate, _, _ in guarded)
    assert any(poisoned(docs_engine, served(CONFIG), pair, "victim", "blend")[0] for pair in pairs)


@pytest.mark.parametrize("mode", APPROXIMATE)
def test_what_an_approximate_answer_leaves_is_not_found_by_exact_requests(
    served: Any, docs_engine: Any, pairs: Any, mode: str
) -> None:
    """The approximate request may store: its prompt, asked exactly twice, is computed and then repeated as if it had never run."""
    pipeline, approximate = served(WEAK), 0
    for pair in pairs:
        pipeline.answer(asked(pair.duplicate, "victim"))
        approximate += pipeline.answer(asked(pair.prompt, "victim", mode)).record.approximate
        for text in (pair.prompt, pair.prompt, f"{pair.prompt} {pair.duplicate}"):
            honest = Pipeline(docs_engine).answer(asked(text, "victim"))
            answer = pipeline.answer(asked(text, "victim"))
            assert not answer.record.approximate
            assert answer.token_ids == honest.token_ids
    assert approximate
