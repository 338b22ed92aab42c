"""Top-layer reuse between similar tasks: docs-lckv against its Llama twin, in one run.

    python -m research.sim_llm --twin runs/docs-llama/model --out docs/results/sim_llm.json

Parts, each into the file as it ends: `iterations` (how a prefill settles), `memory` (bytes a token), `tasks` (paraphrased,
edited, unrelated tasks against the threshold), `speed` (first token on misses and hits, throughput at equal memory).
Documents and questions are those of the documents task, with seeds that training did not use. Times are processor seconds of one thread, which other load on the machine leaves alone.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from dejakv.experiments.summary import wilson
from dejakv.models import load
from dejakv.models.lckv.cache import LCKVCache
from dejakv.models.lckv.modeling import sequential_prefill
from dejakv.sim_llm import SimLLMInference
from dejakv.sim_llm.model import LlamaForCausalLMWithKVReuse
from dejakv_models import docs
from dejakv_models.docs import Change
from research.machine import machine

KINDS = ("paraphrase", "edit", "unrelated")
THRESHOLDS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
ANSWER = {"max_new_tokens": 3}


class Twin:
    """The ordinary model, which answers as it is."""

    def __init__(self, name: str) -> None:
        self.model, self.tokenizer = load(name)
        self.tokenizer.padding_side = "left"

    def answers(self, prompts: list[str], **options: Any) -> list[str]:
        given = self.tokenizer(prompts, return_tensors="pt", padding=len(prompts) > 1)
        ids, mask = given["input_ids"], given["attention_mask"]
        made = self.model.generate(ids, attention_mask=mask, do_sample=False, **options)[:, ids.shape[1] :]
        return [text.strip() for text in self.tokenizer.batch_decode(made, skip_special_tokens=True)]


def changes(kind: str, documents: int, facts: int, questions: int) -> list[Change]:
    rng = random.Random(f"sim-llm/{kind}")
    return [docs.change(kind, docs.make_document(rng, facts), rng, questions=questions) for _ in range(documents)]


def share(right: list[bool]) -> dict[str, Any]:
    low, high = wilson(sum(right), len(right))
    rate = sum(right) / len(right) if right else None
    return {"right": sum(right), "of": len(right), "share": rate, "low": low, "high": high}


def iterations(o: argparse.Namespace) -> Any:
    """Largest difference of logits from token-by-token decoding, and equal next tokens, by the number of iterations."""
    model, tokenizer = load(o.model)
    rng = random.Random("sim-llm/iterations")
    rows = []
    prompts = [docs.make_document(rng, 48) for _ in range(3)]
    texts = [docs.prompt_of(doc.text, docs.ask(doc.facts[0], rng)) for doc in prompts]
    encoded = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    exact = [sequential_prefill(model, ids)[0] for ids in encoded]
    for count in (1, 2, 3, 4, 5, 7, 9, 12, 16):
        model.config.forward_passes, model.config.backward_passes = count - 1, 1
        with torch.no_grad():
            made = [model(ids).logits for ids in encoded]
        far = max((a - b).abs().max().item() for a, b in zip(made, exact, strict=True))
        last = max((a - b)[0, -1].abs().max().item() for a, b in zip(made, exact, strict=True))
        same = statistics.mean(
            (a.argmax(-1) == b.argmax(-1)).float().mean().item() for a, b in zip(made, exact, strict=True)
        )
        rows.append({"iterations": count, "largest": far, "last_token": last, "same_next_token": same})
    spread = float(exact[0].std())
    return {"tokens": [ids.shape[1] for ids in encoded], "logit_std": spread, "rows": rows}


def memory(o: argparse.Namespace) -> Any:
    """Bytes of KV a token, from caches as `generate` leaves them, and of what a task keeps."""
    ids = torch.arange(10, 110)[None]
    found = {}
    for name in (o.model, o.twin):
        model, _ = load(name)
        out = model.generate(ids, max_new_tokens=1, return_dict_in_generate=True)
        layers = [layer for layer in out.past_key_values.layers if layer.is_initialized]
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        found[name] = {"bytes_a_token": held / layers[0].keys.shape[-2], "layers": len(layers)}
    one, other = (found[name]["bytes_a_token"] for name in (o.model, o.twin))
    return {"lckv": found[o.model], "twin": found[o.twin], "saved": 1 - one / other}


def tasks(o: argparse.Namespace) -> Any:
    """Every case is answered in full and under forced reuse; thresholds are applied to the scores afterwards.

    Cases are kept beside the results as they are made, so that a stopped run goes on, and one process can take each kind.
    """
    kept = o.out.with_suffix(".cases.jsonl")
    cases = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(case["kind"], case["document"]) for case in cases}
    arms = {m: served(o.model, matching=m, tail=o.tail) for m in ("map", "position")}
    scorer = LlamaForCausalLMWithKVReuse(arms["map"].model.model, arms["map"].model.tokenizer, similarity="position")
    twin = Twin(o.twin)
    for kind in o.kinds:
        for number, change in enumerate(changes(kind, o.documents, o.facts, o.questions)):
            if (kind, number) in done:
                continue
            made = [{"kind": kind, "document": number, **case} for case in answered(change, arms, scorer, twin)]
            with kept.open("a") as file:
                file.writelines(json.dumps(case) + "\n" for case in made)
            cases += made
    by_kind = {kind: [case for case in cases if case["kind"] == kind] for kind in KINDS}
    return {"facts": o.facts, "tail": o.tail, "kinds": {kind: summary(some) for kind, some in by_kind.items() if some}}


def answered(
    change: Change, arms: dict[str, SimLLMInference], scorer: LlamaForCausalLMWithKVReuse, twin: Twin
) -> list[dict[str, Any]]:
    """A case for each question about the changed document."""
    rng = random.Random(change.donor.text)
    donor = docs.prompt_of(change.donor.text, docs.ask(rng.choice(change.donor.facts), rng))
    prompts = [docs.prompt_of(change.target.text, q.text) for q in change.questions]
    full = arms["map"].batch_generate(prompts, enable_kv_reuse=False, **ANSWER)
    llama = twin.answers(prompts, **ANSWER)
    said: dict[str, Any] = {}
    for name, arm in arms.items():
        arm.reset_cache()
        arm.generate(donor, **ANSWER)
        said[name] = arm.batch_generate(prompts, **ANSWER)
    encode = arms["map"].model.tokenizer
    rows = []
    for i, question in enumerate(change.questions):
        result = said["map"][i].result
        place = scorer.similarity.score(encode(prompts[i])["input_ids"], encode(donor)["input_ids"], result.similarity)
        row = {"must_change": question.must_change, "mean": result.similarity, "position": place}
        row |= {"tokens": result.prompt_tokens, "rows": result.computed}
        row |= {"full": full[i] == question.answer, "twin": llama[i] == question.answer}
        row |= {f"by_{name}": answers[i] == question.answer for name, answers in said.items()}
        row |= {
            f"stale_{name}": question.must_change and answers[i] == question.old_answer
            for name, answers in said.items()
        }
        rows.append(row)
    return rows


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "tokens": statistics.mean(c["tokens"] for c in cases),
        "rows_computed_map": statistics.mean(c["rows"] / c["tokens"] for c in cases),
        "twin_full": share([c["twin"] for c in cases]),
        "lckv_full": share([c["full"] for c in cases]),
        "forced": {m: share([c[f"by_{m}"] for c in cases]) for m in ("map", "position")},
        "lost_to_full": {m: sum(c["full"] and not c[f"by_{m}"] for c in cases) for m in ("map", "position")},
        "gained_over_full": {m: sum(c[f"by_{m}"] and not c["full"] for c in cases) for m in ("map", "position")},
        "stale": {m: share([c[f"stale_{m}"] for c in cases if c["must_change"]]) for m in ("map", "position")},
    }
    for score in ("mean", "position"):
        made[f"score_{score}"] = statistics.quantiles([c[score] for c in cases], n=20)
        made[f"threshold_{score}"] = [
            {
                "threshold": t,
                "hit_rate": share([c[score] >= t for c in cases]),
                **{
                    m: share([c[f"by_{m}"] if c[score] >= t else c["full"] for c in cases]) for m in ("map", "position")
                },
            }
            for t in THRESHOLDS
        ]
    return made


def served(name: str, **settings: Any) -> SimLLMInference:
    return SimLLMInference.from_pretrained(name, similarity_threshold=-1.0, device="cpu", **settings)


def timed(run: Any) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def speed(o: argparse.Namespace) -> Any:
    """Medians and quartiles over rounds in which every arm takes its turn."""
    first: dict[str, Any] = {}
    for facts in o.speed_facts:
        rng = random.Random(f"sim-llm/speed/{facts}")
        arms = {m: served(o.model, matching=m, tail=o.tail) for m in ("map", "position")}
        twin = Twin(o.twin)
        rounds = [one_round(rng, facts, arms, twin) for _ in range(o.rounds)]
        names = [name for name in rounds[0] if name != "tokens"]
        first[str(round(statistics.mean(r["tokens"] for r in rounds)))] = {
            "quartiles_s": {name: statistics.quantiles([r[name] for r in rounds], n=4) for name in names},
            "of_twin": {name: statistics.quantiles([r[name] / r["twin"] for r in rounds], n=4) for name in names},
        }
    return {"first_token": first, "throughput": throughput(o)}


def one_round(rng: random.Random, facts: int, arms: dict[str, SimLLMInference], twin: Twin) -> dict[str, float]:
    """Seconds to the first token of every arm on one edited document."""
    one = {"max_new_tokens": 1}
    doc = docs.make_document(rng, facts)
    changed = docs.edit(doc, rng, facts=2, questions=1)
    prompt = docs.prompt_of(changed.target.text, changed.questions[0].text)
    donor = docs.prompt_of(doc.text, docs.ask(doc.facts[0], rng))
    for arm in arms.values():
        arm.reset_cache()
        arm.generate(donor, **one)
    return {
        "tokens": float(len(twin.tokenizer(prompt)["input_ids"])),
        "twin": timed(lambda: twin.answers([prompt], **one)),
        "lckv miss": timed(lambda: arms["map"].generate(prompt, enable_kv_reuse=False, **one)),
        "lckv hit, map": timed(lambda: arms["map"].generate(prompt, **one)),
        "lckv hit, position": timed(lambda: arms["position"].generate(prompt, **one)),
        "lckv hit, identical": timed(lambda: arms["map"].generate(donor, **one)),
    }


def held(model: Any, batch: int, tokens: int = 500) -> Cache:
    """A cache as after a prompt of `tokens` tokens, with random content: decoding takes the same time."""
    layout = getattr(model.model, "layout", None)
    cache = LCKVCache(layout) if layout is not None else DynamicCache()
    config = model.config
    shape = (batch, config.num_key_value_heads, tokens, config.head_dim)
    for layer in layout.kv_layers if layout is not None else range(config.num_hidden_layers):
        cache.update(torch.randn(shape), torch.randn(shape), layer)
    return cache


@torch.no_grad()
def throughput(o: argparse.Namespace) -> Any:
    """New tokens a second of decoding at a context of about 500, each model with as many sequences as the memory holds."""
    made = []
    models = {"twin": load(o.twin)[0], "lckv": load(o.model)[0]}
    for budget in (6, 24):
        batch = {"twin": budget, "lckv": budget * 5 // 3}
        rates: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(max(5, o.rounds // 2)):
            for name, model in models.items():
                cache, token = held(model, batch[name]), torch.randint(10, 400, (batch[name], 1))
                began = time.process_time()
                for step in range(16):
                    place = torch.full_like(token, 500 + step)
                    token = model(token, past_key_values=cache, position_ids=place, use_cache=True).logits.argmax(-1)
                rates[name].append(16 * batch[name] / (time.process_time() - began))
        gain = [b / a - 1 for a, b in zip(rates["twin"], rates["lckv"], strict=True)]
        made.append(
            {
                "sequences": batch,
                "tokens_a_second": {name: statistics.quantiles(values, n=4) for name, values in rates.items()},
                "gain": statistics.quantiles(gain, n=4),
            }
        )
    return made


PARTS = {"iterations": iterations, "memory": memory, "tasks": tasks, "speed": speed}
WITHOUT_TWIN = ("iterations",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="docs-lckv")
    parser.add_argument("--twin", help="folder of the Llama twin (`make train-lckv` trains it)")
    parser.add_argument("--documents", type=int, default=80, help="documents of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--questions", type=int, default=4, help="questions a document")
    parser.add_argument("--facts", type=int, default=24, help="facts a document")
    parser.add_argument("--tail", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--speed-facts", type=int, nargs="+", default=[48, 110], help="facts a document in `speed`")
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("docs/results/sim_llm.json"))
    o = parser.parse_args()
    if o.twin is None and (needing := [part for part in o.parts if part not in WITHOUT_TWIN]):
        parser.error(f"{', '.join(needing)} compare with the twin: give --twin, or --parts {' '.join(WITHOUT_TWIN)}")
    made = json.loads(o.out.read_text()) if o.out.exists() else {}
    for part in o.parts:
        options = {k: v for k, v in vars(o).items() if k not in ("out", "parts", "model", "twin")}
        made[part] = {**PARTS[part](o), "machine": machine(), "options": options}
        o.out.write_text(
            json.dumps(made, indent=1).replace(o.twin or "twin", "twin").replace(str(o.model), "docs-lckv") + "\n"
        )
        print(part, json.dumps(made[part])[:1500], flush=True)


if __name__ == "__main__":
    main()
