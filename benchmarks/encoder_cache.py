"""The encoder cache measured: agents that share pictures, lookups at 100,000 entries, hit rates on Zipf traces.

    python benchmarks/encoder_cache.py --output docs/results/encoder_cache

writes the .json and the .md. Parts: --parts agents,lookup,traces. Needs the extra `test` (cachetools, for comparison).
"""

import argparse
import json
import os
import platform
import random
import shlex
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import cachetools
import numpy as np

from dejakv.encoder_cache import VisualKVCache, compute_content_hash

ONE = np.zeros((1, 1))


# --- Agents on the bundled VLM ----------------------------------------------------------------------------------------


def agents_workload(agents: int, pictures: int, requests: int, exponent: float, seed: int) -> list[list[Any]]:
    """Requests of each agent: a picture by Zipf, and one of the questions about it."""
    from dejakv.datasets.shapes import ShapesDataset, prompt
    from dejakv.request import Request

    by_picture: dict[str, list[Any]] = defaultdict(list)
    for sample in ShapesDataset(seed=seed, samples=pictures * 12, images=pictures):
        by_picture[sample.media[0].digest].append(sample)
    chance = random.Random(seed)
    pool = list(by_picture.values())[:pictures]
    chance.shuffle(pool)
    drawn = chance.choices(pool, [1 / (rank + 1) ** exponent for rank in range(len(pool))], k=requests)
    samples = [chance.choice(questions) for questions in drawn]
    asked = [Request(str(n), prompt(sample.question), "", sample.media) for n, sample in enumerate(samples)]
    return [asked[number::agents] for number in range(agents)]


def serve(engine: Any, work: list[list[Any]]) -> dict[str, Any]:
    """All agents at once, each in its thread. Times of the whole and of each request."""
    done: list[Any] = []

    def agent(requests: list[Any]) -> None:
        done.extend((request.id, engine.run(engine.prepare(request))) for request in requests)

    threads = [threading.Thread(target=agent, args=(requests,)) for requests in work]
    started, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {
        "requests_per_s": len(done) / seconds,
        "requests_per_cpu_s": len(done) / cpu,
        "ttft_ms": statistics.median(completion.ttft_s for _, completion in done) * 1000,
        "encoder_runs": sum(completion.encoder_runs for _, completion in done),
        "answers": {id: completion.text for id, completion in done},
    }


def agents_part(given: argparse.Namespace) -> dict[str, Any]:
    from dejakv.engines.transformers import TransformersEngine

    cache = VisualKVCache()
    engine = TransformersEngine.from_pretrained("shapes-vlm", encoder_cache=cache)
    arms = {"without": engine.for_arm("none"), "with": engine}
    work = agents_workload(given.agents, given.pictures, given.requests, given.exponent, given.seed)
    distinct = len({media.digest for requests in work for request in requests for media in request.media})
    for arm in arms.values():
        serve(arm, [requests[:2] for requests in work])
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for repetition in range(given.repetitions):
        for name in sorted(arms, reverse=bool(repetition % 2)):
            cache.clear()
            runs[name].append(serve(arms[name], work))
    stats = cache.stats()
    changed = sum(one["answers"] != runs["without"][0]["answers"] for measured in runs.values() for one in measured)
    figures = {
        name: {key: [round(run[key], 3) for run in measured] for key in measured[0] if key != "answers"}
        for name, measured in runs.items()
    }
    return {
        "agents": given.agents,
        "distinct_pictures": distinct,
        "requests": given.requests,
        "zipf_exponent": given.exponent,
        "arms": figures,
        "runs_with_another_answer": changed,
        "encoder_ms_a_picture": stats.encoder_seconds / max(stats.encoder_runs, 1) * 1000,
    }


# --- Lookups at 100,000 entries ---------------------------------------------------------------------------------------


