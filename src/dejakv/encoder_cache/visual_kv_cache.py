"""Encoder outputs computed once, shared by all requests with the same picture, sound or clip."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from dejakv.encoder_cache.encode_once import OutputRegistry, OutputRequest, QueueingController
from dejakv.encoder_cache.outputs import Key, Resolution, VisualEmbeddingBlock, check_key
from dejakv.encoder_cache.stats import EncoderCacheStats
from dejakv.errors import ConfigError, InputError
from dejakv.identity import check_partition
from dejakv.request import DEFAULT_PARTITION
from dejakv.store.budgets import PartitionBudgets, PolicyName
from dejakv.store.open import open_store
from dejakv.store.store import Store

_QUEUE = 256
"""Outputs that may wait to be written to disk: a clip's frames come at once."""


@dataclass(frozen=True, eq=False)
class VisualCacheResult:
    """Answer to one request for an encoder output.

    Attributes
    ----------
    cache_hit : bool
        Whether the encoder did not run for this call.
    content_hash : str
        SHA-256 of the medium's bytes.
    embedding : array
        The encoder's output.
    reuse_count : int
        How often this output has been served without the encoder, including this time.
    vram_saved_bytes : int
        Bytes of the embedding if it was served without the encoder, else 0.
    dp_mode_recommended : bool
        Whether vLLM should encode data-parallel.
    """

    cache_hit: bool
    content_hash: str
    embedding: Any = field(repr=False)
    reuse_count: int
    vram_saved_bytes: int
    dp_mode_recommended: bool


def compute_content_hash(raw_bytes: bytes) -> str:
    """Return the SHA-256 of a medium's raw bytes, 64 hexadecimal digits.

    Raises
    ------
    InputError
        For empty bytes (all unread files would be the same), and for other types.
    """
    if not isinstance(raw_bytes, bytes | bytearray | memoryview):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"a content hash needs bytes, not {type(raw_bytes).__name__}: pass the file's bytes"
        )

    if not raw_bytes:
        raise InputError(
            "no bytes to hash: the picture, sound or clip is empty; check how it was read"
        )

    return hashlib.sha256(raw_bytes).hexdigest()


@dataclass(frozen=True)
class DpModeRecommendation:
    """Recommendation about data-parallel encoding, and its reason."""

    recommended: bool
    reason: str

    FLAG: ClassVar[tuple[str, str]] = ("--mm-encoder-tp-mode", "data")

    @property
    def flag(self) -> tuple[str, ...]:
        """Option for `vllm serve`, empty without a recommendation."""
        return self.FLAG if self.recommended else ()

    def __str__(self) -> str:
        return (
            f"{' '.join(self.FLAG)}: {self.reason}"
            if self.recommended
            else f"no change: {self.reason}"
        )


def recommend_dp_mode(
    batch_image_count: int, image_resolution: Resolution = (512, 512), encoder_depth: int = 27
) -> DpModeRecommendation:
    """Recommend whether vLLM's vision encoder runs data-parallel.

    Then each rank encodes whole pictures instead of slices of each. The first rule that applies
    decides: ten or more pictures of at most 256 x 256 no; two or more pictures, pictures of at
    least 512 x 512, or an encoder of 45 layers or more yes; else no.

    Parameters
    ----------
    batch_image_count : int
        Pictures in a batch of requests.
    image_resolution : tuple[int, int]
        (width, height) in pixels.
    encoder_depth : int
        Layers of the encoder.

    Raises
    ------
    InputError
        For a negative count, a resolution that is not two positive numbers, or a depth below 1.
    """
    if (
        batch_image_count < 0
        or len(image_resolution) != 2
        or min(image_resolution) < 1
        or encoder_depth < 1
    ):
        raise InputError(
            f"no recommendation for {batch_image_count} images of {image_resolution} and an "
            "encoder of depth "
            f"{encoder_depth}: pass a count of 0 or more, (width, height) in pixels and the "
            "number of layers"
        )

    width, height = image_resolution
    # The order of these rules is a part of the contract: the first that applies decides.
    size = f"{width}x{height}"
    if batch_image_count >= 10 and width <= 256 and height <= 256:
        return DpModeRecommendation(
            False, f"{batch_image_count} images of {size}: many small ones gain little"
        )

    if batch_image_count >= 2:
        return DpModeRecommendation(
            True, f"{batch_image_count} images in a batch can be spread over the ranks"
        )

    if width >= 512 and height >= 512:
        return DpModeRecommendation(
            True, f"images of {size} are large: slicing them costs more talk than work"
        )

    if encoder_depth >= 45:
        return DpModeRecommendation(
            True, f"an encoder of {encoder_depth} layers synchronizes in each of them"
        )

    return DpModeRecommendation(
        False, f"{batch_image_count} image of {size}, {encoder_depth} layers: nothing to gain"
    )


