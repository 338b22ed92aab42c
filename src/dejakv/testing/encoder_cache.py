"""Conformance suites for the encoder cache: its tiers, and whatever claims to be a view of one.

class TestMine(TierTests):
    def make(self) -> DiskTier: return MyTier()
"""

import threading
import time
from typing import Any

import numpy as np
import pytest

from dejakv.encoder_cache import DiskTier, EncoderView, VisualEmbeddingBlock
from dejakv.encoder_cache.outputs import Key
from dejakv.errors import InputError

KEY: Key = ("tenant", "epoch", "image", "a" * 64)


def block_of(embedding: Any, seconds: float | None = 0.5) -> VisualEmbeddingBlock:
    """A block of this embedding, as the cache makes it for `KEY`."""
    return VisualEmbeddingBlock(
        content_hash=KEY[3],
        modality=KEY[2],
        resolution=(640, 480),
        embedding=embedding,
        encoder_model="tower",
        created_at=time.monotonic(),
        estimated_vram_bytes=embedding.nbytes,
        encoder_seconds=seconds,
    )


class TierTests:
    """What every tier must do. `make` returns a new, empty tier each time."""

    def make(self) -> DiskTier:
        raise NotImplementedError("a conformance suite needs `make`: return an empty tier")

    @pytest.fixture
    def tier(self) -> Any:
        tier = self.make()
        yield tier
        tier.close()

    def test_empty_tier_has_nothing(self, tier: DiskTier) -> None:
        assert tier.load(KEY) == (None, False)

    @pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8", ">f4", "|u1", "<i8", "<i4", "|b1"])
    @pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (1, 1)])
    def test_what_was_saved_comes_back(self, tier: DiskTier, dtype: str, shape: tuple[int, ...]) -> None:
        embedding = (np.arange(np.prod(shape)).reshape(shape) % 7).astype(dtype)
        tier.save(KEY, block_of(embedding))
        tier.flush()
        block = tier.load(KEY)[0]
        assert block is not None
        assert block.embedding.dtype == embedding.dtype
        np.testing.assert_array_equal(block.embedding, embedding)
        assert (block.content_hash, block.modality, block.resolution) == (KEY[3], "image", (640, 480))
        assert (block.encoder_model, block.encoder_seconds) == ("tower", 0.5)
        assert block.estimated_vram_bytes == embedding.nbytes
        assert block.access_count == 0

    def test_what_comes_back_is_the_callers_own(self, tier: DiskTier) -> None:
        tier.save(KEY, block_of(np.ones((2, 4), np.float32)))
        tier.flush()
        first = tier.load(KEY)[0]
        assert first is not None
        first.embedding[:] = 7
        second = tier.load(KEY)[0]
        assert second is not None
        assert second.embedding.max() == 1

    @pytest.mark.parametrize("field", range(4))
    def test_any_other_key_finds_nothing(self, tier: DiskTier, field: int) -> None:
        tier.save(KEY, block_of(np.ones((2, 4), np.float32)))
        tier.flush()
        partition, epoch, modality, content_hash = (
            {2: "video"}.get(field, part + "x") if number == field else part for number, part in enumerate(KEY)
        )
        other = (partition, epoch, modality, content_hash)
        assert tier.load(other)[0] is None
        assert tier.load(KEY)[0] is not None

    def test_the_later_block_of_a_key_stays(self, tier: DiskTier) -> None:
        for value in (1, 2):
            tier.save(KEY, block_of(np.full((2, 4), value, np.float32)))
        tier.flush()
        block = tier.load(KEY)[0]
        assert block is not None
        assert block.embedding.max() == 2

    def test_clear_forgets_one_partition_even_what_was_just_saved(self, tier: DiskTier) -> None:
        other = ("other", *KEY[1:])
        tier.save(KEY, block_of(np.ones((2, 4), np.float32)))
        tier.save(other, block_of(np.ones((2, 4), np.float32)))
        tier.clear("tenant")
        assert tier.load(KEY)[0] is None
        assert tier.load(other)[0] is not None
        tier.clear(None)
        assert tier.load(other)[0] is None

    def test_a_closed_tier_is_closed_once_and_drops_what_it_is_given(self, tier: DiskTier) -> None:
        tier.close()
        tier.close()
        tier.save(KEY, block_of(np.ones((2, 4), np.float32)))


class EncoderViewTests:
    """What engines count on from a view. `make(epoch, partition)` gives views of one and the same cache, of 100 entries
    or more; it is called once for each view and a new test starts with an empty cache (`setup_method`)."""

    def make(self, encoder_epoch: str, partition: str) -> EncoderView:
        raise NotImplementedError("a conformance suite needs `make`: return a view of one cache")

    def test_computes_once_and_returns_what_was_computed(self) -> None:
        view = self.make("e", "p")
        made = np.ones((3, 4), np.float32)
        assert view.get_or_compute("h", "image", lambda: made) is made
        assert view.get_or_compute("h", "image", pytest.fail) is made
        block = view.lookup("h")
        assert block is not None
        assert block.embedding is made

    def test_epochs_partitions_and_modalities_are_apart(self) -> None:
        view = self.make("e", "p")
        view.store("h", "image", np.ones((3, 4), np.float32))
        assert self.make("e", "q").lookup("h") is None
        assert self.make("f", "p").lookup("h") is None
        assert view.lookup("h", "video") is None
        assert self.make("e", "p").lookup("h") is not None

    def test_threads_share_one_run(self) -> None:
        view = self.make("e", "p")
        runs: list[int] = []
        got: list[Any] = []

        def compute() -> Any:
            runs.append(1)
            time.sleep(0.02)
            return np.ones((3, 4), np.float32)

        threads = [
            threading.Thread(target=lambda: got.append(view.get_or_compute("h", "image", compute))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(runs) == 1
        assert len(got) == 8
        assert all(item is got[0] for item in got)

    def test_a_failed_encoder_is_tried_again(self) -> None:
        view = self.make("e", "p")

        def broken() -> Any:
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            view.get_or_compute("h", "image", broken)
        assert view.lookup("h") is None
        assert view.get_or_compute("h", "image", lambda: np.ones((3, 4), np.float32)) is not None

    @pytest.mark.parametrize("shape", [(0, 4), (4,), (1, 1, 1, 4)])
    def test_embeddings_that_are_none_are_refused(self, shape: tuple[int, ...]) -> None:
        view = self.make("e", "p")
        with pytest.raises(InputError):
            view.store("h", "image", np.ones(shape, np.float32))
        assert view.lookup("h") is None
