"""A whole stream, prefix caching on in both arms: 40% near-duplicates, the rest new. All requests count, not the hits.

    .venv-vllm/bin/python benchmarks/vllm_workload.py --pairs 2

Questions about documents of the bundled data; a near-duplicate is an earlier document with an edited passage or another
question. The KV cache is small, so that vLLM forgets. `exact` has the connector in its default mode, `blend` in mode blend.
"""

import random
import statistics
import tempfile
import time
from typing import Any

from vllm_bench import Server, changed, main, paired, quantiles, tokens

REQUESTS, LENGTH = 100, 900


def stream(pair: int) -> list[list[int]]:
    rng = random.Random(pair)
    made: list[list[int]] = []
    for number in range(REQUESTS):
        if made and rng.random() < 0.4:
            base = rng.choice(made)
            near = changed(base, 0.04, number) if rng.random() < 0.5 else [*base[:-24], *tokens(24, number)]
            made.append(near)
        else:
            made.append(tokens(LENGTH, 1000 * pair + number))
    return made


def worker(arm: str, pair: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        extra: dict[str, Any] | None = None if arm == "plain" else {"store_dir": f"{folder}/kv"}
        if arm == "blend" and extra is not None:
            extra |= {"mode": "blend", "index_encoder": "model", "similarity_threshold": 0.9, "lexical_guard": False}
        server = Server(extra, num_gpu_blocks_override=200)
        server.run([tokens(LENGTH, 5_000_000)])
        outputs, began = [], time.perf_counter()
        for prompt in stream(pair):
            outputs += server.run([prompt], max_tokens=8)
        seconds = time.perf_counter() - began
        methods: dict[str, int] = {}
        for output in outputs:
            name = output["told"].get("method", "none")
            methods[name] = methods.get(name, 0) + 1
        return {
            "requests_per_second": REQUESTS / seconds,
            **quantiles([output["ttft"] for output in outputs]),
            "methods": methods,
            "answers": [output["tokens"] for output in outputs],
        }


def report(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    done: dict[str, Any] = {"benchmark": "workload", "requests": REQUESTS, "near_duplicates": 0.4}
    for arm, runs in results.items():
        entry: dict[str, Any] = {
            name: statistics.fmean(run[name] for run in runs) for name in ("requests_per_second", "p50_ms", "p95_ms")
        }
        entry["methods"] = runs[0]["methods"]
        if arm != "plain":
            pairs = list(zip(results["plain"], runs, strict=True))
            entry["ttft_p50_change"] = paired([run["p50_ms"] / plain["p50_ms"] - 1 for plain, run in pairs])
            changes = [
                one != other
                for plain, run in pairs
                for one, other in zip(plain["answers"], run["answers"], strict=True)
            ]
            entry["answers_changed"] = statistics.fmean(changes)
        done[arm] = entry
    return done


if __name__ == "__main__":
    main(__doc__ or "", ("plain", "exact", "blend"), worker, report)
