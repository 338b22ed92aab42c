"""What the connector costs requests that reuse nothing: the same mixed load with and without it, capture on.

    .venv-vllm/bin/python -m research.vllm_misses
    .venv-vllm/bin/python -m research.vllm_misses --model qwen2.5-0.5b --turns 5

Both arms answer the same 64 prompts (16 for a real model's shape) of 64 to 800 tokens, in batches of 8, one arm right after the other. An arm's turn lasts until
everything is stored, so the connector pays for its writes too. Goal: within 10% on two CPU cores.
"""

import random
import statistics
import tempfile
import time
from typing import Any

from research.vllm_bench import Server, paired, quantiles, repeats, tokens
from research.vllm_turns import Turn, main

BATCH = 8


def start(arm: str) -> Turn:
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    server = Server({"store_dir": f"{folder.name}/kv"} if arm == "connector" else None)

    def turn(number: int) -> dict[str, Any]:
        assert folder.name
        rng, requests = random.Random(number), repeats(64, 16)
        load = [tokens(rng.choice([64, 200, 400, 800]), 1000 * number + index) for index in range(requests)]
        began, ttfts = time.perf_counter(), []
        for first in range(0, requests, BATCH):
            outputs = server.run(load[first : first + BATCH], max_tokens=8)
            assert all(output["cached"] == 0 for output in outputs)
            ttfts += [output["ttft"] for output in outputs]
        server.stored()
        return {"tokens_per_second": sum(map(len, load)) / (time.perf_counter() - began), **quantiles(ttfts)}

    return turn


def report(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    pairs = list(zip(results["plain"], results["connector"], strict=True))
    return {
        "benchmark": "misses",
        "arms": {
            arm: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            for arm, runs in results.items()
        },
        "throughput_change": paired([w["tokens_per_second"] / p["tokens_per_second"] - 1 for p, w in pairs]),
        "ttft_p50_change": paired([w["p50_ms"] / p["p50_ms"] - 1 for p, w in pairs]),
        "goal": "within 10% on two CPU cores",
    }


if __name__ == "__main__":
    main(__doc__ or "", ("plain", "connector"), start, report, turns=16)