class Locked:
    """cachetools as it must be used among threads: a lock around it."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.lock = threading.Lock()

    def lookup(self, key: str) -> Any:
        with self.lock:
            return self.cache.get(key)

    def store(self, key: str, _: str, value: Any) -> None:
        with self.lock:
            self.cache[key] = value


def timed(action: Callable[[Any], Any], arguments: Sequence[Any]) -> dict[str, float]:
    """Microseconds a call: p50 and p99 of single calls (with two readings of the clock), and the mean CPU time of all."""
    clock = time.perf_counter_ns
    singles = np.empty(len(arguments))
    for number, argument in enumerate(arguments):
        began = clock()
        action(argument)
        singles[number] = clock() - began
    began = time.thread_time_ns()
    for argument in arguments:
        action(argument)
    mean = (time.thread_time_ns() - began) / len(arguments)
    p50, p99 = np.percentile(singles, [50, 99]) / 1000
    return {"p50_us": round(float(p50), 3), "p99_us": round(float(p99), 3), "cpu_us": round(mean / 1000, 3)}


def lookup_part(given: argparse.Namespace) -> dict[str, Any]:
    entries = given.entries
    keys = [compute_content_hash(str(number).encode()) for number in range(entries)]
    chance = random.Random(given.seed)
    asked = chance.choices(keys, k=given.lookups)
    absent = [compute_content_hash(f"absent {number}".encode()) for number in range(given.lookups)]
    caches: dict[str, Any] = {
        f"VisualKVCache {policy}": VisualKVCache(entries, policy=policy)  # type: ignore[arg-type]
        for policy in ("lfu", "lru", "cost")
    }
    caches["cachetools.LFUCache and a lock"] = Locked(cachetools.LFUCache(entries))
    caches["cachetools.LRUCache and a lock"] = Locked(cachetools.LRUCache(entries))
    result: dict[str, Any] = {"entries": entries, "lookups": given.lookups}
    result["clock only"] = {"nothing": timed(lambda _: None, asked)}
    for name, cache in caches.items():
        for key in keys:
            cache.store(key, "image", ONE)
        result[name] = {"hit": timed(cache.lookup, asked), "miss": timed(cache.lookup, absent)}
        new = [f"new {number}" for number in range(2 * given.evictions)]
        fresh = iter(new)
        result[name]["store that evicts"] = timed(
            lambda _, cache=cache, fresh=fresh: cache.store(next(fresh), "image", ONE), new[: given.evictions]
        )
    view = VisualKVCache(entries).view("epoch", "partition")
    for key in keys:
        view.store(key, "image", ONE)
    result["view, get_or_compute"] = {"hit": timed(lambda key: view.get_or_compute(key, "image", lambda: ONE), asked)}
    picture = random.Random(0).randbytes(300_000)
    result["SHA-256 of 300 kB"] = {"hash": timed(lambda _: compute_content_hash(picture), [None] * 200)}
    return result


# --- Traces -----------------------------------------------------------------------------------------------------------


def zipf(items: int, length: int, exponent: float, seed: int) -> list[int]:
    weights = [1 / (rank + 1) ** exponent for rank in range(items)]
    return random.Random(seed).choices(range(items), weights, k=length)


def traces(given: argparse.Namespace) -> dict[str, list[int]]:
    """Zipf; Zipf whose favourites change ten times; Zipf with a scan of one-off pictures in between."""
    items, length, exponent = given.items, given.trace, given.exponent
    still = zipf(items, length, exponent, given.seed)
    step = length // 10
    drift = [(item + (place // step) * 997) % items for place, item in enumerate(still)]
    chance = random.Random(given.seed)
    scan = [item if chance.random() < 0.7 else items + place for place, item in enumerate(still)]
    return {"zipf": still, "zipf, favourites change": drift, "zipf, 30% one-off": scan}


def belady(trace: Sequence[int], entries: int) -> int:
    """Hits of the offline optimum: evict what is wanted again last (or not admit it, if that is the new one)."""
    import heapq

    following: list[int] = [0] * len(trace)
    later: dict[int, int] = {}
    for place in range(len(trace) - 1, -1, -1):
        following[place] = later.get(trace[place], len(trace) + place)
        later[trace[place]] = place
    held: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits = 0
    for place, item in enumerate(trace):
        hits += item in held
        held[item] = following[place]
        heapq.heappush(heap, (-following[place], item))
        while len(held) > entries:
            wanted, candidate = heapq.heappop(heap)
            if held.get(candidate) == -wanted:
                del held[candidate]
    return hits


def hits_of(cache: Any, trace: Iterable[int]) -> int:
    hits = 0
    for item in trace:
        key = str(item)
        if cache.lookup(key) is not None:
            hits += 1
        else:
            cache.store(key, "image", ONE)
    return hits


def traces_part(given: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "items": given.items,
        "length": given.trace,
        "zipf_exponent": given.exponent,
        "hit_rate": {},
    }
    for name, trace in traces(given).items():
        for entries in (given.items // 100, given.items // 10):
            hits = {
                "VisualKVCache lfu": hits_of(VisualKVCache(entries, policy="lfu"), trace),
                "VisualKVCache lru": hits_of(VisualKVCache(entries, policy="lru"), trace),
                "cachetools.LRUCache": hits_of(Locked(cachetools.LRUCache(entries)), trace),
                "cachetools.LFUCache (no ageing)": hits_of(Locked(cachetools.LFUCache(entries)), trace),
                "optimum (Belady)": belady(trace, entries),
            }
            result["hit_rate"][f"{name}, {entries} entries"] = {
                who: round(count / len(trace), 4) for who, count in hits.items()
            }
    result["encoder_seconds_saved"] = saved(given)
    return result


def saved(given: argparse.Namespace) -> dict[str, Any]:
    """Share of the encoder's seconds saved where pictures differ in bytes (64-fold) and seconds (100-fold)."""
    chance = random.Random(given.seed)
    rows = [2 ** chance.randrange(7) for _ in range(given.items)]
    seconds = [10 ** chance.uniform(-2, 0) for _ in range(given.items)]
    trace = zipf(given.items, given.trace // 4, given.exponent, given.seed + 1)
    embeddings = {count: np.zeros((count, 16), np.float32) for count in set(rows)}
    budget = sum(rows) * 64 // 20
    result: dict[str, Any] = {"budget_bytes": budget, "share_of_all_bytes": 0.05}
    for policy in ("lru", "lfu", "cost"):
        cache = VisualKVCache(given.items, budget, policy=policy)
        for item in trace:
            if cache.lookup(str(item)) is None:
                cache.store(str(item), "image", embeddings[rows[item]], encoder_seconds=seconds[item])
        total = sum(seconds[item] * count for item, count in Counter(trace).items())
        stats = cache.stats()
        result[policy] = {
            "seconds_saved": round(stats.encoder_seconds_saved / total, 4),
            "hits": round(stats.hit_rate, 4),
        }
    return result


# --- Report -----------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    names = [line.split(":")[1].strip() for line in read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cachetools": cachetools.__version__,
    }


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines] + [""]


