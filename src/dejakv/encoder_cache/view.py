"""A view: the registry as one encoder of one partition sees it. This is what engines and servers hold."""

import asyncio
import hashlib
import inspect
import time
from collections.abc import Awaitable, Callable, Generator
from contextvars import copy_context
from typing import Any, NamedTuple, cast

from dejakv.encoder_cache.block import (
    MODALITIES,
    Resolution,
    VisualCacheResult,
    VisualEmbeddingBlock,
    check_content_hash,
    check_modality,
)
from dejakv.encoder_cache.eviction import Key
from dejakv.encoder_cache.registry import Registry, Wanted
from dejakv.encoder_cache.single_flight import Abandoned, Flight
from dejakv.encoder_cache.stats import EncoderCacheStats
from dejakv.encoder_cache.tensors import size_of
from dejakv.errors import InputError


def compute_content_hash(raw_bytes: bytes) -> str:
    """SHA-256 of the medium's raw bytes, 64 hexadecimal digits. InputError for no bytes: every unread file is alike."""
    if not isinstance(raw_bytes, bytes | bytearray | memoryview):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"a content hash is taken of bytes, not of {type(raw_bytes).__name__}: pass the file's bytes")
    if not raw_bytes:
        raise InputError("no bytes to hash: the picture, sound or clip is empty; check how it was read")
    return hashlib.sha256(raw_bytes).hexdigest()


class Step(NamedTuple):
    """What `get_or_compute` has to wait for, after running the encoder if it leads."""

    wanted: Wanted
    flight: Flight
    leads: bool


