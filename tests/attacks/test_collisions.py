"""Collisions: a stored text of other content that the index encoder, or a guard, takes for a victim's prompt."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from tests.attacks.conftest import CONFIG, any_prompt, asked, changed, collision

from dejakv import Pipeline

VICTIMS = 2
THRESHOLD = CONFIG.similarity_threshold


def used(pipeline: Any, victim: str, texts: Iterable[str]) -> tuple[set[str], Counter[str]]:
    """Stores each text in the victim's own partition and asks for the victim: modes that used a text, guards that refused."""
    modes, guards = set[str](), Counter[str]()
    for text in texts:
        pipeline.cache.clear("victim")
        pipeline.answer(asked(text, "victim"))
        for mode in ("exact", "adopt"):
            record = pipeline.answer(asked(victim, "victim", mode, no_store=True)).record
            if record.method in ("exact", "adopt", "blend"):
                modes.add(mode)
            elif mode == "adopt":
                guards[record.reason.partition(":")[0]] += 1
    return modes, guards


@pytest.fixture(scope="module")
def collisions(docs_engine: Any) -> list[tuple[str, str]]:
    """Victims, and texts about something else whose cosine is over the threshold."""
    rng, found = random.Random("collisions"), list[tuple[str, str]]()

    def encode(texts: Any) -> list[Any]:
        return [docs_engine.embed_text(text) for text in texts]

    for _ in range(VICTIMS):
        victim = any_prompt(rng)
        text, cosine = collision(encode, victim, any_prompt(rng, facts=2), THRESHOLD, rng)
        assert cosine >= THRESHOLD
        found.append((victim, text))
    return found


def test_a_text_with_the_same_vector_is_not_used(served: Any, collisions: list[tuple[str, str]]) -> None:
    for victim, text in collisions:
        modes, guards = used(served(CONFIG), victim, [text])
        assert not modes
        assert guards == {"lexical": 1}


def test_without_the_guard_of_words_it_is_adopted_and_never_exact(served: Any, collisions: Any) -> None:
    """The check above can fail."""
    for victim, text in collisions:
        assert used(served(replace(CONFIG, lexical_guard=False)), victim, [text])[0] == {"adopt"}


def test_changes_of_one_word_are_not_used(served: Any) -> None:
    rng = random.Random("changes")
    pipeline: Pipeline = served(CONFIG)
    for _ in range(VICTIMS):
        victim = any_prompt(rng)
        modes, guards = used(pipeline, victim, changed(victim, 30, rng))
        assert not modes
        assert guards["lexical"] > 10


def test_without_the_guard_of_words_a_changed_word_is_adopted(served: Any) -> None:
    rng = random.Random("changes")
    victim = any_prompt(rng)
    assert used(served(replace(CONFIG, lexical_guard=False)), victim, changed(victim, 8, rng))[0] == {"adopt"}
