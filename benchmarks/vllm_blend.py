"""Blend at 15% of the rows: time to the first token of an edited prompt of 2,000 tokens, against full prefill.

    .venv-vllm/bin/python benchmarks/vllm_blend.py --pairs 2

Speed alone: the prompts are random tokens with one edited passage. What blending does to answers is measured with the
transformers engine, whose maps, selectors and schedules these are. Goal: at most 1/3 of full prefill.
"""

import statistics
import tempfile
from typing import Any

from vllm_bench import Server, changed, main, paired, quantiles, tokens

LENGTH, REPEATS = 2000, 10


def worker(arm: str, pair: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        extra = {
            "store_dir": f"{folder}/kv",
            "mode": "blend",
            "index_encoder": "model",
            "similarity_threshold": 0.5,
            "lexical_guard": False,
            "blend_share": 0.15,
            "blend_selector": "similarity",  # 15% in every layer; `value` computes the first one whole, a quarter of this model
        }
        server = Server(extra)
        full, mixed, share = [], [], []
        for number in range(REPEATS + 1):
            base = tokens(LENGTH, 1000 * pair + number)
            near = changed(
                base, 0.05, number, start=20
            )  # an edit at the end would leave an exact prefix, which is taken first
            (_,) = server.run([base], wish={"mode": "exact"})
            server.settle()
            (exact,) = server.run([near], wish={"mode": "off", "no_store": True})
            server.forget_prefixes()
            (blended,) = server.run([near], wish={"mode": "blend", "no_store": True})
            assert blended["told"]["method"] == "blend", blended["told"]
            if number:  # the first pair warms up, and carries the model check
                full.append(exact["ttft"])
                mixed.append(blended["ttft"])
                share.append(blended["told"]["tokens_recomputed"] / LENGTH)
            server.forget_prefixes()
        return {"full": quantiles(full), "blend": quantiles(mixed), "share": statistics.fmean(share),
                "ratio": statistics.median(mixed) / statistics.median(full)}  # fmt: skip


def report(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    runs = results["blend"]
    return {
        "benchmark": "blend",
        "tokens": LENGTH,
        "full_p50_ms": statistics.fmean(run["full"]["p50_ms"] for run in runs),
        "blend_p50_ms": statistics.fmean(run["blend"]["p50_ms"] for run in runs),
        "rows_recomputed": statistics.fmean(run["share"] for run in runs),
        "ratio": paired([run["ratio"] for run in runs]),
        "goal": "ratio at most 0.333",
    }


if __name__ == "__main__":
    main(__doc__ or "", ("blend",), worker, report)