class EncoderView:
    """Outputs of the encoder `encoder_epoch` for the tenant `partition`. Nothing else is found, counted or cleared.

    encoder_epoch  fingerprint of the tower's and projector's weights, the processor's settings and the resolution
                   policy (`identity.epoch_of`): the same bytes under another processor never match
    encoder_model  a label for blocks
    place          applied once to what comes from disk (which is on the CPU), to bring it where the engine needs it
    """

    def __init__(
        self,
        registry: Registry,
        encoder_epoch: str,
        partition: str,
        encoder_model: str = "",
        place: Callable[[Any], Any] | None = None,
    ) -> None:
        self._registry = registry
        self.encoder_epoch = encoder_epoch
        self.partition = partition
        self.encoder_model = encoder_model
        self._place = place

    def compute_content_hash(self, raw_bytes: bytes) -> str:
        """See `compute_content_hash`."""
        return compute_content_hash(raw_bytes)

    def lookup(self, content_hash: str, modality: str = "image") -> VisualEmbeddingBlock | None:
        """The block, from memory or disk, or None. Never runs an encoder and never waits for one."""
        if modality not in MODALITIES:
            check_modality(modality)
        key = (self.partition, self.encoder_epoch, modality, content_hash)
        block = self._registry.lookup(key)
        if block is None and self._registry.tier is not None:
            return self._registry.recall(self._wanted(key, None))
        return block

    def store(
        self,
        content_hash: str,
        modality: str,
        embedding: Any,
        resolution: Resolution | None = None,
        encoder_model: str | None = None,
        encoder_seconds: float | None = None,
    ) -> VisualEmbeddingBlock | None:
        """Holds an output, in place of one of the same key, evicting what must leave for it.

        Returns the block; None if it was refused (larger than the budget, or what is pinned or the controller's
        minimum leaves no room), and then nothing has changed. `encoder_seconds` is what computing it took.
        Raises InputError for an embedding that is not 2-D or 3-D, is empty, or has NaN or infinite values.
        """
        wanted = self._wanted(self._key(content_hash, modality), resolution, encoder_model)
        return self._registry.store(wanted, embedding, encoder_seconds)

    def get_or_compute(
        self,
        content_hash: str,
        modality: str,
        compute: Callable[[], Any],
        resolution: Resolution | None = None,
    ) -> Any:
        """The embedding, computed by `compute()` if nobody has it. Of callers at once, one computes and others wait.

        If `compute` raises, its error goes to everyone who waited, nothing is kept, and the next call tries again. If
        the computing caller is interrupted (KeyboardInterrupt, cancellation), one of those who wait takes over.
        """
        steps = self._fetch(self._wanted(self._key(content_hash, modality), resolution))
        try:
            step = next(steps)
            while True:
                try:
                    if step.leads:
                        self._lead(step.wanted, step.flight, compute)
                    block = step.flight.wait()
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(block)
        except StopIteration as end:
            return end.value

    async def aget_or_compute(
        self,
        content_hash: str,
        modality: str,
        compute: Callable[[], Any] | Callable[[], Awaitable[Any]],
        resolution: Resolution | None = None,
    ) -> Any:
        """The same for tasks: an `async def` is awaited on this loop, any other `compute` runs in a thread.

        Cancelling the caller ends its waiting; the encoder run goes on, for those who wait and for those to come.
        """
        steps = self._fetch(self._wanted(self._key(content_hash, modality), resolution))
        try:
            step = next(steps)
            while True:
                try:
                    if step.leads:
                        self._start(step.wanted, step.flight, compute)
                    block = await step.flight.arrival()
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(block)
        except StopIteration as end:
            return end.value

    def serve(
        self,
        raw_bytes: bytes,
        compute: Callable[[], Any],
        modality: str = "image",
        resolution: Resolution | None = None,
        dp_mode: Callable[[], bool] = lambda: False,
    ) -> VisualCacheResult:
        """Hashes the bytes, gets or computes the output, and says what that saved."""
        content_hash = compute_content_hash(raw_bytes)
        computed: list[bool] = []

        def counted() -> Any:
            computed.append(True)
            return compute()

        embedding = self.get_or_compute(content_hash, modality, counted, resolution)
        block = self._registry.peek(self._key(content_hash, modality))
        return VisualCacheResult(
            cache_hit=not computed,
            content_hash=content_hash,
            embedding=embedding,
            reuse_count=block.access_count if block is not None else int(not computed),
            vram_saved_bytes=0 if computed else size_of(embedding),
            dp_mode_recommended=dp_mode(),
        )

    def pin(self, content_hash: str, modality: str = "image") -> bool:
        """Keeps an entry from eviction until it was unpinned as often; False if it is not held in memory."""
        return self._registry.pin(self._key(content_hash, modality))

    def unpin(self, content_hash: str, modality: str = "image") -> bool:
        """Takes one pin back; False if there is none."""
        return self._registry.unpin(self._key(content_hash, modality))

    def clear(self) -> None:
        """Drops this partition's entries, of all encoders, in memory and on disk, and its figures."""
        self._registry.clear(self.partition)

    def stats(self) -> EncoderCacheStats:
        """This partition's figures."""
        return self._registry.stats(self.partition, 0)

    def _fetch(self, wanted: Wanted) -> Generator[Step, VisualEmbeddingBlock, Any]:
        """The body of both faces: yields what to wait for (and whether to run the encoder first), is sent what came."""
        while True:
            block, flight, leads = self._registry.begin(wanted)
            if flight is None:
                return cast(VisualEmbeddingBlock, block).embedding
            try:
                if leads:
                    return (yield Step(wanted, flight, True)).embedding
                with self._registry.waiting(flight) as arrived:
                    block = yield Step(wanted, flight, False)
                    arrived(block)
                    return block.embedding
            except Abandoned:
                continue

    def _lead(self, wanted: Wanted, flight: Flight, compute: Callable[[], Any]) -> None:
        with self._registry.lead(wanted, flight) as run:
            if not run.recall():
                run.output = compute()
                if inspect.iscoroutine(run.output):
                    run.output.close()
                    raise InputError("`compute` is asynchronous: pass an `async def` to `await aget_or_compute(...)`")

    async def _alead(self, wanted: Wanted, flight: Flight, compute: Callable[[], Awaitable[Any]]) -> None:
        with self._registry.lead(wanted, flight) as run:
            if self._registry.tier is None or not await asyncio.to_thread(run.recall):
                run.started = time.perf_counter()
                run.output = await compute()

    def _start(self, wanted: Wanted, flight: Flight, compute: Callable[[], Any]) -> None:
        """Starts the encoder where no caller's cancellation reaches it."""
        loop = asyncio.get_running_loop()
        try:
            if inspect.iscoroutinefunction(compute) or inspect.iscoroutinefunction(type(compute).__call__):
                task = loop.create_task(self._alead(wanted, flight, compute))
                flight.led_by(task)
                task.add_done_callback(lambda _: self._registry.abandon(flight))  # cancelled before it began
            else:
                context = copy_context()
                loop.run_in_executor(None, lambda: context.run(self._lead, wanted, flight, compute))
        except BaseException:
            self._registry.abandon(flight)
            raise

    def _key(self, content_hash: str, modality: str) -> Key:
        check_modality(modality)
        check_content_hash(content_hash)
        return (self.partition, self.encoder_epoch, modality, content_hash)

    def _wanted(self, key: Key, resolution: Resolution | None, encoder_model: str | None = None) -> Wanted:
        label = self.encoder_model if encoder_model is None else encoder_model
        return Wanted(key, resolution, label, self._place)
