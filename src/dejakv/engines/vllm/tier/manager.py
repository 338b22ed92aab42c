# pyright: reportMissingImports=false
"""`DejaKVTier`, the class that vLLM's offloading creates beside its host memory.

vLLM cuts a prompt's pages into offload chunks, here *chunks*: the pages of one or more blocks, on
all ranks, under the hash of all tokens up to their end and of the `cache_salt`. A chunk is stored
as a named tensor, whose name is made of the epoch, the partition and that hash. The tier's methods
run in vLLM's scheduler and only order what threads do.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from dejakv.engines.vllm.generations import WeightGenerations
from dejakv.engines.vllm.settings import ConnectorSettings, RequestOptions, TierSettings
from dejakv.errors import ConfigError
from dejakv.identity import digest_of
from dejakv.store.base import OFFLOAD_CHUNK, RawTensor, StateInfo, StoredState
from dejakv.store.open import store_of

log = logging.getLogger("dejakv.vllm")

LOAD_THREADS, STORE_THREADS = 8, 2
SUSPECTS = 4096
"""Chunks stored last, which leave again if the weights turn out to have changed meanwhile."""
STORE_QUEUE = 16
"""Chunks that may always wait to be stored; beside them a quarter of vLLM's host memory may."""
CLOSE_S = 30.0
"""Longest wait for chunks that are being stored when the server ends, in seconds."""

METRICS = {
    "vllm:dejakv_tier_damaged": ("Stored chunks that were damaged or missing.", ()),
    "vllm:dejakv_tier_refused": ("Chunks that were not stored, by reason.", ("reason",)),
    "vllm:dejakv_tier_evicted": ("Stored chunks that were evicted, by limit.", ("limit",)),
}
_OPTIONS = ConnectorSettings()
"""Choices that a request has here: modes `exact` and `off`, `no_store` and `ttl`."""


@dataclass
class ServerIdentity:
    """What a tier must know of its server and requests, and vLLM tells its connector alone.

    Attributes
    ----------
    generations : WeightGenerations
        Epoch of the weights.
    partition : str or None
        Partition of the request that is arriving. None: nothing of it is stored or looked up.
    """

    generations: WeightGenerations
    partition: str | None = None


SERVER: ContextVar[ServerIdentity | None] = ContextVar("dejakv_tier_server", default=None)
"""The server whose connector is being created."""


@dataclass(frozen=True)
class RequestTerms:
    """Terms on which a request's chunks may be stored and loaded.

    Attributes
    ----------
    partition : str
        Whose request it is.
    may_load, may_store : bool
        Whether its chunks are looked up, and stored.
    ttl : float
        Seconds after which its chunks expire, by the request's wish; 0: none. All tiers of a server
        share the terms, and each has a limit of its own.
    """

    partition: str
    may_load: bool
    may_store: bool
    ttl: float


_NOTHING = RequestTerms("", may_load=False, may_store=False, ttl=0.0)


@dataclass(frozen=True)
class _ChunkJob:
    """A job of vLLM, with the outcome of each chunk: its seconds, None after a failure."""

    order: TransferJob
    chunks: Sequence[Future[float | None]]


class _Lookups(AsyncLookupManager):
    """Looks chunks up in a thread, those of one step together."""

    def __init__(self, tier_type: str, is_stored: Callable[[Any, Any], bool]) -> None:
        # Before the thread starts.
        self._is_stored = is_stored
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[Any], req_context: Any) -> Iterable[bool]:
        """Tell of each chunk whether it is stored."""
        return [self._is_stored(key, req_context) for key in keys]


