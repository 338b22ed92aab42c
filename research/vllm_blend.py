"""Blend at 15% of the rows: time to the first token of an edited prompt of 2,000 tokens, against full prefill.

    .venv-vllm/bin/python -m research.vllm_blend --pairs 3
    .venv-vllm/bin/python -m research.vllm_blend --pairs 3 --model smollm2-135m
    .venv-vllm/bin/python -m research.vllm_blend --pairs 2 --model qwen2.5-0.5b

Speed alone: the prompts are random tokens with one edited passage of 5%, near the beginning. By turns it is as long as before
(`in_place`) and a third shorter, so that all keys behind it move (`moved`). What blending does to answers is measured with
the transformers engine, which chooses the same rows. Goal: at most 1/3 of full prefill.
"""

import statistics
import tempfile
from typing import Any

from research.vllm_bench import Server, changed, main, paired, quantiles, repeats, tokens

LENGTH = 2000
KINDS = ("in_place", "moved")
ARMS = {"similarity": "similarity", "question": "prophet"}
"""Selectors by arm: the token map alone, and what the question attends to, which takes a pass of its own."""


def worker(arm: str, pair: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        extra = {
            "store_dir": f"{folder}/kv",
            "mode": "blend",
            "lookup_timeout_s": 10,  # a busy machine is no miss here
            "blend_share": 0.15,
            "blend_selector": ARMS[arm],
        }
        server = Server(extra)
        full: dict[str, list[float]] = {kind: [] for kind in KINDS}
        mixed: dict[str, list[float]] = {kind: [] for kind in KINDS}
        share = []
        for number in range(2 * repeats(10, 2) + 2):
            kind = KINDS[number % 2]
            base = tokens(LENGTH, 1000 * pair + number)
            # An edit at the end would leave an exact prefix, which is taken first.
            near = changed(base, 0.05, number, start=20)
            if kind == "moved":
                near = near[:20] + near[53:]
            (_,) = server.run([base], wish={"mode": "exact"})
            server.settle()
            (exact,) = server.run([near], wish={"mode": "off", "no_store": True})
            server.forget_prefixes()
            (blended,) = server.run([near], wish={"mode": "blend", "no_store": True})
            assert blended["told"]["method"] == "blend", blended["told"]
            if number > 1:  # the first ones warm up, and carry the model check
                full[kind].append(exact["ttft"])
                mixed[kind].append(blended["ttft"])
                share.append(blended["told"]["tokens_recomputed"] / len(near))
            server.forget_prefixes()
        return {
            "share": statistics.fmean(share),
            **{
                kind: {
                    "full": quantiles(full[kind]),
                    "blend": quantiles(mixed[kind]),
                    "ratios": [one / other for one, other in zip(mixed[kind], full[kind], strict=True)],
                }
                for kind in KINDS
            },
        }


def report(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "benchmark": "blend",
        "tokens": LENGTH,
        "goal": "ratio at most 0.333",
        **{arm: summed(runs) for arm, runs in results.items()},
    }


def summed(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs of one arm together."""
    return {
        "rows_recomputed": statistics.fmean(run["share"] for run in runs),
        **{kind: times([run[kind] for run in runs]) for kind in KINDS},
    }


def times(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The paired runs of one kind of edit."""
    ratios = [ratio for run in runs for ratio in run["ratios"]]
    return {
        "full_p50_ms": statistics.fmean(run["full"]["p50_ms"] for run in runs),
        "blend_p50_ms": statistics.fmean(run["blend"]["p50_ms"] for run in runs),
        "prompts": len(ratios),
        "ratio": {**paired(ratios), "median": statistics.median(ratios)},
    }


if __name__ == "__main__":
    main(__doc__ or "", tuple(ARMS), worker, report)