class EncoderView:
    """Outputs of one encoder for one tenant. Outputs of others are not found, counted or cleared.

    Parameters
    ----------
    registry : OutputRegistry
        Where the outputs are.
    encoder_epoch : str
        Fingerprint of the tower's and projector's weights, the processor's settings and the
        resolution policy (`identity.epoch_of`): the same bytes under another processor never match.
    partition : str
        The tenant.

    Raises
    ------
    InputError
        For a partition that is no valid text. Methods that take a content hash raise it for an
        empty one and for an unknown modality.
    """

    def __init__(
        self,
        registry: OutputRegistry,
        encoder_epoch: str,
        partition: str,
    ) -> None:
        check_partition(partition)
        self._registry = registry
        self.encoder_epoch = encoder_epoch
        self.partition = partition

    def compute_content_hash(self, raw_bytes: bytes) -> str:
        """Return the SHA-256 of a medium's bytes, as the function `compute_content_hash` does."""
        return compute_content_hash(raw_bytes)

    def lookup(self, content_hash: str, modality: str = "image") -> VisualEmbeddingBlock | None:
        """Return the block from memory or disk, or None. Never runs or awaits an encoder."""
        key = self._key(content_hash, modality)
        # Memory does not count a miss, so that one lookup counts once.
        return self._registry.take(key) or self._registry.load_from_disk(OutputRequest(key))

    def wait_for(
        self,
        content_hash: str,
        modality: str = "image",
        timeout_s: float = 30.0,
        poll_s: float = 0.005,
    ) -> VisualEmbeddingBlock | None:
        """Wait for a block, also from another process that shares the disk; None after the timeout.

        It is for readers that have no encoder (disaggregated serving), and counts once: as a hit or
        a miss.
        """
        return self._registry.wait_for_output(
            OutputRequest(self._key(content_hash, modality)), timeout_s, poll_s
        )

    def store(
        self,
        content_hash: str,
        modality: str,
        embedding: Any,
        resolution: Resolution | None = None,
        encoder_model: str = "",
        encoder_seconds: float | None = None,
    ) -> VisualEmbeddingBlock | None:
        """Store an output in place of one of the same key, and evict others if necessary.

        Parameters
        ----------
        content_hash, modality : str
            Key of the output.
        embedding : array, shape [tokens, hidden] or [levels, tokens, hidden]
            The output, numpy or torch.
        resolution : tuple[int, int], optional
            (width, height) in pixels.
        encoder_model : str
            A label for people.
        encoder_seconds : float, optional
            Time of the computation.

        Returns
        -------
        VisualEmbeddingBlock or None
            The block. None if the request forbids storing, and if memory refused it: it is larger
            than the budget, or the controller's minimum leaves no room. Then memory has not
            changed, and a disk keeps the output all the same.

        Raises
        ------
        InputError
            For an embedding that is not 2-D or 3-D, is empty, or has NaN or infinite values, and
            for a negative time.
        """
        request = OutputRequest(self._key(content_hash, modality), resolution, encoder_model)
        return self._registry.keep(request, embedding, encoder_seconds)

    def get_or_compute(
        self,
        content_hash: str,
        modality: str,
        compute: Callable[[], Any],
        resolution: Resolution | None = None,
    ) -> Any:
        """Return the embedding, and compute it by `compute()` if it is missing.

        Of concurrent callers one computes, and the others wait. If `compute` raises, all waiting
        callers get its error, nothing is kept, and the next call tries again. If the computing
        caller is interrupted (KeyboardInterrupt, cancellation), one of the waiting callers starts
        again.

        Raises
        ------
        Exception
            The error of `compute`.
        InputError
            If `compute` asks the cache for its own key, or returns no embedding.
        """
        return self._encoded(content_hash, modality, compute, resolution).embedding

    def serve(
        self,
        raw_bytes: bytes,
        compute: Callable[[], Any],
        modality: str = "image",
        resolution: Resolution | None = None,
        batch_image_count: int = 1,
        encoder_depth: int = 27,
    ) -> VisualCacheResult:
        """Do all steps for one medium: hash, lookup, encoding if necessary, advice on DP mode.

        The advice is that of `recommend_dp_mode` for `batch_image_count` pictures of the resolution
        (512 x 512 if none is given). The errors are those of `get_or_compute`.
        """
        content_hash = compute_content_hash(raw_bytes)
        # Filled if this call, and not another caller's, runs the encoder.
        computed: list[bool] = []

        def counted() -> Any:
            computed.append(True)
            return compute()

        block = self._encoded(content_hash, modality, counted, resolution)
        return VisualCacheResult(
            cache_hit=not computed,
            content_hash=content_hash,
            embedding=block.embedding,
            # A refused block is in no cache and counts no use: this one is its first.
            reuse_count=max(block.access_count, int(not computed)),
            vram_saved_bytes=0 if computed else block.estimated_vram_bytes,
            dp_mode_recommended=self.get_dp_mode_recommendation(
                batch_image_count, resolution or (512, 512), encoder_depth
            ),
        )

    def dp_mode(
        self,
        batch_image_count: int,
        image_resolution: Resolution = (512, 512),
        encoder_depth: int = 27,
    ) -> DpModeRecommendation:
        """Recommend whether vLLM encodes data-parallel (`recommend_dp_mode`), and count a yes."""
        recommendation = recommend_dp_mode(batch_image_count, image_resolution, encoder_depth)
        self._registry.recommended(self.partition, recommendation.recommended)
        return recommendation

    def get_dp_mode_recommendation(
        self,
        batch_image_count: int,
        image_resolution: Resolution = (512, 512),
        encoder_depth: int = 27,
    ) -> bool:
        """Return whether `dp_mode` recommends data-parallel encoding."""
        return self.dp_mode(batch_image_count, image_resolution, encoder_depth).recommended

    def remove(self, content_hash: str, modality: str = "image") -> bool:
        """Drop one output from memory, and return whether it was there."""
        return self._registry.drop(self._key(content_hash, modality))

    def clear(self) -> None:
        """Drop this partition's figures, and its entries of all encoders in memory and on disk."""
        self._registry.clear(self.partition)

    def stats(self) -> EncoderCacheStats:
        """Return this partition's figures."""
        return self._registry.stats(self.partition)

    def _encoded(
        self,
        content_hash: str,
        modality: str,
        compute: Callable[[], Any],
        resolution: Resolution | None,
    ) -> VisualEmbeddingBlock:
        return self._registry.get_or_encode(
            OutputRequest(self._key(content_hash, modality), resolution), compute
        )

    def _key(self, content_hash: str, modality: str) -> Key:
        check_key(modality, content_hash)
        return (self.partition, self.encoder_epoch, modality, content_hash)


