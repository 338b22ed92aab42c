"""Leakage: what a prompt of one partition can tell of a donor in another one, by its answers, scores and states."""

import random
from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np
import pytest
from tests.attacks.conftest import CONFIG, Secret, asked, near_duplicate, secret

from dejakv import FusionState, Pipeline, Sampling

OWNER, PROBER = "owner", "prober"
SECRETS = 8
WEAK = replace(CONFIG, lexical_guard=False)


class Projector:
    """A fusion provider: makes a state of every miss."""

    def capture(self, *, llm: Any, request_id: str, chunk_id: str) -> FusionState:
        return FusionState(chunk_id, {"fusion_output": np.ones((2, 4), np.float32)})

    def inject(self, *, llm: Any, request_id: str, state: FusionState) -> bool:
        return True


def rank(engine: Any, answer: Any, hidden: Secret) -> float:
    """Share of the other values that the state of the answer holds for less likely than the secret; 0.5 is a coin."""

    def likelihood(value: str) -> float:
        ids = engine.tokenizer(f"{hidden.prompt} {value}")["input_ids"]
        tokens = ids[len(engine.tokenizer(hidden.prompt)["input_ids"]) :]
        rows = answer.completion.continued(tokens)
        return sum(float(rows[place, token]) for place, token in enumerate(tokens))

    own, others = likelihood(hidden.value), [likelihood(value) for value in hidden.others]
    return sum((other < own) + 0.5 * (other == own) for other in others) / len(others)


def asked_for(pipeline: Pipeline, hidden: Secret, number: int, prober: str, mode: str) -> Any:
    """The answer to a prompt without the secret, after the owner has stored the donor with it."""
    owner = f"{OWNER} {number}"
    pipeline.answer(asked(hidden.donor, owner))
    return pipeline.answer(asked(hidden.prompt, owner if prober == OWNER else PROBER, mode, no_store=True))


@pytest.mark.parametrize("mode", ["adopt", "blend"])
def test_a_secret_of_another_partition_leaves_no_trace(served: Any, docs_engine: Any, mode: str) -> None:
    """Reused tokens, the answers, and the order of all probabilities are those of a model without a cache."""
    rng, pipeline = random.Random("leakage"), served(WEAK)
    for number in range(SECRETS):
        hidden = secret(rng)
        answer = asked_for(pipeline, hidden, number, PROBER, mode)
        plain = Pipeline(docs_engine).answer(asked(hidden.prompt, PROBER))
        assert (answer.record.method, answer.record.reused_tokens, answer.record.score) == ("none", 0, None)
        assert answer.token_ids == plain.token_ids
        assert rank(docs_engine, answer, hidden) == rank(docs_engine, plain, hidden)
        drawn = asked(hidden.prompt, PROBER, mode, no_store=True)
        drawn = replace(drawn, sampling=Sampling(4, temperature=1.0, seed=number))
        assert pipeline.answer(drawn).token_ids == Pipeline(docs_engine).answer(drawn).token_ids


def test_a_secret_of_ones_own_partition_is_seen(served: Any, docs_engine: Any) -> None:
    """The check above can fail: adopting the owner's prompt tells its secret, and a blend runs from its state."""
    rng, pipeline = random.Random("leakage"), served(WEAK)
    hidden = [secret(rng) for _ in range(SECRETS)]
    adopted = [asked_for(pipeline, one, number, OWNER, "adopt") for number, one in enumerate(hidden)]
    blended = [asked_for(pipeline, one, number, OWNER, "blend") for number, one in enumerate(hidden)]
    assert {answer.record.method for answer in adopted} == {"adopt"}
    assert mean(rank(docs_engine, answer, one) for answer, one in zip(adopted, hidden, strict=True)) > 0.9
    assert any(answer.record.method == "blend" and answer.record.reused_tokens for answer in blended)


@pytest.mark.parametrize("prober", [PROBER, OWNER])
def test_figures_and_statuses_tell_a_partition_its_own_alone(served: Any, prober: str) -> None:
    """Every level's status, the figures and the fusion states, for prompts that the owner has stored and near duplicates."""
    pipeline = served(replace(WEAK, fusion_provider=f"{__name__}:Projector"))
    rng, seen = random.Random("figures"), list[bool]()
    for mode in ("exact", "adopt", "blend"):
        pair = near_duplicate(rng)
        before = pipeline.cache.stats(prober), pipeline.cache.store.stats(prober)
        pipeline.answer(asked(pair.prompt, OWNER))
        pipeline.answer(asked(pair.prompt, OWNER))
        seen.append(before != (pipeline.cache.stats(prober), pipeline.cache.store.stats(prober)))
        for prompt in (pair.prompt, pair.duplicate):
            record = pipeline.answer(asked(prompt, prober, mode, no_store=True)).record
            seen.append("hit" in record.statuses.values() or bool(record.reused_tokens) or record.score is not None)
    if prober == OWNER:
        assert sum(seen) > len(seen) // 2
    else:
        assert not any(seen)
