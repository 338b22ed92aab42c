"""The benchmarks: what each arm does in its process, and the figures of all its runs.

A benchmark is `arms`, `worker(arm, pair, given)`, whose result is JSON, and `report(results,
given)` of the results by arm.
"""

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dejakv_models.docs import Document, Kind, ask, change, make_document, prompt_of
from research.vllm.server import Server, tokens, told_of

Result = dict[str, Any]
Results = dict[str, list[Result]]
OFF = {"mode": "off", "no_store": True}
BLEND = {"mode": "blend", "no_store": True}
T95 = (
    0.0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26,
    2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09,
)  # fmt: skip


def paired(values: Sequence[float]) -> dict[str, float]:
    """Mean, 95% interval (Student's t) and median of paired differences or ratios."""
    mean, count = statistics.fmean(values), len(values)
    error = statistics.stdev(values) / math.sqrt(count) if count > 1 else math.nan
    half = T95[min(count, len(T95)) - 1] * error
    return {
        "mean": mean,
        "low": mean - half,
        "high": mean + half,
        "median": statistics.median(values),
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile in milliseconds, of seconds."""
    ordered = sorted(values)
    named = {
        f"p{share}_ms": 1e3 * ordered[min(len(ordered) - 1, len(ordered) * share // 100)]
        for share in (95, 99)
    }
    return {"p50_ms": 1e3 * statistics.median(ordered), **named}


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. `about`: its help."""

    about: str
    arms: Sequence[str]
    worker: Callable[[str, int, argparse.Namespace], Result]
    report: Callable[[Results, argparse.Namespace], Result]


EDIT = 20
"""Where the edit of a blended prompt begins: near the beginning, so that no exact prefix is left,
and all keys behind it move.
"""


def ttft_worker(selector: str, pair: int, given: argparse.Namespace) -> Result:
    """By length and prompt: seconds to the first token in full, as a blend of 15% of the rows from
    a prompt with one edited passage of 5%, and as an exact hit that vLLM's own prefix cache no
    longer holds; and the longest wait of running requests for a token beside the hit and beside
    the same prompt in full.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        extra = {
            "store": f"{folder}/kv",
            "modes": ["off", "exact", "blend"],
            "max_bytes": 24 << 30,
            "max_pending_bytes": 8 << 30,
            "blend_share": 0.15,
            "blend_selector": selector,
            "lookup_timeout_s": 60,
            "load_timeout_s": 600,
        }
        server = Server(given.model, extra, max_model_len=max(given.lengths) + 40)
        return {
            str(length): _ttfts(server, length, pair, given.prompts) for length in given.lengths
        }


def _ttfts(server: Server, length: int, pair: int, prompts: int) -> list[Result]:
    rows: list[Result] = []
    for number in range(prompts + 1):
        seed = 1000 * (length + pair) + number
        base = tokens(length, seed)
        near = [*base[:EDIT], *tokens(length // 30, seed + 1), *base[EDIT + length // 20 :]]
        server.run([base], wish={"mode": "exact"})
        server.settle()
        (full,) = server.run([near], wish=OFF)
        server.forget_prefixes()
        (blend,) = server.run([near], wish=BLEND)
        server.forget_prefixes()
        (plain,) = server.run([base], wish=OFF)
        server.forget_prefixes()
        (exact,) = server.run([base], wish={"mode": "exact"})
        server.forget_prefixes()
        stalled, (again,) = _between(server, [base], {"mode": "exact"})
        stalled_in_full, _ = _between(server, [base], OFF)
        if (blend["told"]["method"], exact["told"]["method"], again["method"]) != (
            "blend",
            "exact",
            "exact",
        ):
            raise SystemExit(
                f"{length} tokens: no reuse: {blend['told']}, {exact['told']}, {again}"
            )
        if number:  # the first one warms up, and carries the model check
            rows.append(
                {
                    "full": full["ttft"],
                    "blend": blend["ttft"],
                    "exact": exact["ttft"],
                    "exact_full": plain["ttft"],
                    "rows": blend["told"]["tokens_recomputed"] / len(near),
                    "bytes": exact["told"]["bytes_loaded"],
                    "equal": exact["tokens"] == plain["tokens"],
                    "exact_stall": stalled["longest_ms"],
                    "full_stall": stalled_in_full["longest_ms"],
                }
            )
    return rows


def ttft_report(results: Results, given: argparse.Namespace) -> Result:
    made: list[Result] = []
    for selector, runs in results.items():
        for length in map(str, given.lengths):
            rows = [row for run in runs for row in run[length]]
            made.append(
                {
                    "selector": selector,
                    "tokens": int(length),
                    "prompts": len(rows),
                    **{
                        f"{name}_ms": 1e3 * statistics.median(row[name] for row in rows)
                        for name in ("full", "exact", "blend")
                    },
                    **{
                        f"{name}_stall_ms": statistics.median(row[f"{name}_stall"] for row in rows)
                        for name in ("full", "exact")
                    },
                    "exact_by_full": paired([row["exact"] / row["exact_full"] for row in rows]),
                    "exact_stall_by_full": paired(
                        [row["exact_stall"] / row["full_stall"] for row in rows]
                    ),
                    "blend_by_full": paired([row["blend"] / row["full"] for row in rows]),
                    "blend_rows": statistics.fmean(row["rows"] for row in rows),
                    "exact_answers_equal": statistics.fmean(row["equal"] for row in rows),
                    "bytes": statistics.fmean(row["bytes"] for row in rows),
                }
            )
    return {"goal": "exact_by_full at most 0.125, blend_by_full at most 0.333", "rows": made}


def misses(pair: int, server: Server) -> list[tuple[list[int], int | None]]:
    """64 prompts of 64 to 800 random tokens."""
    rng = random.Random(pair)
    return [
        (tokens(rng.choice([64, 200, 400, 800]), 1000 * pair + number), None)
        for number in range(64)
    ]


CHANGES: tuple[Kind, ...] = ("paraphrase", "reorder", "edit", "extend")


def workload(pair: int, server: Server) -> list[tuple[list[int], int | None]]:
    """100 questions about documents of the bundled data, with the right first token: 40% are about
    an earlier document, half of these changed (paraphrased, reordered, edited or extended).
    """
    rng, documents = random.Random(f"workload/{pair}"), list[Document]()
    made: list[tuple[str, str]] = []
    for _ in range(100):
        new = not documents or rng.random() >= 0.4
        if new:
            documents.append(make_document(rng, 100))
        document = documents[-1] if new else rng.choice(documents)
        if not new and rng.random() < 0.5:
            changed = change(rng.choice(CHANGES), document, rng, questions=2)
            question = rng.choice(changed.questions)
            made.append((prompt_of(changed.target.text, question.text), question.answer))
        else:
            fact = rng.choice(document.facts)
            made.append((prompt_of(document.text, ask(fact, rng)), fact.value))
    encode = server.llm.get_tokenizer().encode
    return [
        (encode(prompt, add_special_tokens=False), encode(answer, add_special_tokens=False)[0])
        for prompt, answer in made
    ]


def served(load: Callable[..., Any], batch: int, **options: Any) -> Callable[..., Result]:
    """What an arm does with a load: it answers it in batches, until everything is stored."""

    def worker(arm: str, pair: int, given: argparse.Namespace) -> Result:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            extra = None if arm == "plain" else {"store": f"{folder}/kv", "mode": arm}
            server = Server(given.model, extra, **options)
            asked = load(pair, server)
            server.run([tokens(900, 5_000_000)])
            server.stored()
            outputs, began, used = list[Result](), time.perf_counter(), time.process_time()
            for first in range(0, len(asked), batch):
                outputs += server.run(
                    [prompt for prompt, _ in asked[first : first + batch]], max_tokens=4
                )
            server.stored()
            seconds, used = time.perf_counter() - began, time.process_time() - used
            computed = [
                len(prompt) - output["cached"] + output["told"].get("tokens_recomputed", 0)
                for (prompt, _), output in zip(asked, outputs, strict=True)
            ]
            firsts = [output["tokens"][0] for output in outputs]
            right = [
                first == answer
                for (_, answer), first in zip(asked, firsts, strict=True)
                if answer is not None
            ]
            return {
                "requests_per_second": len(asked) / seconds,
                "cpu_seconds": used,
                **quantiles([output["ttft"] for output in outputs]),
                "tokens_computed": sum(computed),
                **({"right": statistics.fmean(right)} if right else {}),
                "answers": firsts,
            }

    return worker


def served_report(results: Results, given: argparse.Namespace) -> Result:
    """Each arm's means, and its changes from `plain` in the same pair."""
    found: Result = {}
    for arm, runs in results.items():
        names = [name for name in runs[0] if name != "answers"]
        found[arm] = {name: statistics.fmean(run[name] for run in runs) for name in names}
        if arm == "plain":
            continue
        pairs = list(zip(results["plain"], runs, strict=True))
        for name in ("requests_per_second", "cpu_seconds", "p50_ms", "p95_ms"):
            found[arm][f"{name}_change"] = paired(
                [run[name] / plain[name] - 1 for plain, run in pairs]
            )
        both = [
            two
            for plain, run in pairs
            for two in zip(plain["answers"], run["answers"], strict=True)
        ]
        found[arm]["answers_changed"] = statistics.fmean(one != other for one, other in both)
    return found


ARRIVING, RUNNING, LENGTH, BUDGET, TAIL = 20, 4, 1000, 512, 16


def decoding_worker(arm: str, pair: int, given: argparse.Namespace) -> Result:
    """4 requests decode, and 20 requests for one token arrive at once: in `blends` documents of
    which 15% of the rows are computed, in `prefills` new prompts as long as the rows of these,
    in `alone` none.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        extra = {
            "store": f"{folder}/kv",
            "modes": ["off", "exact", "blend"],
            "blend_share": 0.15,
            "lookup_timeout_s": 60,
            "load_timeout_s": 120,
        }
        server = Server(
            given.model, extra, max_num_batched_tokens=BUDGET, max_num_seqs=RUNNING + ARRIVING + 8
        )
        base = tokens(LENGTH, 1000 + pair)
        server.run([base], wish={"mode": "exact"})
        server.settle()
        turns: list[Result] = []
        for turn in range(given.prompts + 1):
            blended = [
                tokens(33, 10_000 * pair + 100 * turn + i) + base[66:] for i in range(ARRIVING)
            ]
            blends, told = _between(server, blended, BLEND)
            assert all(said["method"] == "blend" for said in told), told
            rows = [said["tokens_recomputed"] + TAIL for said in told]
            prefills, _ = _between(
                server,
                [tokens(count, 20_000 * pair + 100 * turn + i) for i, count in enumerate(rows)],
                OFF,
            )
            alone, _ = _between(server, [], OFF, steps=30)
            if turn:  # the first one warms up, and carries the model check
                turns.append(
                    {"rows": sum(rows), "blends": blends, "prefills": prefills, "alone": alone}
                )
        return {"turns": turns}


def _between(
    server: Server, arriving: list[list[int]], wish: Result, steps: int = 0
) -> tuple[Result, list[Result]]:
    """Times between two tokens of running requests until those that arrive are answered, or for so
    many steps; and the connector's word on those that arrived.
    """
    running = [server.add(tokens(40, number), 900, OFF) for number in range(RUNNING)]
    last: dict[str, float] = {}
    while len(last) < RUNNING:
        last |= {output.request_id: time.perf_counter() for output in server.engine.step()}
    began, gaps = time.perf_counter(), list[float]()
    last = dict.fromkeys(running, began)
    names = [server.add(ids, 1, wish) for ids in arriving]
    told: dict[str, Result] = {}
    while len(told) < len(names) or steps > 0:
        steps -= 1
        outputs, now = server.engine.step(), time.perf_counter()
        for output in outputs:
            if output.request_id in last:
                gaps.append(now - last[output.request_id])
                last[output.request_id] = now
            elif output.finished:
                told[output.request_id] = told_of(output)
    took = time.perf_counter() - began
    server.engine.abort_request(running)
    while server.engine.has_unfinished_requests():
        server.engine.step()
    server.forget_prefixes()
    return {
        **quantiles(gaps),
        "longest_ms": 1e3 * max(gaps),
        "until_all_are_answered_ms": 1e3 * took,
    }, [told[name] for name in names]


def decoding_report(results: Results, given: argparse.Namespace) -> Result:
    turns = [turn for run in results["both"] for turn in run["turns"]]
    names = list(turns[0]["blends"])
    return {
        "goal": "ratio of p99_ms at most 1",
        "turns": len(turns),
        "rows": statistics.fmean(turn["rows"] for turn in turns),
        **{
            arm: {name: statistics.median(turn[arm][name] for turn in turns) for name in names}
            for arm in ("blends", "prefills", "alone")
        },
        "ratio": {
            name: paired([turn["blends"][name] / turn["prefills"][name] for turn in turns])
            for name in names
        },
    }


BENCHMARKS = {
    "ttft": Benchmark(
        "first token in full, of an exact hit, of a blend",
        ("similarity", "prophet"),
        ttft_worker,
        ttft_report,
    ),
    "misses": Benchmark(
        "the cost of requests that reuse nothing",
        ("plain", "exact"),
        served(misses, 8),
        served_report,
    ),
    "workload": Benchmark(
        "a whole stream, all requests counted",
        ("plain", "exact", "blend"),
        served(workload, 1, num_gpu_blocks_override=200),
        served_report,
    ),
    "decoding": Benchmark(
        "others decode while blends arrive", ("both",), decoding_worker, decoding_report
    ),
}
