"""Time of the check that a model is still the one its state was stored for, beside the exact hit that it precedes.

    python benchmarks/epoch_check.py [--model docs-lm] [--model FOLDER] [--tokens 700] [--repeats 40] [--output epoch_check.json]

Prompts of at least `--tokens` tokens are stored in memory and asked again, one token of answer each. A time of a hit is the
whole request: tokenizing, lookup, state into the model, one token, and the check. Between two hits the check is timed
alone, with the CPU's caches as a hit leaves them, once whole and once without the turn that compares the next part of all bytes.
In the same run: the fingerprint at load, and the copy of a prompt's state that a caller waits for who asks for the cache
(`return_dict_in_generate`), beside the miss that it ends.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from exact_hit import machine, requests, spread

from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.engines.transformers import TransformersEngine
from dejakv.pipeline import Pipeline
from dejakv.request import Sampling

GOAL = 0.05


def milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def measure(name: str, dtype: str, tokens: int, repeats: int) -> dict[str, object]:
    engine = TransformersEngine.from_pretrained(name, dtype=dtype, device="cpu")
    one = Sampling(1)
    wanted = [replace(request, sampling=one) for request in requests(engine, tokens, 4)]
    cache = build_cache(SemanticCacheConfig(semantic_text=False), engine, background=False)
    pipeline = Pipeline(engine, cache)
    misses: list[float] = []
    for request in wanted:
        misses.append(pipeline.answer(replace(request, no_store=True)).record.latency_ms)
        pipeline.answer(request)
    hits: list[float] = []
    checks: list[float] = []
    light: list[float] = []
    copies: list[float] = []
    for turn in range(repeats + 1):
        request = wanted[turn % len(wanted)]
        prepared = engine.prepare(request)
        record = pipeline.answer(request).record if turn else None
        check = milliseconds(engine._watch.check)
        completion = engine.run(prepared, sampling=one)
        copied = milliseconds(completion.capture)
        without = milliseconds(lambda: engine._watch.check(turn=False))
        if record is not None:
            assert record.method == "exact"
            assert record.computed_tokens == 1
            hits.append(milliseconds(lambda: pipeline.answer(request)))  # noqa: B023
            checks.append(check)
            light.append(without)
            copies.append(copied)
    weights = list(engine.model.parameters())
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    renewals = [milliseconds(engine.weights_changed) for _ in range(5)]
    cache.close()
    return {
        "weights_mb": size / 1e6,
        "tensors": len(weights),
        "modules": sum(1 for _ in engine.model.modules()),
        "prompt_tokens": spread([float(len(engine.prepare(request).token_ids)) for request in wanted]),
        "miss_ms": spread(misses),
        "hit_ms": spread(hits),
        "check_ms": spread(checks),
        "check_without_turn_ms": spread(light),
        "share_of_a_hit": statistics.median(checks) / statistics.median(hits),
        "share_p10_p90": [spread(checks)["p10"] / spread(hits)["p50"], spread(checks)["p90"] / spread(hits)["p50"]],
        "fingerprint_ms": spread(renewals),
        "copy_ms": spread(copies),
        "copy_share_of_a_miss": statistics.median(copies) / statistics.median(misses),
        "hits": len(hits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="may be given more than once; default docs-lm")
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = {
        Path(name).name: measure(name, options.dtype, options.tokens, options.repeats)
        for name in options.model or ["docs-lm"]
    }
    for name, figures in found.items():
        print(name)
        for key, value in figures.items():
            if isinstance(value, dict):
                print(f"  {key:22} p50 {value['p50']:>9,.2f}   p10 {value['p10']:>9,.2f}   p90 {value['p90']:>9,.2f}")
            else:
                print(f"  {key:22} {value}")
        share = figures["share_of_a_hit"]
        assert isinstance(share, float)
        print(f"  goal: at most {GOAL:.0%} of a hit's time: {share:.1%}, {'met' if share <= GOAL else 'missed'}")
    if options.output:
        command = f"python benchmarks/epoch_check.py {' '.join(f'--model {name}' for name in found)} --repeats {options.repeats}"
        report = {"command": command, "dtype": options.dtype, "machine": machine(), "models": found}
        options.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
