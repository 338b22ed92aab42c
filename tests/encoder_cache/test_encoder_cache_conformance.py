"""The package's own tier and view pass the suites that outsiders are given."""

import pytest

from dejakv.encoder_cache import DiskTier, EncoderView, VisualKVCache
from dejakv.store.open import open_store
from dejakv.testing.encoder_cache import EncoderViewTests, TierTests


class TestDiskTier(TierTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path / "tier"

    def make(self) -> DiskTier:
        return DiskTier.open(self.folder)


class TestTierOverMemory(TierTests):
    def make(self) -> DiskTier:
        return DiskTier(open_store())


class TestView(EncoderViewTests):
    def setup_method(self) -> None:
        self.cache = VisualKVCache()

    def make(self, encoder_epoch: str, partition: str) -> EncoderView:
        return self.cache.view(encoder_epoch, partition)


class TestViewWithDisk(EncoderViewTests):
    @pytest.fixture(autouse=True)
    def _cache(self, tmp_path):
        with VisualKVCache(disk=DiskTier.open(tmp_path / "tier")) as self.cache:
            yield

    def make(self, encoder_epoch: str, partition: str) -> EncoderView:
        return self.cache.view(encoder_epoch, partition)