def report(result: dict[str, Any]) -> str:
    """The Markdown page: every number in it is from `result`."""
    where = result["machine"]
    lines = [
        "# Encoder cache: measured",
        "",
        f"`{result['command']}`",
        "",
        f"{where['cpu']}, {where['cores']} cores, load {where['load_at_start']} at the start, OMP_NUM_THREADS "
        f"{where['threads']}, Python {where['python']}, cachetools {where['cachetools']}, {where['system']}.",
        "",
    ]
    for part, write in {"agents": report_agents, "lookup": report_lookup, "traces": report_traces}.items():
        if part in result:
            lines += write(result[part])
    return "\n".join(lines).rstrip() + "\n"


def report_agents(part: dict[str, Any]) -> list[str]:
    arms = part["arms"]
    repetitions = len(arms["with"]["encoder_runs"])
    gain = statistics.median(arms["with"]["requests_per_cpu_s"]) / statistics.median(
        arms["without"]["requests_per_cpu_s"]
    )
    share = part["encoder_ms_a_picture"] * statistics.median(arms["without"]["requests_per_s"]) / 1000
    return [
        "## Agents that share pictures, on shapes-vlm (transformers engine)",
        "",
        f"{part['agents']} agents (threads), {part['requests']} requests over {part['distinct_pictures']} distinct pictures "
        f"(Zipf, exponent {part['zipf_exponent']}), both arms {repetitions} times in turns, cache empty at the start of each. "
        "Median (least to most).",
        "",
        *table(
            ["", "encoder runs", "requests/s", "requests per CPU second", "median TTFT, ms"],
            [
                [
                    f"{name} the cache",
                    max(arm["encoder_runs"]),
                    spread(arm["requests_per_s"]),
                    spread(arm["requests_per_cpu_s"]),
                    spread(arm["ttft_ms"]),
                ]
                for name, arm in arms.items()
            ],
        ),
        f"Repetitions with an answer that differs from the first run without the cache: {part['runs_with_another_answer']}.",
        "",
        f"The tower of this model takes {part['encoder_ms_a_picture']:.2f} ms a picture, about {share:.0%} of a request's time; "
        f"that share bounds what skipping it can bring here (requests per CPU second: {gain:.2f} times). What scales is the "
        "count of encoder runs; with a production tower, which takes a large part of the time to the first token, the same "
        "runs weigh more. Times were taken on a shared machine: read them with their spread.",
        "",
    ]


