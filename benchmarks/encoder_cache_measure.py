"""What `encoder_cache.py` measures: agents on the bundled VLM, lookups at 100,000 entries, hit rates on traces."""

import argparse
import heapq
import random
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
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
