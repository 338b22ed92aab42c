"""Tenants that probe each other, what a process still holds of a request, and an application behind vLLM's middleware."""

import asyncio
import gc
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
from hypothesis import settings

from dejakv.adopt.adopter import AdoptRecord, AdoptRequest, PromptAdopter
from dejakv.adopt.middleware import AdoptMiddleware
from dejakv.adopt.routes import CLIENT
from dejakv.build import build_guards
from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.decide.levels.exact import ExactTextCache
from dejakv.decide.levels.latent import EmbeddingCache
from dejakv.decide.levels.semantic import SemanticTextCache
from dejakv.decide.plan import Decision
from dejakv.engines.base import Completion, Prepared
from dejakv.identity import MediumSpan
from dejakv.request import Media, Request
from dejakv.store.base import RawTensor, StateInfo
from dejakv.store.store import Store

PARTITIONS = (
    "a", "A", "а", "á", "a\u0301", "Ａ", "a ", " a", "", ".", "..", "../a", "a/b", "a\\b", "/etc/passwd", "a\0b", "a\0",
    "default", "key-1", "x" * 5000, "x" * 5001, "ﬁ", "fi", "%", "_", "a%", "*", "?", "[a]", "None", "NULL",
    "'; DROP TABLE chunks;--", "{a}", "p:a", "a:p", "\u202ea", "\ud7ff", "🙂", "a\nb", "a\r", "e1", "exact",
)  # fmt: skip
EPOCHS = ("e1", "e2", "base+lora:1", "base+lora:2", "")
WORDS = "ann lives in paris bob rome where does live red car blue".split()
PICTURES = tuple(Media(bytes([number]) * 30) for number in range(3))


class WordEncoder:
    """Counts words: texts of the same words are alike. `encoded` counts its uses."""

    dim = 32
    fingerprint = "words"

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, text: str) -> Any:
        self.encoded += 1
        vector = np.full(self.dim, 1e-3, np.float32)
        for word in text.lower().split():
            vector[hashlib.md5(word.encode()).digest()[0] % self.dim] += 1
        return vector / np.linalg.norm(vector)


def mark(partition: str, epoch: str) -> np.float32:
    """The number that fills a tenant's state."""
    return np.float32(int(hashlib.sha256(f"{len(partition)}|{partition}|{epoch}".encode()).hexdigest()[:5], 16))


def cache_over(store: Store, **settings: Any) -> HierarchicalCache:
    """A cache with every level, that accepts whatever is a little alike."""
    plain: dict[str, Any] = {"reuse": "adopt", "similarity_threshold": 0.3, "lexical_guard": False, "min_gain": 0}
    config = SemanticCacheConfig(embedding_layers=("prompt:32:0.3",), **{**plain, **settings})
    encoder = WordEncoder()
    levels = [
        ExactTextCache(),
        EmbeddingCache(config.embedding_layers, "any"),
        SemanticTextCache(encoder, config.similarity_threshold),
    ]
    guards = build_guards(config, levels)

    def embed(request: Request) -> dict[str, Any]:
        return {"prompt": encoder.encode(request.chunk)}

    return HierarchicalCache(store, levels, guards, config, embed=embed, background=False)


def prepared(partition: str, words: Sequence[int], pictures: Sequence[int] = ()) -> Prepared:
    """Twenty tokens that all prompts share, a picture among them if there is one, and the words."""
    text = " ".join(WORDS[word] for word in words)
    media = tuple(PICTURES[number] for number in pictures)
    spans = tuple(MediumSpan(2 + 4 * place, 3, item.digest) for place, item in enumerate(media))
    tokens = (*[7] * 20, *(10 + word for word in words))
    return Prepared(Request("r", text, text, media, partition), tokens, spans)


def computed(asked: Prepared, epoch: str) -> Completion:
    """What an engine would have computed: rows of state with the tenant's mark."""
    shape = (2, 2, 1, len(asked.token_ids), 2)
    state = RawTensor(np.full(shape, mark(asked.request.partition, epoch), np.float32), "F32")
    return Completion("t", (1,), len(asked.token_ids), len(asked.token_ids), capture=lambda: state)


