"""What the connector costs requests that reuse nothing: the same mixed load with and without it, capture on.

    .venv-vllm/bin/python benchmarks/vllm_misses.py --pairs 4

Goal: within 10% on two CPU cores.
"""

import random
import statistics
import tempfile
import time
from typing import Any

from vllm_bench import Server, main, paired, quantiles, tokens

REQUESTS, BATCH = 96, 8


def worker(arm: str, pair: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = Server({"store_dir": f"{folder}/kv"} if arm == "connector" else None)
        rng = random.Random(pair)
        load = [tokens(rng.choice([64, 200, 400, 800]), 10_000 * pair + number) for number in range(REQUESTS)]
        server.run([tokens(300, 999_000 + number) for number in range(8)])
        began, ttfts = time.perf_counter(), []
        for start in range(0, REQUESTS, BATCH):
            outputs = server.run(load[start : start + BATCH], max_tokens=8)
            assert all(output["cached"] == 0 for output in outputs)
            ttfts += [output["ttft"] for output in outputs]
        seconds = time.perf_counter() - began
        return {"tokens_per_second": sum(map(len, load)) / seconds, **quantiles(ttfts)}


def report(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    pairs = list(zip(results["plain"], results["connector"], strict=True))
    return {
        "benchmark": "misses",
        "arms": {
            arm: {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
            for arm, runs in results.items()
        },
        "throughput_change": paired([w["tokens_per_second"] / p["tokens_per_second"] - 1 for p, w in pairs]),
        "ttft_p50_change": paired([w["p50_ms"] / p["p50_ms"] - 1 for p, w in pairs]),
        "goal": "within 10% on two CPU cores",
    }


if __name__ == "__main__":
    main(__doc__ or "", ("plain", "connector"), worker, report)
