"""Which media's encoder outputs are at hand, found in threads by the content of what the encoder would get.

vLLM files encoder outputs under an identifier that a client may have chosen. Here an identifier only leads to the content's
digest, for requests whose own content was looked at, and an identifier that was seen with two contents leads nowhere: another
picture's output is never served, nor filed in its place.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from cachetools import FIFOCache

from dejakv.encoder_cache import EncoderView
from dejakv.engines.vllm.identity import media_digest, partition_of

REMEMBERED = 10_000


@dataclass(frozen=True)
class Sight:
    """One medium of one request: where its output is filed, and the output if somebody has it."""

    epoch: str
    digest: str
    partition: str
    modality: str
    embedding: Any = None


class EncoderFinder:
    """Thread-safe.

    view_of    the registry as one partition sees it in one epoch
    epoch      under which outputs are looked for and filed; `reset` sets another one
    timeout_s  a lookup that takes longer is a miss
    """

    def __init__(self, view_of: Callable[[str, str], EncoderView], epoch: str, timeout_s: float) -> None:
        self._view_of = view_of
        self._epoch = epoch
        self._timeout = timeout_s
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="dejakv-media")
        self._lookups: dict[tuple[str, int], tuple[Future[Sight] | None, float]] = {}
        self._sights: FIFOCache[str, Sight | None] = FIFOCache(REMEMBERED)
        self._looked_at: set[str] = set()
        self._lock = threading.Lock()

    def ready(self, request: Any) -> bool:
        """Starts the lookups of a request's media; True when none is running any more. `sight` then speaks of this request's."""
        self._looked_at = set()
        if _switched_off(request):
            return True
        done, unknown = True, set[str]()
        partition = partition_of(request.cache_salt)
        for index, feature in enumerate(request.mm_features):
            if feature.data is None or (request.lora_request is not None and feature.identifier != feature.mm_hash):
                unknown.add(feature.identifier)
                continue  # no pixels to know it by, or an output that an adapter has changed
            key = (request.request_id, index)
            if key not in self._lookups:
                future = self._pool.submit(self._look, self._epoch, feature.data, feature.modality, partition)
                self._lookups[key] = (future, time.monotonic() + self._timeout)
            future, deadline = self._lookups[key]
            if future is None:
                continue
            if future.done():
                self._note(feature.identifier, future.result())
                self._lookups[key] = (None, deadline)
                continue
            unknown.add(feature.identifier)
            if time.monotonic() < deadline:
                done = False
        self._looked_at = {feature.identifier for feature in request.mm_features} - unknown
        return done

    def sight(self, identifier: str) -> Sight | None:
        """What is known of a medium of the request that `ready` was last asked about; None if nothing, if it was not looked at, or
        if its identifier has stood for two contents or two partitions."""
        return self._sights.get(identifier) if identifier in self._looked_at else None

    def reset(self, epoch: str) -> None:
        """Other weights, or weights that are not known yet: what was found before is not used."""
        with self._lock:
            self._epoch = epoch
            self._sights.clear()
        self._lookups.clear()

    def forget(self, request: Any) -> None:
        """The request is over."""
        for index, feature in enumerate(request.mm_features):
            self._lookups.pop((request.request_id, index), None)
            self.used(feature.identifier)
            if keeps_nothing(request):
                with self._lock:
                    self._sights.pop(feature.identifier, None)

    def used(self, identifier: str) -> None:
        """Its output is with the worker now: do not hold it here."""
        with self._lock:
            sight = self._sights.get(identifier)
            if sight is not None and sight.embedding is not None:
                self._sights[identifier] = replace(sight, embedding=None)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look(self, epoch: str, data: Any, modality: str, partition: str) -> Sight:
        digest = media_digest(data)
        try:
            block = self._view_of(epoch, partition).lookup(digest, modality)
        except Exception:  # a registry that fails costs an encoder run
            block = None
        return Sight(epoch, digest, partition, modality, block.embedding if block is not None else None)

    def _note(self, identifier: str, sight: Sight) -> None:
        with self._lock:
            known = self._sights.get(identifier, sight)
            if known is None or (known.digest, known.partition) != (sight.digest, sight.partition):
                self._sights[identifier] = None
            else:
                self._sights[identifier] = sight


def keeps_nothing(request: Any) -> bool:
    """Whether nothing of a request may be kept (`kv_transfer_params.dejakv.no_store`). What cannot be read may have asked for it."""
    asked = (request.kv_transfer_params or {}).get("dejakv")
    return asked is not None and (not isinstance(asked, dict) or asked.get("no_store", False) is not False)


def _switched_off(request: Any) -> bool:
    """`ec_transfer_params.dejakv.mode` of a request may be `off`; whatever else it is changes nothing."""
    asked = (request.ec_transfer_params or {}).get("dejakv")
    return isinstance(asked, dict) and asked.get("mode") == "off"
