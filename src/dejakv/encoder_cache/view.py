"""A view: the registry as one encoder of one partition sees it, for engines and servers."""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dejakv.encoder_cache.block import (
    MODALITIES,
    Resolution,
    VisualCacheResult,
    VisualEmbeddingBlock,
    check_content_hash,
    check_modality,
)
from dejakv.encoder_cache.errand import Wanted
from dejakv.encoder_cache.eviction import Key
from dejakv.encoder_cache.fetch import Compute, adrive, alone, drive
from dejakv.encoder_cache.registry import Registry
from dejakv.encoder_cache.stats import EncoderCacheStats
from dejakv.encoder_cache.tensors import size_of
from dejakv.errors import InputError
from dejakv.identity import check_partition


def compute_content_hash(raw_bytes: bytes) -> str:
    """SHA-256 of the medium's raw bytes, 64 hexadecimal digits. InputError for empty bytes: all unread files would be the same."""
    if not isinstance(raw_bytes, bytes | bytearray | memoryview):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"a content hash needs bytes, not {type(raw_bytes).__name__}: pass the file's bytes")
    if not raw_bytes:
        raise InputError("no bytes to hash: the picture, sound or clip is empty; check how it was read")
    return hashlib.sha256(raw_bytes).hexdigest()


class EncoderView:
    """Outputs of the encoder `encoder_epoch` for the tenant `partition`. Outputs of others are not found, counted or cleared.

    encoder_epoch  fingerprint of the tower's and projector's weights, the processor's settings and the resolution
                   policy (`identity.epoch_of`): the same bytes under another processor never match
    encoder_model  a label for blocks
    place          applied once to outputs from disk (which are on the CPU), to move them to the engine's device
    """

    def __init__(
        self,
        registry: Registry,
        encoder_epoch: str,
        partition: str,
        encoder_model: str = "",
        place: Callable[[Any], Any] | None = None,
    ) -> None:
        check_partition(partition)
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
        return self._registry.take(key) or self._registry.recall(self._wanted(key, None))

    def wait_for(
        self, content_hash: str, modality: str = "image", timeout_s: float = 30.0, poll_s: float = 0.005
    ) -> VisualEmbeddingBlock | None:
        """The block as soon as it is available, also from another process that shares the disk tier; None after the timeout.

        For readers that have no encoder (disaggregated serving). Counted once: as a hit or a miss.
        """
        return self._registry.await_output(self._wanted(self._key(content_hash, modality), None), timeout_s, poll_s)

    def store(
        self,
        content_hash: str,
        modality: str,
        embedding: Any,
        resolution: Resolution | None = None,
        encoder_model: str | None = None,
        encoder_seconds: float | None = None,
    ) -> VisualEmbeddingBlock | None:
        """Stores an output. It replaces one of the same key, and other entries are evicted if necessary.

        Returns the block; None if it was refused (larger than the budget, or the controller's minimum
        leaves no room), and then nothing has changed. `encoder_seconds` is the time of the computation.
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
        """The embedding, computed by `compute()` if it is missing. Of concurrent callers, one computes and the others wait.

        If `compute` raises, all waiting callers get its error, nothing is kept, and the next call tries again. If the
        computing caller is interrupted (KeyboardInterrupt, cancellation), one of the waiting callers takes over.
        """
        wanted = self._wanted(self._key(content_hash, modality), resolution)
        block = self._registry.take(wanted.key) or drive(self._registry, [wanted], alone(compute))[0]
        return block.embedding

    async def aget_or_compute(
        self,
        content_hash: str,
        modality: str,
        compute: Callable[[], Any] | Callable[[], Awaitable[Any]],
        resolution: Resolution | None = None,
    ) -> Any:
        """The same for tasks: an `async def` is awaited on this loop, any other `compute` runs in a thread.

        Cancelling the caller ends its waiting; the encoder run continues, for waiting and later callers.
        """
        wanted = self._wanted(self._key(content_hash, modality), resolution)
        block = self._registry.take(wanted.key) or (await adrive(self._registry, [wanted], alone(compute)))[0]
        return block.embedding

    def get_or_compute_many(self, content_hashes: Sequence[str], modality: str, compute: Compute) -> list[Any]:
        """The embeddings, in order. `compute(indices)` is called at most once, for those that are missing and
        not being computed; it returns one embedding for each index (a list, or one stacked tensor)."""
        blocks = drive(self._registry, self._all_wanted(content_hashes, modality), compute)
        return [block.embedding for block in blocks]

    def serve(
        self,
        raw_bytes: bytes,
        compute: Callable[[], Any],
        modality: str = "image",
        resolution: Resolution | None = None,
        dp_mode: Callable[[], bool] = lambda: False,
    ) -> VisualCacheResult:
        """Hashes the bytes, gets or computes the output, and reports the saving."""
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

    def remove(self, content_hash: str, modality: str = "image") -> bool:
        """Drops one output from memory; False if it is not there."""
        return self._registry.remove(self._key(content_hash, modality))

    def clear(self) -> None:
        """Drops this partition's entries, of all encoders, in memory and on disk, and its figures."""
        self._registry.clear(self.partition)

    def stats(self) -> EncoderCacheStats:
        """This partition's figures."""
        return self._registry.stats(self.partition, 0)

    def _key(self, content_hash: str, modality: str) -> Key:
        check_modality(modality)
        check_content_hash(content_hash)
        return (self.partition, self.encoder_epoch, modality, content_hash)

    def _wanted(self, key: Key, resolution: Resolution | None, encoder_model: str | None = None) -> Wanted:
        label = self.encoder_model if encoder_model is None else encoder_model
        return Wanted(key, resolution, label, self._place)

    def _all_wanted(self, content_hashes: Sequence[str], modality: str) -> list[Wanted]:
        return [self._wanted(self._key(content_hash, modality), None) for content_hash in content_hashes]
