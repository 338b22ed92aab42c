"""Top-layer reuse between similar tasks: docs-lckv against its Llama twin, in one run.

    python -m research.sim_llm --twin runs/docs-llama/model --out sim_llm.json

Parts: `memory` (bytes of KV a token), `tasks` (answers to paraphrased, edited and unrelated tasks, each a forced hit: by the token map and
by position, as in Sim-LLM), `speed` (seconds to the first token on misses and hits). Documents and questions are those of the documents
task, with seeds that training did not use. Times are processor seconds of one thread, which other load on the machine leaves alone.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dejakv.experiments.summary import wilson
from dejakv.models import load
from dejakv.sim_llm import SimLLMInference
from dejakv_models import docs
from research.machine import measured

KINDS = ("paraphrase", "edit", "unrelated")
MATCHINGS = ("map", "position")
Arms = dict[str, SimLLMInference]


class Twin:
    """The ordinary model, which answers as it is."""

    def __init__(self, name: str) -> None:
        self.model, self.tokenizer = load(name)
        self.tokenizer.padding_side = "left"

    def answers(self, prompts: list[str], max_new_tokens: int) -> list[str]:
        given = self.tokenizer(prompts, return_tensors="pt", padding=len(prompts) > 1)
        made = self.model.generate(
            given["input_ids"], attention_mask=given["attention_mask"], do_sample=False, max_new_tokens=max_new_tokens
        )
        texts = self.tokenizer.batch_decode(made[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
        return [text.strip() for text in texts]


def memory(o: argparse.Namespace, arms: Arms, twin: Twin) -> Any:
    """Bytes of KV a token, from caches as `generate` leaves them."""
    found: list[float] = []
    for model in (arms["map"].model.model, twin.model):
        out = model.generate(torch.arange(10, 110)[None], max_new_tokens=1, return_dict_in_generate=True)
        layers = [layer for layer in out.past_key_values.layers if layer.is_initialized]
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        found.append(held / layers[0].keys.shape[-2])
    return {"lckv": found[0], "twin": found[1], "saved": 1 - found[0] / found[1]}


def tasks(o: argparse.Namespace, arms: Arms, twin: Twin) -> Any:
    """By kind of change: right answers in full and under forced reuse, answers of before the change, share of rows computed."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        rng = random.Random(f"sim-llm/{kind}")
        cases: list[dict[str, Any]] = []
        for _ in range(o.documents):
            change = docs.change(kind, docs.make_document(rng, o.facts), rng, questions=o.questions)
            cases += _answered(change, arms, twin)
        right = {name: _share([case[name] for case in cases]) for name in ("twin", "full", *MATCHINGS)}
        stale = {name: sum(case[f"stale {name}"] for case in cases) for name in MATCHINGS}
        must = sum(case["must_change"] for case in cases)
        rows = statistics.mean(case["rows"] for case in cases)
        found[kind] = {"right": right, "stale": stale, "must_change": must, "rows_computed_map": rows}
    return found


def _answered(change: docs.Change, arms: Arms, twin: Twin) -> list[dict[str, Any]]:
    """A case for each question about the changed document."""
    rng = random.Random(change.donor.text)
    donor = docs.prompt_of(change.donor.text, docs.ask(rng.choice(change.donor.facts), rng))
    prompts = [docs.prompt_of(change.target.text, question.text) for question in change.questions]
    said: dict[str, list[Any]] = {"twin": twin.answers(prompts, 3)}
    said["full"] = arms["map"].batch_generate(prompts, enable_kv_reuse=False, max_new_tokens=3)
    for name, arm in arms.items():
        arm.reset_cache()
        arm.generate(donor, max_new_tokens=3)
        said[name] = arm.batch_generate(prompts, max_new_tokens=3)
    cases: list[dict[str, Any]] = []
    for i, question in enumerate(change.questions):
        must, result = question.must_change, said["map"][i].result
        case = {name: answers[i] == question.answer for name, answers in said.items()}
        case |= {f"stale {name}": must and said[name][i] == question.old_answer for name in MATCHINGS}
        cases.append({**case, "must_change": must, "rows": result.computed / result.prompt_tokens})
    return cases


def _share(right: list[bool]) -> dict[str, Any]:
    low, high = wilson(sum(right), len(right))
    return {"right": sum(right), "of": len(right), "low": low, "high": high}


def speed(o: argparse.Namespace, arms: Arms, twin: Twin) -> Any:
    """Quartiles of the seconds to the first token on one edited document, over rounds in which every arm takes its turn."""
    rng = random.Random("sim-llm/speed")
    rounds: list[dict[str, float]] = []
    for _ in range(o.rounds):
        doc = docs.make_document(rng, 2 * o.facts)
        changed = docs.edit(doc, rng, facts=2, questions=1)
        prompt = docs.prompt_of(changed.target.text, changed.questions[0].text)
        donor = docs.prompt_of(doc.text, docs.ask(doc.facts[0], rng))
        for arm in arms.values():
            arm.reset_cache()
            arm.generate(donor, max_new_tokens=1)
        runs: dict[str, Callable[[], Any]] = {
            "twin": lambda prompt=prompt: twin.answers([prompt], 1),
            "miss": lambda prompt=prompt: arms["map"].generate(prompt, enable_kv_reuse=False, max_new_tokens=1),
            "hit, map": lambda prompt=prompt: arms["map"].generate(prompt, max_new_tokens=1),
            "hit, position": lambda prompt=prompt: arms["position"].generate(prompt, max_new_tokens=1),
            "hit, identical": lambda donor=donor: arms["map"].generate(donor, max_new_tokens=1),
        }
        rounds.append({name: _seconds(run) for name, run in runs.items()})
    return {
        "quartiles_s": {name: statistics.quantiles([one[name] for one in rounds], n=4) for name in rounds[0]},
        "of_twin": {name: statistics.quantiles([one[name] / one["twin"] for one in rounds], n=4) for name in rounds[0]},
    }


def _seconds(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


PARTS = {"memory": memory, "tasks": tasks, "speed": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="docs-lckv")
    parser.add_argument("--twin", required=True, help="folder of the Llama twin (`make train-lckv` trains it)")
    parser.add_argument("--documents", type=int, default=20, help="documents of each kind")
    parser.add_argument("--questions", type=int, default=4, help="questions a document")
    parser.add_argument("--facts", type=int, default=24, help="facts a document; `speed` has twice as many")
    parser.add_argument("--tail", type=int, default=32, help="tokens at a prompt's end that are always computed")
    parser.add_argument("--rounds", type=int, default=15, help="of `speed`, at least 2")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    o = parser.parse_args()
    arms = {
        name: SimLLMInference.from_pretrained(
            o.model, similarity_threshold=-1.0, device="cpu", matching=name, tail=o.tail
        )
        for name in MATCHINGS
    }
    twin = Twin(o.twin)
    found = {**measured("research.sim_llm"), **{name: part(o, arms, twin) for name, part in PARTS.items()}}
    text = json.dumps(found, indent=1)
    print(text)
    if o.out:
        o.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
