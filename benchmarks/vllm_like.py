"""What a prompt with one passage copied and one reworded takes to its first token: blended from copied text alone, and with the donor
that is only like it, for which the lookup asks an encoder.

    .venv-vllm/bin/python benchmarks/vllm_like.py --model smollm2-135m [--output vllm_like.json]

The prompts of `like_donors.py`, in one engine, by turns. `alone` is the connector that does not know what a row takes, and so waits
for nobody. `both` goes by what it saw of its own steps. `full`: nothing is reused. `light` keeps most words of the passage, `heavy`
says it in others. Seconds of a case are the medians of its runs, `cpu` of all threads of the process, `ttft` by the clock; a figure
is the median of the cases, with the least and the greatest.
"""

import random
import tempfile
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from reworded import PASSAGES
from vllm_bench import Server, arguments, parsed, publish
from vllm_models import folder_of

from dejakv.engines.vllm.pace import Pace
from dejakv.experiments.frontier.text_cases import ASK, INSTRUCTIONS, SUMMARIZE, passages_of_manuals, prompt

ARMS = ("full", "alone", "both")
ROUNDS = 3
BLEND = {"mode": "blend", "no_store": True}
FIGURES = ("ttft", "cpu", "rows", "donors")


def texts_of(number: int, kind: str) -> tuple[str, str, str]:
    """A prompt, one that holds its first passage word for word, and one that holds what its second passage is a rewording of."""
    rng = random.Random(f"like-donors/{kind}/{number}")
    passage = PASSAGES[number % len(PASSAGES)]
    copied, first, second = (each.text for each in rng.sample(passages_of_manuals(), 3))
    question, begins = (part.format(name=passage.title) for part in SUMMARIZE)
    asked, answer = (part.format(name="the module") for part in ASK)
    return (
        prompt(INSTRUCTIONS[0], [copied, getattr(passage, kind)], question, begins),
        prompt(INSTRUCTIONS[0], [first, copied], asked, answer),
        prompt(INSTRUCTIONS[0], [second, passage.text], question, begins),
    )


def measured(server: Server, lookups: Any, target: list[int], donors: Sequence[list[int]]) -> dict[str, dict[str, Any]]:
    """Medians of one case, by arm."""
    for donor in donors:
        server.run([donor], max_tokens=1, wish={"mode": "exact"})
    server.settle()
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    known = lookups.pace
    for turn in range(ROUNDS * len(ARMS)):
        arm = ARMS[(turn + turn // len(ARMS)) % len(ARMS)]
        lookups.pace = Pace() if arm == "alone" else known
        server.forget_prefixes()
        wish = {"mode": "off", "no_store": True} if arm == "full" else BLEND
        began = time.process_time()
        (one,) = server.run([target], max_tokens=1, wish=wish)
        told, cpu = one["told"], time.process_time() - began
        rows = told["tokens_recomputed"] / len(target) if told["approximate"] else 1.0
        found[arm].append({"ttft": one["ttft"], "cpu": cpu, "rows": rows, "donors": len(told["donors"])})
    lookups.pace = known
    return {arm: {name: median(one[name] for one in of) for name in FIGURES} for arm, of in found.items()}


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "least": min(values), "greatest": max(values)}


def main() -> None:
    parser = arguments(__doc__ or "")
    given = parsed(parser)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder_of(given.model))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = Server({"store_dir": f"{folder}/kv", "modes": ["off", "exact", "blend"], "index_encoder": "model"})
        core: Any = server.llm.llm_engine.engine_core
        lookups = core.engine_core.scheduler.connector.scheduler_side.lookups
        for kind in ("light", "heavy"):
            cases = []
            for number in range(len(PASSAGES)):
                texts = texts_of(number, kind)
                target, *donors = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
                cases.append(measured(server, lookups, target, donors))
            results[kind] = {
                arm: {name: summary([case[arm][name] for case in cases]) for name in FIGURES} for arm in ARMS
            }
            results[kind]["cpu of both, of alone's"] = summary(
                [case["both"]["cpu"] / case["alone"]["cpu"] for case in cases]
            )
        results["seconds of a row"] = lookups.pace.costs.row
        results["seconds of asking"] = lookups.cache.finder.likeness.seconds.value
    publish(given, results)


if __name__ == "__main__":
    main()
