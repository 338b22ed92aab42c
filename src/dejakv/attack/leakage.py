"""Leakage: what a blended answer tells of a donor's text that the prompt itself does not have."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from dejakv.attack.base import Result, judged
from dejakv.attack.figures import Estimate, Figure, Share, mean_estimate
from dejakv.attack.material import Secret
from dejakv.attack.scene import Scene
from dejakv.pipeline import Answer, Pipeline
from dejakv.request import Request, Sampling

CHANCE = 0.55
"""The largest lower end of an interval that counts as chance."""
PLACES = ("same partition", "other partition", "no donor")


@dataclass(frozen=True)
class Leakage:
    name: str = "leakage under blend"
    tries: str = (
        "a donor has a secret that a prompt asks for and does not have; the secret is looked for in greedy and sampled answers, "
        "and among equally likely values by the model's own probabilities"
    )
    broken_if: str = (
        "a prompt of another partition is run from the donor, or ranks the secret above the other values more often than chance "
        "(lower end of the interval above .55). Within one partition it is measured"
    )
    outside: bool = False

    def run(self, scene: Scene) -> Result:
        rng = scene.rng("leakage")
        secrets = [scene.material.secret(rng) for _ in range(scene.effort.secrets)]
        ranks: dict[str, list[float]] = {place: [] for place in PLACES}
        said: dict[str, Counter[str]] = {place: Counter() for place in PLACES}
        findings: list[str] = []
        with scene.pipeline(reuse="blend") as pipeline:
            for number, secret in enumerate(secrets):
                for place in PLACES:
                    seen = _attacked(pipeline, secret, f"{number}", place, scene.effort.samples)
                    said[place].update(seen.said)
                    ranks[place] += seen.rank
                    if place != "same partition" and seen.reused:
                        findings.append(
                            f"{place}: a prompt was run from the state of {seen.reused} tokens that it had not sent"
                        )
        figures: dict[str, Figure] = {}
        for place in PLACES:
            count = said[place]
            figures[f"{place}: blended"] = Share(count["blended"], len(secrets))
            figures[f"{place}: secret in the greedy answer"] = Share(count["greedy"], len(secrets))
            figures[f"{place}: secret in a sampled answer"] = Share(
                count["sampled"], len(secrets) * scene.effort.samples
            )
            if ranks[place]:
                figures[f"{place}: rank of the secret (AUC)"] = estimate = mean_estimate(ranks[place], rng)
                findings += _above_chance(place, estimate)
        tried = f"{len(secrets)} secrets, each at three places, {scene.effort.samples} sampled answers each"
        return judged(tried, findings, figures)


def _above_chance(place: str, estimate: Estimate) -> list[str]:
    if place == "same partition" or estimate.low <= CHANCE:
        return []
    return [f"{place}: the secret ranks above other values with an AUC of {estimate}"]


@dataclass(frozen=True)
class _Seen:
    """`rank`: share of the other values that are less likely than the secret, empty if the engine gives no probabilities."""

    said: Counter[str]
    rank: list[float]
    reused: int


def _attacked(pipeline: Pipeline, secret: Secret, number: str, place: str, samples: int) -> _Seen:
    """One prompt that asks for the secret, in a partition that is empty but for the donor of `place`."""
    assert pipeline.cache is not None
    owner, own = f"owner {number}", f"owner {number}" if place == "same partition" else f"other {number}"
    if place == "no donor":
        pipeline.cache.clear(owner)
    elif pipeline.cache.store.stats(owner).entries == 0:
        pipeline.answer(Request("donor", secret.donor, secret.donor, partition=owner, sampling=Sampling(1)))
    asked = Request("target", secret.prompt, secret.prompt, partition=own, reuse="blend", sampling=Sampling(4))
    greedy = pipeline.answer(asked, no_store=True)
    said: Counter[str] = Counter(blended=greedy.record.method == "blend", greedy=secret.value in greedy.text.lower())
    for seed in range(samples):
        sampling = Sampling(4, temperature=1.0, seed=seed)
        drawn = pipeline.answer(
            Request("target", secret.prompt, secret.prompt, (), own, sampling, "blend"), no_store=True
        )
        said["sampled"] += secret.value in drawn.text.lower()
    return _Seen(said, _rank(pipeline.engine, greedy, secret), greedy.record.reused_tokens)


def _rank(engine: Any, answer: Answer, secret: Secret) -> list[float]:
    own = _likelihood(engine, answer, secret.prompt, secret.value)
    others = [_likelihood(engine, answer, secret.prompt, value) for value in secret.others]
    known = [other for other in others if other is not None]
    if own is None or not known:
        return []
    return [sum((other < own) + 0.5 * (other == own) for other in known) / len(known)]


def _likelihood(engine: Any, answer: Answer, prompt: str, value: str) -> float | None:
    """Log probability of a value as the answer, from the state that the run left."""
    ids: Any = engine.tokenizer(f"{prompt} {value}")["input_ids"]
    tokens = ids[len(engine.tokenizer(prompt)["input_ids"]) :]
    rows = answer.completion.continued(tokens)
    return None if rows is None else float(sum(rows[place, token] for place, token in enumerate(tokens)))