class DejaKVTier(SecondaryTierManager):
    """Secondary tier of vLLM's offloading over a store.

    `SecondaryTierManager` documents the methods. A store that is full, slow, gone or damaged costs
    misses.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type, backpressure_detector, locality
        As vLLM's own tiers.
    **settings
        The other keys of the tier's configuration (`TierSettings`).

    Raises
    ------
    ConfigError
        A key is wrong, or the server's connector is not `DejaKVOffloadingConnector`.
    StoreError
        The store cannot be used.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        server = SERVER.get()
        if server is None:
            raise ConfigError(
                "vLLM's OffloadingConnector does not tell a tier which weights are served: set "
                'kv_connector to "DejaKVOffloadingConnector" and kv_connector_module_path to '
                '"dejakv.engines.vllm.tier"'
            )
        if locality not in (None, *(each.value for each in Locality)):
            raise ConfigError(f"locality={locality!r} is unknown: give LOCAL or REMOTE")

        self.locality = None if locality is None else Locality(locality)
        self._settings = TierSettings.from_extra(settings)
        self._server = server
        self._store = store_of(self._settings.cache_config(), memory_fill="read")

        self._jobs: dict[int, _ChunkJob] = {}
        self._most_waiting = max(STORE_QUEUE, len(primary_kv_view) // 4)
        self._crowded_out = 0
        self._suspects: deque[str] = deque(maxlen=SUSPECTS)
        # Chunks to be removed. The thread that removes them alone takes out of it.
        self._spoiled: deque[str] = deque()
        self._shown: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._loads = ThreadPoolExecutor(LOAD_THREADS, "dejakv-tier-load")
        self._stores = ThreadPoolExecutor(STORE_THREADS, "dejakv-tier-store")
        self._removals = ThreadPoolExecutor(1, "dejakv-tier-remove")
        self._lookups = _Lookups(tier_type, self._is_stored)

    # Requests

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Note the terms of a request."""
        partition = self._server.partition
        options = RequestOptions.from_params(req_context.kv_transfer_params, _OPTIONS)
        if options.problem:
            log.warning("a request runs without stored chunks: %s", options.problem)

        known = partition is not None
        req_context.set_state(
            RequestTerms(
                partition or "",
                known and options.mode != "off",
                known and not options.no_store,
                options.ttl or 0.0,
            )
        )
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget what was looked up for a request."""
        self._lookups.cleanup(req_context.req_id)

    # Lookups

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Return whether a chunk is stored, as far as a thread has found out."""
        unsafe = self._server.generations.problem or self._spoiled
        if unsafe or not _terms(req_context).may_load:
            return LookupResult.MISS
        stored = self._lookups.lookup(key, req_context)
        if stored is None:
            return LookupResult.RETRY
        return LookupResult.HIT if stored else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        """Hand this step's lookups to the thread."""
        self._lookups.flush()

    def _is_stored(self, key: Any, req_context: Any) -> bool:
        return self._store.meta(self._id(key, _terms(req_context).partition)) is not None

    def _id(self, key: Any, partition: str, epoch: str | None = None) -> str:
        epoch = self._server.generations.epoch if epoch is None else epoch
        return (
            f"{OFFLOAD_CHUNK}-{digest_of(epoch, partition, str(self.block_size_bytes), key.hex())}"
        )

    # Transfers

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read chunks into host memory, several at once."""
        terms = _terms(job_metadata.req_context)
        epoch = self._server.generations.epoch
        until = time.monotonic() + self._settings.load_timeout_s
        self._submit(
            job_metadata,
            self._loads,
            partial(self._load_chunk, terms=terms, epoch=epoch, until=until),
        )

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store chunks from host memory, as far as the request's terms allow."""
        generations, terms = self._server.generations, _terms(job_metadata.req_context)
        waiting = sum(len(job.chunks) for job in self._jobs.values() if not job.order.is_promotion)
        # What waits is pinned in host memory.
        crowded = waiting >= self._most_waiting
        if crowded:
            self._crowded_out += len(job_metadata.keys)
        if not terms.may_store or generations.problem or crowded:
            self._jobs[job_metadata.job_id] = _ChunkJob(job_metadata, ())
            return
        work = partial(
            self._store_chunk, terms=terms, epoch=generations.epoch, generation=generations.number
        )
        self._submit(job_metadata, self._stores, work)

    def _submit(
        self, order: TransferJob, pool: ThreadPoolExecutor, work: Callable[..., float | None]
    ) -> None:
        chunks = [
            pool.submit(_logged, work, key, int(number))
            for key, number in zip(order.keys, order.chunk_ids, strict=True)
        ]
        self._jobs[order.job_id] = _ChunkJob(order, chunks)

    def _row(self, number: int) -> NDArray[np.uint8]:
        # A view for each use: one that stays would keep vLLM from giving back the memory.
        return np.asarray(self._primary_kv_view)[number].view(np.uint8)

    def _load_chunk(
        self, key: Any, number: int, *, terms: RequestTerms, epoch: str, until: float
    ) -> float | None:
        begun = time.monotonic()
        stored = self._store.get(self._id(key, terms.partition, epoch), until)
        # The name may come from a bucket that others write to: the content says what it is.
        if (
            stored is None
            or (stored.meta.kind, stored.meta.partition, stored.meta.epoch)
            != (OFFLOAD_CHUNK, terms.partition, epoch)
            or (stored.tensor.dtype, stored.tensor.shape) != ("U8", (self.block_size_bytes,))
        ):
            return None
        self._row(number)[:] = stored.tensor.data
        return time.monotonic() - begun

    def _store_chunk(
        self, key: Any, number: int, *, terms: RequestTerms, epoch: str, generation: int
    ) -> float | None:
        begun = time.monotonic()
        id = self._id(key, terms.partition, epoch)
        generations = self._server.generations
        # A change of weights was noticed while this waited.
        if generations.number != generation:
            return None
        # Other processes on this store compute the same prompts.
        if self._store.meta(id) is None:
            lifetimes = [each for each in (self._settings.ttl, terms.ttl) if each]
            meta = StateInfo(
                id,
                terms.partition,
                epoch,
                (),
                prompt="",
                chunk="",
                kind=OFFLOAD_CHUNK,
                ttl=min(lifetimes, default=0.0),
            )
            if not self._store.put(StoredState(meta, RawTensor(self._row(number), "U8"))):
                return None
            self._suspects.append(id)
            # A change of weights was noticed while this was being stored.
            if generations.number != generation:
                self._spoiled.append(id)
                self._removals.submit(self._remove_spoiled)
                return None
        return time.monotonic() - begun

    def get_finished_jobs(self) -> Iterator[JobResult]:
        """Yield the results of jobs whose chunks have all ended."""
        for job in list(self._jobs.values()):
            if not all(chunk.done() for chunk in job.chunks):
                continue
            order = self._jobs.pop(job.order.job_id).order
            seconds = [None if each.cancelled() else each.result() for each in job.chunks]
            done = [key for key, time in zip(order.keys, seconds, strict=False) if time is not None]
            failed = [key for key, time in zip(order.keys, seconds, strict=False) if time is None]
            if order.is_promotion:
                # Else the scheduler would order the same load again and again.
                self._lookups.mark_miss(failed)
            yield JobResult(
                order.job_id,
                not failed,
                tuple(done) if order.is_promotion and failed and done else None,
                sum(filter(None, seconds)),
                len(done) * self.block_size_bytes,
            )

    def drain_jobs(self) -> None:
        """Give up what has not begun, and wait until no thread uses host memory."""
        chunks = [chunk for job in self._jobs.values() for chunk in job.chunks]
        wait([chunk for chunk in chunks if not chunk.cancel()])
        if self._spoiled:
            self._removals.submit(self._remove_spoiled)

    # Weights

    def forget_suspects(self) -> None:
        """Remove the chunks stored last: other weights than the epoch's may have computed them."""
        self._spoiled.extend(self._suspects.popleft() for _ in range(len(self._suspects)))
        # Neither by the engine loop nor behind what waits to be stored.
        self._removals.submit(self._remove_spoiled)

    def _remove_spoiled(self) -> None:
        """Remove what is to be removed. What cannot be removed stays for a reset, or the end."""
        for _ in range(len(self._spoiled)):
            id = self._spoiled[0]
            if not self._store.delete(id) and self._store.meta(id) is not None:
                log.warning("%s of changed weights cannot be removed: nothing is loaded", id)
                self._spoiled.append(id)
            self._spoiled.popleft()

    # Figures and end

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return the tier's counters on `/metrics`, beside those of vLLM for every tier."""
        return {
            name: OffloadingCounterMetadata(about, labels)
            for name, (about, labels) in METRICS.items()
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call, or None without any."""
        figures = self._store.stats(content=False)
        damaged, refused, evicted = METRICS
        totals = Counter[tuple[str, tuple[str, ...]]]({(damaged, ()): figures.corrupt})
        totals.update({(refused, (each,)): n for each, n in figures.refused.items()})
        totals[refused, ("crowded",)] += self._crowded_out
        totals.update({(evicted, (each,)): n for each, n in figures.evictions.items()})
        news, self._shown = totals - self._shown, totals

        stats = OffloadingConnectorStats()
        for (name, labels), count in news.items():
            stats.increase_counter(name, count, labels)
        return stats if news else None

    def shutdown(self) -> None:
        """Store what is ordered as far as time allows, and close the store."""
        wait([chunk for job in self._jobs.values() for chunk in job.chunks], CLOSE_S)
        self._lookups.shutdown()
        # What has begun ends first: afterwards vLLM gives the memory back.
        for pool in (self._loads, self._stores):
            pool.shutdown(cancel_futures=True)
        self._jobs.clear()
        self._removals.submit(self._remove_spoiled)
        self._removals.shutdown()
        self._store.close()


def _terms(req_context: Any) -> RequestTerms:
    return req_context.get_state(RequestTerms) or _NOTHING


def _logged(work: Callable[..., float | None], key: Any, number: int) -> float | None:
    """Return how long a chunk took; None after a failure, which is logged."""
    try:
        return work(key, number)
    # An error that a future keeps would keep the frames' views of host memory.
    except Exception as error:
        log.error("a chunk was not moved: %s", error, exc_info=error)
        return None
