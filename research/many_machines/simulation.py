"""What 100 replicas of one cache of 10 million segments would do and cost.

The trace is generated.
"""

import functools
import random
import resource
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import log2
from pathlib import Path
from typing import Any

import numpy as np

from dejakv.identity import exact_key
from dejakv.store import changes
from dejakv.store.base import RawTensor, StateInfo, encode_meta
from dejakv.store.budgets import Budget
from dejakv.store.catalog import Catalog, SegmentSlice
from dejakv.store.objects import MemoryObjects
from dejakv.store.prefix_keys import PrefixKeys
from dejakv.store.reconcile import reconcile
from dejakv.store.remote.feed import HEADER_SECONDS, ChangeFeed, Header
from dejakv.store.remote.replicas import FEED_SECONDS, SHARE
from dejakv.store.segment import (
    DESCRIPTION,
    MAX_SEGMENT_TOKENS,
    NEVER,
    Segment,
    cut_segments,
    encode,
)
from research.many_machines.services import Services
from research.replay.generate import BLOCK, World

PROMPT = 4 * MAX_SEGMENT_TOKENS
SEGMENTS_A_BLOCK = BLOCK // MAX_SEGMENT_TOKENS
MONTH = 30 * 86_400
PAGE = 1000
"""Objects in a page of a listing."""
PAGE_SECONDS = 0.05
LENGTHS = (256, 512, 1024, 2048, 3072, 4096, 5120, 6144, 8192)
"""Tokens of the prompts whose descriptions are told."""
LETTERS = 4.5
"""Of a token's text."""
_TEXTS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Scale:
    """What is simulated.

    segments, replicas  of the cache
    own_segments        that a replica keeps in memory and on disk in front of the bucket
    requests_a_second   of one replica
    put, get, listed    dollars for 1,000 requests (Amazon S3 Standard, us-east-1, in 2026)
    """

    segments: int = 10_000_000
    replicas: int = 100
    own_segments: int = 2_000
    requests_a_second: float = 1.0
    put: float = 0.005
    get: float = 0.0004
    listed: float = 0.005


# Measured


def catalogs(folder: Path, sizes: Sequence[int], lookups: int = 300) -> list[dict[str, float]]:
    """Measure catalogs on disk of these sizes, four segments to a prompt of 1,024 tokens.

    The prompts have their text. The figures are bytes of a segment; microseconds to add one, to
    find a stored prompt, and to see that another is not stored; milliseconds to open the catalog,
    and to compare it with a listing of as many names, without the service's time; and the most
    memory that the names take so far.
    """
    rows: list[dict[str, float]] = []
    (path := folder / "catalog.sqlite").touch()
    held, asked, spent = 0, list[tuple[int, ...]](), 0.0
    rng = np.random.default_rng(0)
    with closing(Catalog(path)) as catalog:
        for size in sizes:
            began = time.process_time()
            while held < size:
                with catalog.transaction() as sql:
                    for _ in range(200):
                        ids = tuple(rng.integers(0, 49_152, PROMPT).tolist())
                        held += _add(sql, ids)
                        if len(asked) < 20_000:
                            asked.append(ids)
            spent += time.process_time() - began
            catalog.empty_log()
            picks = random.Random(size).sample(asked, min(lookups, len(asked)))
            objects = _Listed(name for (name,) in catalog.read("SELECT name FROM segments"))
            before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            listing = _ms(lambda objects=objects: reconcile(objects, catalog, Budget(), 2.0))
            others = [tuple(rng.integers(0, 49_152, PROMPT).tolist()) for _ in picks]
            rows.append(
                {
                    "segments": held,
                    "bytes_a_segment": path.stat().st_size / held,
                    "add_us": 1e6 * spent / held,
                    "find_us": _lookup(catalog, picks, PROMPT),
                    "miss_us": _lookup(catalog, others, 0),
                    "open_ms": _ms(lambda: Catalog(path).close()),
                    "listing_ms": listing,
                    "listing_mb": (
                        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before / 1e6
                    ),
                }
            )
    return rows


class _Listed(MemoryObjects):
    """Shared objects with these names."""

    shared = True

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._names = list(names)

    def list(self) -> Iterator[str]:
        return iter(self._names)


def _ms(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - began)


def _add(sql: Any, ids: tuple[int, ...]) -> int:
    """Indexes a prompt as a replica does that hears of it; the number of its segments."""
    meta = StateInfo(
        exact_key("p", "e", ids, ()), "p", "e", ids, " and" * PROMPT, "what is asked", created=1.0
    )
    pieces: list[SegmentSlice] = []
    for part in cut_segments(meta, PrefixKeys("p", "e", ids), 0, PROMPT, 4096):
        one = replace(part, name=secrets.token_hex(16), nbytes=4096 * MAX_SEGMENT_TOKENS)
        pieces.append(
            SegmentSlice(changes.add_segment(sql, one), one.name, one.start, one.stop, one.stop)
        )
    about = encode_meta(meta)
    described = Segment(
        secrets.token_hex(16),
        "p",
        "e",
        DESCRIPTION,
        0,
        0,
        entry_id=meta.id,
        created=1.0,
        about=about,
    )
    pieces.append(SegmentSlice(changes.add_segment(sql, described), described.name, 0, 0, 0))
    changes.add_entry(sql, about, (meta.id, "p", "e", "kv"), 1.0, NEVER, pieces)
    return len(pieces)


