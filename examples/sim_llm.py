"""Tasks take the top layer's KV of similar earlier tasks, in a model made for it.

    python examples/sim_llm.py                        # hits and misses on the documents task
    python examples/sim_llm.py --demo similarity      # how alike changed documents are
    python examples/sim_llm.py --demo benchmark       # with and without reuse

An ordinary model is refused, with the reason. The options of Sim-LLM's demo work too
(`--demo_mode`, `--model_path`).
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from dejakv.errors import DejaKVError
from dejakv.prototypes.sim_llm import SimLLMInference
from dejakv.prototypes.sim_llm.inference import TaskAnswer
from dejakv_models import docs

THRESHOLDS = (0.95, 0.9, 0.8, 0.6)
ANSWER: dict[str, Any] = {"max_new_tokens": 4}


def _basic(inference: SimLLMInference, cases: int, facts: int, rng: random.Random) -> Iterator[str]:
    doc = docs.make_document(rng, facts)
    first = doc.facts[0]
    prompt = docs.prompt_of(doc.text, docs.ask(first, rng))
    yield _line("a new task", inference.generate(prompt, **ANSWER), first.value)
    yield _line("the same again", inference.generate(prompt, **ANSWER), first.value)
    for kind in ("paraphrase", "edit", "unrelated"):
        change = docs.change(kind, doc, rng, questions=cases)
        prompts = [docs.prompt_of(change.target.text, q.text) for q in change.questions]
        for question, answer in zip(
            change.questions, inference.batch_generate(prompts, **ANSWER), strict=True
        ):
            yield _line(kind, answer, question.answer)
    counted = inference.get_statistics()
    yield (
        f"{counted['hits']} hits of {counted['prompts']}; {counted['computed_tokens']} of "
        f"{counted['prompt_tokens']} prompt rows "
        f"computed; {counted['entries']} tasks in {counted['bytes'] / 1e6:.1f} MB"
    )


def _similarity(
    inference: SimLLMInference, cases: int, facts: int, rng: random.Random
) -> Iterator[str]:
    yield "similarity of a changed task to its donor, and the thresholds it passes"
    before = inference.manager.similarity_threshold
    for kind in docs.KINDS:
        scores: list[float] = []
        for _ in range(cases):
            doc = docs.make_document(rng, facts)
            change = docs.change(kind, doc, rng, questions=1)
            embed, tokenizer = inference.model.embed, inference.model.tokenizer
            texts = [
                docs.prompt_of(one.text, change.questions[0].text) for one in (doc, change.target)
            ]
            one, other = (embed(tokenizer(text)["input_ids"]) for text in texts)
            scores.append(float(one @ other))
        passed = ", ".join(f"{t:g}: {sum(s >= t for s in scores)}/{cases}" for t in THRESHOLDS)
        yield (
            f"{kind:>10}  mean {statistics.mean(scores):.3f}, {min(scores):.3f} to"
            f" {max(scores):.3f}  ({passed})"
        )
    inference.set_similarity_threshold(before)


def _benchmark(
    inference: SimLLMInference, cases: int, facts: int, rng: random.Random
) -> Iterator[str]:
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
        milliseconds = 1000 * statistics.median(seconds)
        yield f"{name:>14}: median {milliseconds:.0f} ms a task, {right[name]}/{cases} right"
    ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
    yield f"a hit on a changed document of {facts} facts is {ratio:.1f} times as fast"


def _line(what: str, answer: TaskAnswer, expected: str) -> str:
    result = answer.result
    how = f"from {result.donor} ({result.similarity:.3f})" if answer.reused else "computed"
    mark = "right" if answer == expected else f"wrong, not {expected}"
    return f"{what:>15}: {answer} ({mark}); {how}; {result.computed} of {result.prompt_tokens} rows"


DEMOS = {"basic": _basic, "similarity": _similarity, "benchmark": _benchmark}


def options() -> argparse.ArgumentParser:
    """The options; each may be written with hyphens or with underscores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(*names: str, **more: object) -> None:
        spelled = dict.fromkeys(
            spelling for name in names for spelling in (name, "--" + name[2:].replace("-", "_"))
        )
        parser.add_argument(*spelled, **more)  # type: ignore[arg-type]

    add("--demo", "--demo-mode", dest="demo", default="basic", choices=DEMOS)
    add(
        "--model",
        "--model-path",
        dest="model",
        default="docs-lckv",
        help="name from `dejakv models`, folder or hub id",
    )
    add(
        "--similarity-threshold",
        type=float,
        default=0.8,
        help="least cosine of a task that is reused, -1 to 1",
    )
    add("--max-cache-size", type=int, default=100, help="tasks that are kept")
    add("--num-hyperplanes", type=int, default=16, help="planes of the hash, 1 to 62")
    add(
        "--matching",
        default="map",
        help="tokens taken: map (equal text) or position (as in Sim-LLM)",
    )
    add("--tail", type=int, default=32, help="last prompt tokens that are always computed")
    add("--cases", type=int, default=4, help="documents, or questions about each")
    add("--facts", type=int, default=40, help="facts in a document, about 9 tokens each")
    add("--seed", type=int, default=0, help="seed of the documents")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs a demo. Raises: DejaKVError for a model that cannot do it, and for wrong options."""
    given = options().parse_args(arguments)
    inference = SimLLMInference.from_pretrained(
        given.model, given.max_cache_size, given.similarity_threshold, given.num_hyperplanes,
        given.device,
        matching=given.matching, tail=given.tail,
    )  # fmt: skip
    rng = random.Random(f"sim-llm-demo/{given.seed}")
    for line in DEMOS[given.demo](inference, given.cases, given.facts, rng):
        print(line)


if __name__ == "__main__":
    try:
        main()
    except DejaKVError as error:
        sys.exit(f"sim_llm: {error}")
