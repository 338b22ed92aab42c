"""Time between the tokens of requests that decode, while 20 blends arrive at once and while 20 prompts of as many rows do.

    .venv-vllm/bin/python -m research.vllm_decoding --pairs 2
    .venv-vllm/bin/python -m research.vllm_decoding --pairs 2 --model smollm2-135m

One engine, by turns: 4 requests decode, and 20 requests for one token arrive. In `blends` they are documents of 1,000 tokens of which
15% of the rows are computed; in `prefills` they are new prompts, as long as the rows that a blend and vLLM computed of one of
these. Times are those between two tokens of a running request, from the arrival until all 20 have their token; `alone` is without
arrivals. Goal: the 99th percentile with blends is at most that with prefills.
"""

import statistics
import tempfile
import time
from typing import Any

from research.vllm_bench import Server, main, paired, repeats, tokens

ARRIVING, RUNNING, LENGTH, BUDGET, TAIL = 20, 4, 1000, 512, 16
ARMS = ("blends", "prefills")


class Decoding:
    """An engine with requests that decode."""

    def __init__(self, server: Server) -> None:
        self.engine = server.llm.llm_engine
        self._names = iter(range(1_000_000))

    def add(self, ids: list[int], count: int, wish: dict[str, Any]) -> str:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"dejakv": wish}}
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, extra_args=extra)
        name = f"decoding-{next(self._names)}"
        self.engine.add_request(name, {"prompt_token_ids": ids}, params)
        return name

    def between(self, arriving: list[list[int]], wish: dict[str, Any], steps: int = 0) -> dict[str, Any]:
        """Seconds between tokens of running requests until those that arrive are answered, or for so many `steps`; and what
        was told of them."""
        off = {"mode": "off", "no_store": True}
        running = [self.add(tokens(40, number), 900, off) for number in range(RUNNING)]
        last: dict[str, float] = {}
        while len(last) < RUNNING:
            last |= {output.request_id: time.perf_counter() for output in self.engine.step()}
        began, gaps = time.perf_counter(), []
        last = dict.fromkeys(running, began)
        names = [self.add(ids, 1, wish) for ids in arriving]
        told: dict[str, dict[str, Any]] = {}
        while len(told) < len(names) or steps > 0:
            steps -= 1
            outputs, now = self.engine.step(), time.perf_counter()
            for output in outputs:
                if output.request_id in last:
                    gaps.append(now - last[output.request_id])
                    last[output.request_id] = now
                elif output.finished:
                    told[output.request_id] = (output.kv_transfer_params or {}).get("dejakv") or {}
        took = time.perf_counter() - began
        for name in running:
            self.engine.abort_request([name])
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return {"gaps": gaps, "took": took, "told": [told[name] for name in names]}


def worker(arm: str, pair: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        extra = {
            "store_dir": f"{folder}/kv",
            "modes": ["off", "exact", "blend"],
            "blend_share": 0.15,
            "lookup_timeout_s": 60,
            "load_timeout_s": 120,
        }
        server = Server(extra, max_num_batched_tokens=BUDGET, max_num_seqs=RUNNING + ARRIVING + 8)
        base = tokens(LENGTH, 1000 + pair)
        server.run([base], wish={"mode": "exact"})
        server.settle()
        server.forget_prefixes()
        decoding = Decoding(server)
        turns: list[dict[str, Any]] = []
        for turn in range(repeats(6, 2) + 1):
            blended = [tokens(33, 10_000 * pair + 100 * turn + i) + base[66:] for i in range(ARRIVING)]
            found = {"blends": decoding.between(blended, {"mode": "blend", "no_store": True})}
            told = found["blends"]["told"]
            assert all(said["method"] == "blend" for said in told), told
            rows = [said["tokens_recomputed"] + TAIL for said in told]
            prefills = [tokens(count, 20_000 * pair + 100 * turn + i) for i, count in enumerate(rows)]
            found["prefills"] = decoding.between(prefills, {"mode": "off", "no_store": True})
            found["alone"] = decoding.between([], {}, steps=30)
            server.forget_prefixes()
            if turn:  # the first one warms up, and carries the model check
                turns.append({"rows": sum(rows), **{name: times(one) for name, one in found.items()}})
        return {"turns": turns}


def times(found: dict[str, Any]) -> dict[str, float]:
    gaps = sorted(found["gaps"])
    return {
        "p50_ms": 1e3 * statistics.median(gaps),
        "p99_ms": 1e3 * gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))],
        "most_ms": 1e3 * gaps[-1],
        "until_all_are_answered_ms": 1e3 * found["took"],
        "tokens": len(gaps),
    }


def report(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    turns = [turn for run in results["both"] for turn in run["turns"]]

    def ratio(name: str) -> dict[str, float]:
        values = [turn["blends"][name] / turn["prefills"][name] for turn in turns]
        return {**paired(values), "median": statistics.median(values), "least": min(values), "most": max(values)}

    return {
        "benchmark": "decoding",
        "arriving": ARRIVING,
        "running": RUNNING,
        "budget": BUDGET,
        "turns": len(turns),
        "rows": statistics.fmean(turn["rows"] for turn in turns),
        "arms": {
            arm: {name: statistics.median(turn[arm][name] for turn in turns) for name in turns[0][arm]}
            for arm in (*ARMS, "alone")
        },
        "ratio": {name: ratio(name) for name in ("p50_ms", "p99_ms", "most_ms", "until_all_are_answered_ms")},
        "goal": "p99_ms at most 1",
    }


if __name__ == "__main__":
    main(__doc__ or "", ("both",), worker, report)
