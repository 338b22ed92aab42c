"""A stranger's text: a context whose state, behind a passage that others share, changes their answers.

The attacker searches among contexts for the one that moves a victim's answer most, in the victim's own partition.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from tests.attacks.conftest import COSTS, asked

from dejakv import Pipeline, SemanticCacheConfig
from dejakv_models.docs import ask, make_document, prompt_of, state
from dejakv_models.docs_facts import ATTRIBUTES

VICTIMS = 3
FACTS = 10
PARTITION = "shared"


@dataclass(frozen=True)
class Victim:
    """A prompt with a shared passage, and contexts that speak of the fact that it asks for."""

    prompt: str
    before: str
    passage: str
    innocent: str
    contexts: tuple[str, ...]


def victims() -> Iterator[Victim]:
    rng = random.Random("strangers")
    for _ in range(VICTIMS):
        sentences = make_document(rng, 2 * FACTS).sentences
        passage = " ".join(sentence.text for sentence in sentences[FACTS:])
        fact = rng.choice([sentence.fact for sentence in sentences[FACTS:] if sentence.fact])
        planted = rng.choice([value for value in ATTRIBUTES[fact.attribute].values if value != fact.value])
        question, before = ask(fact, rng), " ".join(sentence.text for sentence in sentences[:FACTS])
        stated = [state(replace(fact, value=planted), random.Random(number)).text for number in range(2)]
        repeated = [" ".join([text] * 6) for text in (*stated, f"{question} {planted}")]
        innocent = make_document(rng, FACTS).text
        prompt = prompt_of(f"{before} {passage}", question)
        yield Victim(prompt, before, passage, innocent, (*stated, *repeated))


def blended(pipeline: Pipeline, victim: Victim, context: str) -> Any:
    """The victim's answer from a blend, after somebody has sent the passage behind this context."""
    pipeline.cache.clear(PARTITION)
    pipeline.answer(asked(prompt_of(f"{context} {victim.passage}", "what ?"), PARTITION))
    return pipeline.answer(asked(victim.prompt, PARTITION, "blend", no_store=True))


def attacked(engine: Any, pipeline: Pipeline, victim: Victim) -> Any:
    """The answer that is furthest from full computation's first token, of all contexts."""
    token = engine.tokenizer(f" {honest(engine, victim).text}")["input_ids"][-1]
    answers = map(partial(blended, pipeline, victim), victim.contexts)
    return min(answers, key=lambda answer: answer.completion.continued([token])[0, token])


def honest(engine: Any, victim: Victim) -> Any:
    return Pipeline(engine).answer(asked(victim.prompt, PARTITION))


@pytest.fixture(scope="module")
def searched(docs_engine: Any) -> list[tuple[Victim, str]]:
    """Victims with their answers by full computation."""
    return [(victim, honest(docs_engine, victim).text) for victim in victims()]


def test_a_strangers_text_changes_answers_and_an_innocent_one_does_not(
    served: Any, docs_engine: Any, searched: Any
) -> None:
    """The check below can fail."""
    pipeline = served(SemanticCacheConfig(costs=COSTS))
    changed = 0
    for victim, answer in searched:
        innocent = blended(pipeline, victim, victim.innocent)
        assert innocent.record.method == "blend"
        assert innocent.text == answer
        changed += attacked(docs_engine, pipeline, victim).text != answer
    assert changed


def test_behind_a_bound_on_foreign_context_no_answer_changes(served: Any, docs_engine: Any, searched: Any) -> None:
    pipeline = served(SemanticCacheConfig(costs=COSTS, foreign_context=8))
    for victim, answer in searched:
        assert attacked(docs_engine, pipeline, victim).text == answer


def test_text_that_the_prompt_holds_itself_still_serves(served: Any, searched: Any) -> None:
    """The same passages in another order: nothing of them is foreign."""
    pipeline = served(SemanticCacheConfig(costs=COSTS, foreign_context=0))
    for victim, _ in searched:
        turned = replace(victim, passage=f"{victim.passage} {victim.before}")
        assert blended(pipeline, turned, "").record.method == "blend"
