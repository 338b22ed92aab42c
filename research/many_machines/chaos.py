"""Kills of replicas, of Valkey and of the S3 server at random, while requests go on.

The network delays, loses and refuses, too.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from dejakv.config import SemanticCacheConfig
from dejakv.errors import DejaKVError
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling
from dejakv.store.base import CorruptState
from dejakv.store.remote.bucket import BucketObjects
from dejakv.store.segment import open_object
from dejakv_models.docs import ask, make_document, prompt_of
from research.many_machines.proxy import CALM, Faults, Proxy
from research.many_machines.replica import Replica, Told
from research.many_machines.services import Services

MODEL = "docs-lm"
"""Right or wrong is told by equal tokens: any model will do."""
CONFIG = SemanticCacheConfig(costs=(1e-2, 0.0, 0.0, 0.0), memory_bytes=4 << 20)
"""Hits whenever there is state, and little of it in memory."""
STORM = Faults(delay=0.15, lost=0.05, held=0.01, failed=0.1)
LONGEST = 60.0
"""Seconds for an answer, by whichever replica; then it is counted as none."""
RETURN = 60.0
"""Seconds for which full hits are waited for."""
PURGES = 0.01
"""Share of requests before which the whole store is purged."""


def chaos(running: Services, seconds: float, prompts: int, seed: int = 0) -> dict[str, Any]:
    """Serves requests for so many seconds and checks every answer against one without a cache.

    wrong, unanswered  requests; unanswered: an error, or no answer within `LONGEST` from either
                       replica (a client asks the other one)
    slowest_s          the longest that replicas took for an answer
    longest_without_s  the longest that a request waited for a replica that runs
    torn               objects in the bucket at the end that are not whole
    recovered_s        from the return of all services until a round in which both replicas hit
                       every prompt in full; None: not in `RETURN`
    """
    wanted = _requests(prompts, seed)
    right = _uncached(wanted)
    parts = Cluster(running, seed)
    try:
        trouble = Trouble(parts, random.Random(seed))
        found = _during(parts, wanted, right, seconds, random.Random(seed + 1))
        trouble.end()
        found |= {
            "events": dict(trouble.events),
            "faults": {"s3": dict(parts.s3.done), "feed": dict(parts.feed.done)},
        }
        found |= _afterwards(parts, wanted, right, found)
        found["starts"] = sum(replica.starts for replica in parts.replicas)
    finally:
        parts.close()
    return {**found, **_objects(parts.place)}


class Cluster:
    """Two replicas of one cache, behind proxies of both services."""

    def __init__(self, running: Services, seed: int) -> None:
        self.services, self.place = running, running.place()
        ports = [urlsplit(url).port or 0 for url in (running.s3.endpoint, running.valkey.url)]
        self.s3, self.feed = (Proxy(port, seed + number) for number, port in enumerate(ports))
        config = replace(CONFIG, store=self.place, feed=f"redis://127.0.0.1:{self.feed.port}/0")
        environment = {
            **running.s3.environment,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.s3.port}",
        }
        self.replicas = [Replica(MODEL, config, environment) for _ in range(2)]
        self._turn = 0
        if not all(replica.ready(300) for replica in self.replicas):
            raise DejaKVError("a replica did not start")

    def next(self) -> Replica | None:
        """Return the replica whose turn it is, of those that answer; start dead ones again."""
        for replica in self.replicas:
            if not replica.alive:
                replica.start()
        for _ in self.replicas:
            self._turn += 1
            if (replica := self.replicas[self._turn % len(self.replicas)]).ready():
                return replica
        return None

    def ask(self, request: Request) -> tuple[Told | None, float, float]:
        """Ask as a client does, which asks the other replica when one dies.

        Returns
        -------
        tuple of Told or None, float and float
            What the client is told, None after `LONGEST`; seconds that replicas took, and seconds
            in which no replica was there.
        """
        began, away = time.monotonic(), 0.0
        told: Told | None = None
        while told is None and (left := began + LONGEST - time.monotonic()) > 0:
            if (replica := self.next()) is not None:
                told = replica.ask(request, left)
            else:
                at = time.monotonic()
                time.sleep(0.05)
                away += time.monotonic() - at
        return told, time.monotonic() - began - away, away

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()
        self.s3.close()
        self.feed.close()


class Trouble:
    """Trouble of one kind after another, in a thread of its own until `end`.

    Then everything is there again.
    """

    def __init__(self, parts: Cluster, rng: random.Random) -> None:
        self.events = Counter[str]()
        self._parts, self._random = parts, rng
        self._over = threading.Event()
        self._failed: RuntimeError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the trouble; a RuntimeError tells that a service did not come back."""
        self._over.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            self._make()
        except RuntimeError as error:
            self._failed = error

    def _make(self) -> None:
        parts, uniform = self._parts, self._random.uniform
        kinds = [self._replica, self._valkey, self._s3, self._storm]
        while not self._over.wait(uniform(0.2, 2.0)):
            self._random.shuffle(kinds)
            for kind in kinds:
                if not self._over.is_set():
                    self.events[kind.__name__.strip("_")] += 1
                    kind(parts)
                    self._over.wait(uniform(0.2, 2.0))

    def _replica(self, parts: Cluster) -> None:
        self._random.choice(parts.replicas).kill()

    def _valkey(self, parts: Cluster) -> None:
        parts.services.valkey.stop()
        self._over.wait(self._random.uniform(0.2, 3.0))
        parts.services.valkey.start()

    def _s3(self, parts: Cluster) -> None:
        parts.services.s3.stop()
        self._over.wait(self._random.uniform(0.2, 3.0))
        for left in reversed(range(3)):
            try:
                parts.services.s3.start()
                break
            except RuntimeError:  # it ended at once
                parts.services.s3.stop()
                if not left:
                    raise

    def _storm(self, parts: Cluster) -> None:
        parts.s3.faults, parts.feed.faults = STORM, replace(STORM, failed=0.0)
        self._over.wait(self._random.uniform(3.0, 8.0))
        parts.s3.faults = parts.feed.faults = CALM