def _lookup(catalog: Catalog, prompts: Sequence[tuple[int, ...]], tokens: int) -> float:
    """Median microseconds, the names of a prompt's blocks included."""
    spent: list[float] = []
    for ids in prompts:
        began = time.perf_counter()
        found = catalog.longest_prefix(PrefixKeys("p", "e", ids), PROMPT, 2.0)
        spent.append(1e6 * (time.perf_counter() - began))
        assert (found[-1].stop if found else 0) == tokens
    return float(np.median(spent))


def extrapolated(rows: Sequence[Mapping[str, float]], name: str, segments: int) -> float:
    """Extrapolate a figure to so many segments.

    It grows with each doubling as it does between the smallest and the largest catalog.
    """
    first, last = rows[0], rows[-1]
    doublings = log2(last["segments"] / first["segments"]) or 1.0
    return last[name] + max(0.0, last[name] - first[name]) / doublings * log2(
        segments / last["segments"]
    )


def told_bytes(
    services: Services, lengths: Sequence[int], prompts: int = 4
) -> list[dict[str, Any]]:
    """Measure the bytes that Valkey sends to a reader, by the length of a prompt.

    They are those for a segment of 256 tokens, and for the description of a prompt. The rows tell
    also whether the headers are in the feed.
    """
    import redis

    rng, text = random.Random(0), texts()
    name, rows = services.place(), list[dict[str, Any]]()
    client: Any = redis.Redis.from_url(services.valkey.url)

    def sent() -> int:
        return client.info("stats")["total_net_output_bytes"]

    with (
        closing(ChangeFeed(services.valkey.url, name)) as teller,
        closing(ChangeFeed(services.valkey.url, name)) as hearer,
        closing(client),
    ):
        teller.publish("put", ["first"])
        hearer.receive()  # it began before the first event: a listing
        own = -sent() + sent()
        for tokens in lengths:
            made = [_headers(rng, tokens, text) for _ in range(prompts)]
            for kind, told in (
                ("segment", [one for objects in made for one in objects[:-1]]),
                ("description", [objects[-1] for objects in made]),
            ):
                for one, header in told:
                    teller.publish("put", [one], header)
                before, heard = sent(), dict[str, Any]()
                while len(heard) < len(told):
                    heard |= (hearer.receive() or ({},))[0]
                nbytes = (sent() - before - own) / len(told)
                rows.append(
                    {
                        "kind": kind,
                        "tokens": tokens,
                        "bytes": nbytes,
                        "in_feed": all(heard.values()),
                    }
                )
    return rows


@functools.cache
def texts() -> str:
    return " ".join(file.read_text() for file in sorted(_TEXTS.rglob("*.md")))


