"""What `dejakv sim-llm` shows: hits and misses, similarity against the threshold, and time with and without reuse."""

import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from dejakv.datasets import docs
from dejakv.errors import ConfigError
from dejakv.sim_llm.inference import SimLLMInference, TaskAnswer

DEMOS = ("basic", "similarity", "benchmark")
THRESHOLDS = (0.95, 0.9, 0.8, 0.6)
ANSWER: dict[str, Any] = {"max_new_tokens": 4}


def demo(name: str, inference: SimLLMInference, cases: int = 4, facts: int = 40, seed: int = 0) -> Iterator[str]:
    """Lines to print. Raises: ConfigError for an unknown name, or numbers below 1."""
    if name not in DEMOS:
        raise ConfigError(f"demo {name!r} is unknown: choose one of {', '.join(DEMOS)}")
    if min(cases, facts) < 1:
        raise ConfigError(f"cases={cases} and facts={facts}: give at least 1 of each")
    made = {"basic": _basic, "similarity": _similarity, "benchmark": _benchmark}[name]
    return made(inference, cases, facts, random.Random(f"sim-llm-demo/{seed}"))


def _basic(inference: SimLLMInference, cases: int, facts: int, rng: random.Random) -> Iterator[str]:
    doc = docs.make_document(rng, facts)
    first = doc.facts[0]
    prompt = docs.prompt_of(doc.text, docs.ask(first, rng))
    yield _line("a new task", inference.generate(prompt, **ANSWER), first.value)
    yield _line("the same again", inference.generate(prompt, **ANSWER), first.value)
    for kind in ("paraphrase", "edit", "unrelated"):
        change = docs.change(kind, doc, rng, questions=cases)
        prompts = [docs.prompt_of(change.target.text, q.text) for q in change.questions]
        for question, answer in zip(change.questions, inference.batch_generate(prompts, **ANSWER), strict=True):
            yield _line(kind, answer, question.answer)
    counted = inference.get_statistics()
    yield (
        f"{counted['hits']} hits of {counted['prompts']}; {counted['computed_tokens']} of {counted['prompt_tokens']} prompt rows "
        f"computed; {counted['entries']} tasks in {counted['bytes'] / 1e6:.1f} MB"
    )


def _similarity(inference: SimLLMInference, cases: int, facts: int, rng: random.Random) -> Iterator[str]:
    yield "similarity of a changed task to its donor, and the thresholds it passes"
    before = inference.manager.similarity_threshold
    for kind in docs.KINDS:
        scores: list[float] = []
        for _ in range(cases):
            doc = docs.make_document(rng, facts)
            change = docs.change(kind, doc, rng, questions=1)
            embed, tokenizer = inference.model.similarity.embed, inference.model.tokenizer
            texts = [docs.prompt_of(one.text, change.questions[0].text) for one in (doc, change.target)]
            one, other = (embed(tokenizer(text)["input_ids"], text) for text in texts)
            scores.append(float(one @ other))
        passed = ", ".join(f"{t:g}: {sum(s >= t for s in scores)}/{cases}" for t in THRESHOLDS)
        yield f"{kind:>10}  mean {statistics.mean(scores):.3f}, {min(scores):.3f} to {max(scores):.3f}  ({passed})"
    inference.set_similarity_threshold(before)


def _benchmark(inference: SimLLMInference, cases: int, facts: int, rng: random.Random) -> Iterator[str]:
    times: dict[str, list[float]] = {"without reuse": [], "hit": []}
    right = dict.fromkeys(times, 0)
    for _ in range(cases):
        doc = docs.make_document(rng, facts)
        change = docs.edit(doc, rng, facts=1, questions=1)
        question = change.questions[0]
        inference.reset_cache()
        inference.generate(docs.prompt_of(doc.text, question.text), **ANSWER)
        prompt = docs.prompt_of(change.target.text, question.text)
        for name, reuse in (("without reuse", False), ("hit", True)):
            began = time.perf_counter()
            answer = inference.generate(prompt, enable_kv_reuse=reuse, **ANSWER)
            times[name].append(time.perf_counter() - began)
            right[name] += answer == question.answer
    for name, seconds in times.items():
        yield f"{name:>14}: median {1000 * statistics.median(seconds):.0f} ms a task, {right[name]}/{cases} right"
    ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
    yield f"a hit on an edited document of {facts} facts is {ratio:.1f} times as fast, answer included"


def _line(what: str, answer: TaskAnswer, expected: str) -> str:
    result = answer.result
    how = f"from {result.donor} ({result.similarity:.3f})" if answer.reused else "computed"
    mark = "right" if answer == expected else f"wrong, not {expected}"
    return f"{what:>15}: {answer} ({mark}); {how}; {result.computed} of {result.prompt_tokens} rows"
