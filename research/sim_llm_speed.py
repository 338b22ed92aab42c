"""Part `speed` of `benchmarks.sim_llm`: processor time to the first token, and decoding at equal memory."""

import argparse
import random
import statistics
import time
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from dejakv.datasets import docs
from dejakv.models import load
from dejakv.models.lckv.cache import LCKVCache
from dejakv.sim_llm import SimLLMInference


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
        twin = served(o.twin, unsound=True)
        rounds = [one_round(rng, facts, arms, twin) for _ in range(o.rounds)]
        names = [name for name in rounds[0] if name != "tokens"]
        first[str(round(statistics.mean(r["tokens"] for r in rounds)))] = {
            "quartiles_s": {name: statistics.quantiles([r[name] for r in rounds], n=4) for name in names},
            "of_twin": {name: statistics.quantiles([r[name] / r["twin"] for r in rounds], n=4) for name in names},
        }
    return {"first_token": first, "throughput": throughput(o)}


def one_round(
    rng: random.Random, facts: int, arms: dict[str, SimLLMInference], twin: SimLLMInference
) -> dict[str, float]:
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
        "tokens": float(len(twin.model.tokenizer(prompt)["input_ids"])),
        "twin": timed(lambda: twin.generate(prompt, enable_kv_reuse=False, **one)),
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