@dataclass
class Tenants:
    """Asks and stores for many tenants. `crossed` says what was seen of another; it must stay empty."""

    cache: HierarchicalCache
    crossed: list[str] = field(default_factory=list[str])
    probes: int = 0
    found: int = 0
    bodies: int = 0

    def ask(self, partition: str, epoch: str, words: Sequence[int], pictures: Sequence[int], *, keep: bool) -> None:
        """One request: looked up, planned, its donors read, and stored if it is to be kept."""
        asked = replace(prepared(partition, words, pictures), epoch=epoch)
        decision = self.cache.find(asked)
        found = decision.donor_search
        self.probes += 1
        digests = [span.digest for span in asked.spans]
        prefix = found.prefix[1] if found.prefix else None
        for donor in (*found.donors, *([prefix] if prefix else [])):
            self.found += 1
            self._check_owner(donor, partition, epoch)
        if self.cache.config.media == "exact":
            for donor in found.donors:
                if [span.digest for span in donor.spans] != digests:
                    self.crossed.append(f"a donor of other pictures: {donor.id}")
        if found.prefix and found.prefix[0].tokens > 2 and [s.digest for s in found.prefix[1].spans] != digests:
            self.crossed.append(f"a prefix over other pictures: {found.prefix}")
        read = {donor.id: donor for donor in (*decision.plan.donors, *([prefix] if prefix else []))}
        for donor in read.values():
            self._read(donor, partition, epoch)
        if keep:
            self._store(asked, decision, epoch)

    def clear(self, partition: str) -> None:
        """Clears a tenant: all of it goes, and nobody else's figures change."""
        store = self.cache.store
        others = [name for name in {meta.partition for meta in store.metas()} if name != partition]
        before = {name: (self.cache.stats(name), store.stats(name)) for name in others}
        own = store.stats(partition).entries
        if self.cache.clear(partition) != own:
            self.crossed.append(f"clearing {partition[:20]!r} removed another number than it had")
        if store.stats(partition).entries or list(store.metas(partition)):
            self.crossed.append(f"clearing {partition[:20]!r} left something")
        for name, figures in before.items():
            if (self.cache.stats(name), store.stats(name)) != figures:
                self.crossed.append(f"clearing {partition[:20]!r} changed the figures of {name[:20]!r}")

    def look_around(self, partition: str, epoch: str) -> None:
        """What a tenant's own listing shows is its own."""
        for meta in self.cache.store.metas(partition):
            self._check_owner(meta, partition, meta.epoch)
        for meta in self.cache.store.metas(partition, epoch):
            self._check_owner(meta, partition, epoch)

    def _check_owner(self, meta: StateInfo, partition: str, epoch: str) -> None:
        if (meta.partition, meta.epoch) != (partition, epoch):
            self.crossed.append(f"{meta.partition[:20]!r} {meta.epoch!r} for {partition[:20]!r} {epoch!r}")

    def _read(self, donor: StateInfo, partition: str, epoch: str) -> None:
        stored_state = self.cache.store.get(donor.id)
        if stored_state is not None:
            self.bodies += 1
            if not np.all(stored_state.tensor.data == mark(partition, epoch)):
                self.crossed.append(f"state of another in {donor.id} for {partition[:20]!r}")

    def _store(self, asked: Prepared, decision: Decision, epoch: str) -> None:
        exact = decision.exact if decision.plan.approximate else decision.plan
        self.cache.keep(asked, decision, exact, computed(asked, epoch))


def wander(tenants: Tenants, rng: random.Random, probes: int) -> None:
    """So many random requests, now and then a clearing or a look around."""
    for _ in range(probes):
        partition, epoch = rng.choice(PARTITIONS), rng.choice(EPOCHS)
        words = [rng.randrange(len(WORDS)) for _ in range(rng.randrange(2, 5))]
        pictures = rng.sample(range(len(PICTURES)), rng.choice([0, 0, 1, 2]))
        tenants.ask(partition, epoch, words, pictures, keep=rng.random() < 0.5)
        if rng.random() < 0.004:
            tenants.clear(partition)
        if rng.random() < 0.004:
            tenants.look_around(partition, epoch)


