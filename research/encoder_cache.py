"""Agents that share pictures with and without the encoder cache, and the time of its lookups at 100,000 entries.

    python -m research.encoder_cache --output docs/results/encoder_cache.json

`--parts agents,lookup` measures some of it and keeps the rest of the file.
"""

import argparse
import json
import random
import shlex
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dejakv.encoder_cache import VisualKVCache, compute_content_hash
from research.machine import machine, versions

ONE = np.zeros((1, 1))


def agents_workload(agents: int, pictures: int, requests: int, exponent: float, seed: int) -> list[list[Any]]:
    """Requests of each agent: a picture by Zipf, and one of the questions about it."""
    from dejakv.request import Request
    from dejakv_models.shapes import ShapesDataset, prompt

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
    towers: list[float] = []
    for repetition in range(given.repetitions):
        for name in sorted(arms, reverse=bool(repetition % 2)):
            cache.clear()
            runs[name].append(serve(arms[name], work))
            if name == "with":
                towers.append(cache.stats().encoder_seconds / cache.stats().encoder_runs * 1000)
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
        "encoder_ms_a_picture": [round(tower, 3) for tower in towers],
    }


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
        for policy in ("lfu", "lru")
    }
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


PARTS = {"agents": agents_part, "lookup": lookup_part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="agents,lookup")
    parser.add_argument("--output", type=Path, help="JSON file; parts that are not measured keep their figures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exponent", type=float, default=1.0, help="of the Zipf distribution")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--pictures", type=int, default=40)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--lookups", type=int, default=200_000)
    parser.add_argument("--evictions", type=int, default=20_000)
    given = parser.parse_args()
    result = json.loads(given.output.read_text()) if given.output and given.output.is_file() else {}
    command = f"python -m research.encoder_cache {shlex.join(sys.argv[1:])}".strip()
    measured = {"command": command, "machine": machine(), "versions": versions(), "date": time.strftime("%Y-%m-%d")}
    for name in given.parts.split(","):
        if name not in PARTS:
            parser.error(f"unknown part {name!r}: choose from {', '.join(PARTS)}")
        result[name] = {**PARTS[name](given), "measured": measured}
        print(json.dumps({name: result[name]}, indent=1))
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