def _during(
    parts: Cluster,
    wanted: Sequence[Request],
    right: Sequence[Any],
    seconds: float,
    rng: random.Random,
) -> dict[str, Any]:
    told, until = Outcomes(), time.monotonic() + seconds
    purges, without = 0, 0.0
    while time.monotonic() < until:
        if rng.random() < PURGES and (replica := parts.next()) is not None:
            purges += bool((replica.purge(LONGEST) or {}).get("prompts"))
        number = rng.randrange(len(wanted))
        answer, took, away = parts.ask(wanted[number])
        told.add(answer, right[number], took)
        without = max(without, away)
    return {**told.figures(), "purges": purges, "longest_without_s": without}


class Outcomes:
    """Counts of requests by what became of them."""

    def __init__(self) -> None:
        self.methods = Counter[str]()
        self.errors = Counter[str]()
        self.wrong = self.unanswered = 0
        self.slowest = 0.0

    def add(self, told: Told | None, right: Any, took: float) -> None:
        self.slowest = max(self.slowest, took)
        if told is None or "error" in told:
            self.unanswered += 1
            self.errors[told["error"] if told else "no answer"] += 1
            return
        self.methods[told["method"]] += 1
        self.wrong += told["token_ids"] != right

    def figures(self) -> dict[str, Any]:
        return {
            "requests": self.methods.total() + self.unanswered,
            "wrong": self.wrong,
            "unanswered": self.unanswered,
            "errors": dict(self.errors),
            "methods": dict(self.methods),
            "slowest_s": self.slowest,
        }


def _afterwards(
    parts: Cluster, wanted: Sequence[Request], right: Sequence[Any], found: Mapping[str, Any]
) -> dict[str, Any]:
    """Serve rounds of all prompts on both replicas, until one in which all hit.

    Their answers are checked, too.
    """
    began, told = time.monotonic(), Outcomes()
    recovered: float | None = None
    misses = len(wanted)
    while misses and time.monotonic() < began + RETURN:
        misses = 0
        for request, tokens in zip(wanted, right, strict=True):
            for replica in parts.replicas:
                if not replica.alive:
                    replica.start()
                answer = replica.ask(request, LONGEST) if replica.ready(LONGEST) else None
                told.add(answer, tokens, 0.0)
                misses += answer is None or answer.get("computed_tokens") != 1
        if not misses:
            recovered = time.monotonic() - began
    corrupt = sum((replica.counts() or {}).get("corrupt", 0) for replica in parts.replicas)
    return {
        "recovered_s": recovered,
        "corrupt": corrupt,
        "wrong": found["wrong"] + told.wrong,
        "unanswered": found["unanswered"] + told.unanswered,
        "requests_afterwards": told.figures()["requests"],
    }


def _objects(place: str) -> dict[str, int]:
    """Count the objects at the end, and those that are not whole."""
    bucket, torn, count = BucketObjects(place), 0, 0
    for name in list(bucket.list()):
        count += 1
        try:
            open_object(bucket.get(name), name)
        except CorruptState:
            torn += 1
    return {"objects": count, "torn": torn}


def _requests(count: int, seed: int) -> list[Request]:
    """Questions about documents, several about each, so that prompts share their beginnings."""
    rng = random.Random(seed)
    made: list[Request] = []
    while len(made) < count:
        document = make_document(rng, facts=12)
        for fact in rng.sample(document.facts, 4):
            question = ask(fact, rng)
            prompt = prompt_of(document.text, question)
            made.append(Request(f"r{len(made)}", prompt, question, sampling=Sampling(6)))
    return made[:count]


def _uncached(wanted: Sequence[Request]) -> list[Any]:
    from dejakv.engines.transformers import TransformersEngine

    plain = Pipeline(TransformersEngine.from_pretrained(MODEL, dtype="fp32", device="cpu"))
    return [tuple(plain.answer(request).token_ids) for request in wanted]