@dataclass(frozen=True)
class Trace:
    """What a request is recognised by: texts, runs of token ids, and the sizes of arrays of pixels."""

    texts: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    pixels: Callable[[Any], bool] = lambda _: False

    def is_in(self, found: object) -> bool:
        if isinstance(found, str):
            return any(text in found for text in self.texts)
        if isinstance(found, bytes | bytearray):
            return any(text.encode() in found for text in self.texts)
        if isinstance(found, tuple | list):
            return bool(self.tokens) and _has_run(found, self.tokens)
        if isinstance(found, np.ndarray) and found.dtype.kind in "iu":
            return bool(self.tokens) and _has_run(found.reshape(-1).tolist(), self.tokens)
        return self.pixels(found)


def remains(roots: Iterable[object], trace: Trace) -> list[str]:
    """Where the trace was found: the types on the way to it, once for each place."""
    gc.collect()
    seen: set[int] = set()
    waiting: list[tuple[object, str]] = [(root, type(root).__name__) for root in roots]
    found: list[str] = []
    while waiting:
        one, way = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if trace.is_in(one):
            found.append(way)
        waiting += [(inner, f"{way}.{type(inner).__name__}") for inner in _inside(one)]
    return found


def frames_of(names: Iterable[str]) -> list[object]:
    """The local variables of the running threads of these names."""
    import threading

    frames = sys._current_frames()
    held: list[object] = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0) if thread.name in set(names) else None
        while frame is not None:
            held += frame.f_locals.values()
            frame = frame.f_back
    return held


def _inside(one: object) -> Sequence[object]:
    if isinstance(one, ModuleType | type | CodeType | FrameType | str | bytes | int | float):
        return ()
    if isinstance(one, FunctionType):  # not its globals: they lead everywhere
        cells = [cell.cell_contents for cell in one.__closure__ or () if _filled(cell)]
        return [*cells, *(one.__defaults__ or ())]
    return gc.get_referents(one)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _has_run(values: Sequence[Any], run: tuple[int, ...]) -> bool:
    starts = [place for place, value in enumerate(values) if type(value) is int and value == run[0]]
    return any(tuple(values[place : place + len(run)]) == run for place in starts)


PATHS = sorted(CLIENT)
CHAT = "/v1/chat/completions"
MANY = settings(max_examples=150, deadline=None)


class Nothing(PromptAdopter):
    """Finds nothing: what is tested is who gets through, and with what."""

    def __init__(self) -> None:
        pass

    def find(self, asked: AdoptRequest) -> tuple[str, AdoptRecord]:
        return asked.text, AdoptRecord()

    def learn(self, asked: AdoptRequest, provenance: AdoptRecord) -> None:
        pass


class Upstream:
    """Keeps whatever reaches it."""

    def __init__(self):
        self.reached = []

    async def __call__(self, scope, receive, send):
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        self.reached.append((scope, body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def app_of(keys=("alpha", "beta"), **more):
    upstream = Upstream()
    return AdoptMiddleware(upstream, Nothing(), keys, **more), upstream


def send_to(app, path, *, method="POST", headers=(), root="", chunks=(b"{}",)):
    """Status and answer of one request, and how many parts of its body were read."""
    left, sent = list(chunks), []

    async def receive():
        if not left:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    headers = [*headers]
    if not any(name.lower() == b"content-type" for name, _ in headers):
        headers.append((b"content-type", b"application/json"))
    scope = {"type": "http", "method": method, "path": path, "root_path": root, "headers": headers}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], sent[1]["body"], len(chunks) - len(left)


def bearer(key):
    return [(b"authorization", b"Bearer " + key)]


def posted(body, key="alpha", path=CHAT):
    """What reaches vLLM of a body, None if it is refused."""
    app, upstream = app_of()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, _, _ = send_to(app, path, headers=bearer(key.encode()), chunks=(raw,))
    assert (status == 200) == bool(upstream.reached)
    assert status < 500
    return json.loads(upstream.reached[0][1]) if upstream.reached else None