def _headers(rng: random.Random, tokens: int, text: str) -> list[tuple[str, Header]]:
    """Of the objects of a prompt whose state nobody has, by name; the description is the last."""
    ids, at, letters = (
        tuple(rng.choices(range(49_152), k=tokens)),
        rng.randrange(len(text) // 2),
        round(LETTERS * tokens),
    )
    text = text[at : at + letters]
    meta = StateInfo(
        exact_key("p", "e", ids, ()), "p", "e", ids, text, "what is asked", created=1.0
    )
    state = cut_segments(meta, PrefixKeys("p", "e", ids), 0, len(ids), 4096)
    described = Segment(
        "", "p", "e", DESCRIPTION, 0, 0, entry_id=meta.id, created=1.0, about=encode_meta(meta)
    )
    made: list[tuple[str, Header]] = []
    for part in (*state, described):
        tensor = RawTensor(np.zeros((2, 1, 1, part.stop - part.start, 2), np.float32), "F32")
        one, buffers = encode(replace(part, name=secrets.token_hex(16)), tensor)
        made.append((one.name, (bytes(buffers[0]), one.nbytes)))
    return made


# Replayed


def replayed(
    scale: Scale, requests: int, told: Sequence[Mapping[str, Any]], seed: int = 0
) -> dict[str, Any]:
    """Replay requests through one shared cache and through caches of a hundredth each.

    Requests go anywhere. The figures, counted in the second half of the trace, are the hit rates
    (share of prompt tokens); of a request's segments those put, found, and read from the bucket
    since the replica has no copy; and of its description the bytes told, and whether its header is
    too large for the feed, by the next longer one in `told`.
    """
    world, rng = World(random.Random(seed)), random.Random(seed)
    shared = Blocks(scale.segments // SEGMENTS_A_BLOCK)
    apart = [
        Blocks(scale.segments // SEGMENTS_A_BLOCK // scale.replicas) for _ in range(scale.replicas)
    ]
    copies = [Blocks(max(1, scale.own_segments // SEGMENTS_A_BLOCK)) for _ in range(scale.replicas)]
    tokens = hit = hit_apart = put = found = read = counted = large = 0
    described = 0.0
    for number in range(requests):
        call = world.next()
        blocks, length = call["hash_ids"], call["input_length"]
        replica = rng.randrange(scale.replicas)
        held = shared.held(blocks)
        alone = apart[replica].held(blocks)
        missing = sum(block not in copies[replica].all for block in blocks[:held])
        for cache in (shared, apart[replica], copies[replica]):
            cache.use(blocks)
        if 2 * number >= requests:
            counted += 1
            tokens += length
            hit += min(held * BLOCK, length - 1)
            hit_apart += min(alone * BLOCK, length - 1)
            put += len(blocks) - held
            found += held
            read += missing
            row = next((row for row in told if row["tokens"] >= length), told[-1])
            described += row["bytes"]
            large += not row["in_feed"]
    return {
        "requests": requests, "segments_at_the_end": SEGMENTS_A_BLOCK * len(shared.all),
        "evicted": SEGMENTS_A_BLOCK * shared.evicted,
        "hit_rate": hit / tokens, "hit_rate_apart": hit_apart / tokens,
        "a_request": {
            "tokens": tokens / counted, "put": SEGMENTS_A_BLOCK * put / counted + 1,
            "found": SEGMENTS_A_BLOCK * found / counted, "read": SEGMENTS_A_BLOCK * read / counted,
            "described": described / counted, "large": large / counted,
        },
    }  # fmt: skip


class Blocks:
    """LRU over so many blocks; of a prompt the end leaves first."""

    def __init__(self, most: int) -> None:
        self.all: OrderedDict[int, None] = OrderedDict()
        self.evicted = 0
        self._most = most

    def held(self, blocks: Sequence[int]) -> int:
        """Leading blocks that are there."""
        for at, block in enumerate(blocks):
            if block not in self.all:
                return at
        return len(blocks)

    def use(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.all[block] = None
            self.all.move_to_end(block)
        while len(self.all) > self._most:
            self.all.popitem(last=False)
            self.evicted += 1


# Worked out


def simulated(
    services: Services,
    folder: Path,
    sizes: Sequence[int],
    requests: int,
    scale: Scale | None = None,
) -> dict[str, Any]:
    """Everything, with what was measured, replayed and worked out apart."""
    scale = scale or Scale()
    rows, told = catalogs(folder, sizes), told_bytes(services, LENGTHS)
    segment = float(np.median([row["bytes"] for row in told if row["kind"] == "segment"]))
    trace = replayed(scale, requests, [row for row in told if row["kind"] == "description"])
    each = trace["a_request"]
    rate = scale.requests_a_second * scale.replicas
    objects = scale.segments
    took = objects / PAGE * PAGE_SECONDS
    listings = scale.replicas / (max(FEED_SECONDS, SHARE * took) + took)
    a_second = {
        "put": rate * each["put"],
        "get": rate * each["read"],
        # Every other replica reads what is too large for the feed.
        "heads": rate * each["large"] * (scale.replicas - 1),
        "listed": listings * objects / PAGE,
    }
    by_names = rate * (each["put"] + each["large"]) * (scale.replicas - 1)
    prices = {"put": scale.put, "get": scale.get, "heads": scale.get, "listed": scale.listed}
    sent = rate * ((each["put"] - 1) * segment + each["described"])
    return {
        "scale": scale.__dict__,
        "catalogs": rows,
        "at_full_size": {
            **{name: extrapolated(rows, name, scale.segments) for name in ("find_us", "miss_us")},
            "catalog_gb": rows[-1]["bytes_a_segment"] * scale.segments / 1e9,
            "index_cores": rate * each["put"] * extrapolated(rows, "add_us", scale.segments) / 1e6,
        },
        "trace": trace,
        "feed": {
            "told": told,
            "events_a_second": rate * each["put"],
            "headers_mb": HEADER_SECONDS * sent / 1e6,
            "mb_a_second_a_replica": sent / 1e6,
            "mb_a_second": sent * scale.replicas / 1e6,
        },
        "bucket": {
            "a_second": a_second,
            "dollars_a_month": {
                name: MONTH * many / 1000 * prices[name] for name, many in a_second.items()
            },
            "dollars_for_heads_by_names": MONTH * by_names / 1000 * scale.get,
        },
    }