def report_lookup(part: dict[str, Any]) -> list[str]:
    rows = [
        [name, what, figures["p50_us"], figures["p99_us"], figures["cpu_us"]]
        for name, measured in part.items()
        if isinstance(measured, dict)
        for what, figures in measured.items()
    ]
    return [
        f"## Lookups at {part['entries']:,} entries",
        "",
        f"{part['lookups']:,} calls each, one thread, keys are SHA-256 digests computed beforehand. Microseconds. p50 and p99 are of "
        "single calls and include two readings of the clock (first line); CPU is the mean CPU time of a call in a loop without them.",
        "",
        *table(["cache", "call", "p50", "p99", "CPU"], rows),
    ]


def report_traces(part: dict[str, Any]) -> list[str]:
    rates = part["hit_rate"]
    names = list(next(iter(rates.values())))
    saving = part["encoder_seconds_saved"]
    return [
        "## Hit rates",
        "",
        f"{part['length']:,} requests over {part['items']:,} pictures of one size, Zipf exponent {part['zipf_exponent']}, budget in "
        "entries. Belady's optimum knows the future and may decline to admit.",
        "",
        *table(["trace", *names], [[trace, *(f"{rate:.3f}" for rate in by.values())] for trace, by in rates.items()]),
        "## Encoder seconds saved, pictures of different bytes and seconds",
        "",
        f"Budget {saving['share_of_all_bytes']:.0%} of all bytes ({saving['budget_bytes']:,}). Bytes vary 64-fold, seconds 100-fold, "
        "independently of each other and of popularity.",
        "",
        *table(
            ["policy", "share of encoder seconds saved", "hit rate"],
            [
                [policy, f"{saving[policy]['seconds_saved']:.3f}", f"{saving[policy]['hits']:.3f}"]
                for policy in ("lru", "lfu", "cost")
            ],
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="The encoder cache measured.")
    parser.add_argument("--parts", default="agents,lookup,traces")
    parser.add_argument("--output", type=Path, help="path without suffix; .json and .md are written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exponent", type=float, default=1.0, help="of the Zipf distributions")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--pictures", type=int, default=40)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--lookups", type=int, default=200_000)
    parser.add_argument("--evictions", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--trace", type=int, default=200_000)
    given = parser.parse_args()
    result: dict[str, Any] = {
        "command": f"python benchmarks/encoder_cache.py {shlex.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    parts = {"agents": agents_part, "lookup": lookup_part, "traces": traces_part}
    for name in given.parts.split(","):
        if name not in parts:
            parser.error(f"unknown part {name!r}: choose from {', '.join(parts)}")
        result[name] = parts[name](given)
    page = report(result)
    print(page)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        given.output.with_suffix(".md").write_text(page)


if __name__ == "__main__":
    main()