class VisualKVCache(OutputRegistry, EncoderView):
    """Registry of encoder outputs with one budget and several views. Thread-safe.

    It is itself the view of a program with one encoder and one tenant (`encoder_epoch=""`, the
    default partition). Engines use `view(encoder_epoch, partition)`. There is no admission filter:
    every output that fits is kept.

    Parameters
    ----------
    max_entries, max_vram_bytes : int
        The budgets, for all partitions together.
    queueing_controller : QueueingController, optional
        Gives the fewest entries that evictions may leave.
    policy : {"lfu", "lru"}
        Eviction order: least used first, with ageing, or least recently used; ties by recency. See
        `MemoryTier`.
    disk : Store, str or Path, optional
        A folder, or a `Store`, whose outputs outlive the process and are shared by all processes
        that use it (on /dev/shm: shared memory). None: memory alone.
    disk_bytes : int
        Budget of that folder, for all processes together; 0: none.
    feed : str, optional
        Where `disk` is the address of a bucket: as of `open_store`.
    check_finite : bool
        Refuse embeddings with NaN or infinity; False keeps them as they are.
    ttl : float
        Seconds for which an output may be used from its computation on, 0 without a limit.
    parts : PartitionBudgets, optional
        What each partition has of the budgets in proportion, so that a full one evicts its own
        entries alone. None: one budget for all.

    Raises
    ------
    ConfigError
        For a budget below 1, an unknown policy, or a `ttl` that is no time.
    StoreError
        If the disk cannot be opened as a store.

    Examples
    --------
    >>> import numpy
    >>> cache = VisualKVCache(max_entries=2)
    >>> picture = compute_content_hash(b"the bytes of a picture")
    >>> cache.get_or_compute(picture, "image", lambda: numpy.ones((4, 8), "float32")).shape
    (4, 8)
    >>> cache.lookup(picture).access_count, cache.stats().encoder_runs
    (1, 1)
    """

    def __init__(
        self,
        max_entries: int = 100,
        max_vram_bytes: int = 4 * 1024**3,
        queueing_controller: QueueingController | None = None,
        policy: PolicyName = "lfu",
        *,
        disk: Store | str | Path | None = None,
        disk_bytes: int = 0,
        feed: str | None = None,
        check_finite: bool = True,
        ttl: float = 0.0,
        parts: PartitionBudgets | None = None,
    ) -> None:
        if max_entries < 1 or max_vram_bytes < 1:
            raise ConfigError(
                f"max_entries={max_entries} and max_vram_bytes={max_vram_bytes} must both be 1 or "
                "more: "
                "to run without an encoder cache, do not pass one to the engine"
            )

        if policy not in get_args(PolicyName):
            raise ConfigError(
                f"unknown eviction policy {policy!r}: use one of {', '.join(get_args(PolicyName))}"
            )

        if not 0 <= ttl < math.inf:
            raise ConfigError(f"ttl={ttl} is no time: give a number of seconds, or 0 for no limit")

        self.max_entries = max_entries
        self.max_vram_bytes = max_vram_bytes

        if disk is not None and not isinstance(disk, Store):
            disk = open_store(disk, max_bytes=disk_bytes, queue=_QUEUE, feed=feed)
        budget = (parts or PartitionBudgets()).scaled(max_vram_bytes, max_entries)
        OutputRegistry.__init__(
            self, budget, policy, disk, queueing_controller, check_finite=check_finite, ttl=ttl
        )
        # The registry is its own view, for programs with one encoder and one tenant.
        EncoderView.__init__(self, self, "", DEFAULT_PARTITION)

    def view(
        self,
        encoder_epoch: str,
        partition: str = DEFAULT_PARTITION,
    ) -> EncoderView:
        """Return the view of one encoder and partition. Views are cheap and keep no state.

        Parameters
        ----------
        encoder_epoch : str
            Fingerprint of the encoder.
        partition : str
            Partition of the outputs.

        Returns
        -------
        EncoderView
            Outputs of this encoder and partition in this cache.
        """
        return EncoderView(self, encoder_epoch, partition)

    def get_cache_stats(self, partition: str | None = None) -> dict[str, Any]:
        """Return the figures by their exported names; see docs/reference/metrics.md.

        Parameters
        ----------
        partition : str, optional
            Partition of the figures. None takes all partitions.

        Returns
        -------
        dict[str, Any]
            Figures by name.
        """
        return self.stats(partition).as_dict()

    def flush(self) -> None:
        """Wait until everything stored so far is on disk. Without a disk there is nothing to do."""
        if self.disk is not None:
            self.disk.flush()

    def close(self) -> None:
        """Flush and close the store on disk. The outputs in memory stay usable."""
        if self.disk is not None:
            self.disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
