"""Exact hits that vLLM's prefix cache no longer holds: time to the first token at 2,000 tokens, against full prefill.

    .venv-vllm/bin/python -m research.vllm_exact --pairs 2
    .venv-vllm/bin/python -m research.vllm_exact --pairs 2 --model qwen2.5-0.5b

Goal: at most 1/8 of full prefill. A hit computes the last token alone, a full prefill computes it among others: in bf16 with
random weights, whose best answers are nearly tied, that can change a choice. vLLM's own prefix cache is asked too, to tell.
"""

import statistics
import tempfile
from typing import Any

from research.vllm_bench import Server, main, paired, quantiles, repeats, tokens

LENGTH = 2000


def worker(arm: str, pair: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = Server({"store_dir": f"{folder}/kv"})
        count = repeats(12, 3)
        prompts = [tokens(LENGTH, 100 * pair + number) for number in range(count)]
        full, hit, equal, own_equal = [], [], 0, 0
        server.run([tokens(LENGTH, 9_999)])
        for prompt in prompts:
            (first,) = server.run([prompt])
            full.append(first["ttft"])
            (own,) = server.run([prompt], wish={"mode": "off"})
            own_equal += own["tokens"] == first["tokens"]
            server.settle()
            server.forget_prefixes()
            (again,) = server.run([prompt])
            hit.append(again["ttft"])
            assert again["cached"] == LENGTH - 1, again
            equal += again["tokens"] == first["tokens"]
        return {"full": quantiles(full), "hit": quantiles(hit), "equal": equal / count, "own": own_equal / count,
                "ratios": [one / other for one, other in zip(hit, full, strict=True)]}  # fmt: skip


def report(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    runs = results["connector"]
    return {
        "benchmark": "exact hits",
        "tokens": LENGTH,
        "full_p50_ms": statistics.fmean(run["full"]["p50_ms"] for run in runs),
        "hit_p50_ms": statistics.fmean(run["hit"]["p50_ms"] for run in runs),
        "ratio": paired([ratio for run in runs for ratio in run["ratios"]]),
        "answers_equal": statistics.fmean(run["equal"] for run in runs),
        "answers_equal_from_vllms_own_prefix_cache": statistics.fmean(run["own"] for run in runs),
        "goal": "ratio at most 0.125",
    }


if __name__ == "__main__":
    main(__doc__ or "", ("connector",), worker, report)
