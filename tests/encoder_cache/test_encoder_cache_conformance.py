"""The package's own views pass the suite that outsiders are given."""

import pytest

from dejakv.encoder_cache import EncoderView, VisualKVCache
from dejakv.testing.encoder_cache import EncoderViewTests


class TestView(EncoderViewTests):
    def setup_method(self) -> None:
        self.cache = VisualKVCache()

    def make(self, encoder_epoch: str, partition: str) -> EncoderView:
        return self.cache.view(encoder_epoch, partition)


class TestViewWithDisk(EncoderViewTests):
    @pytest.fixture(autouse=True)
    def _cache(self, tmp_path):
        with VisualKVCache(disk=tmp_path / "outputs") as self.cache:
            yield

    def make(self, encoder_epoch: str, partition: str) -> EncoderView:
        return self.cache.view(encoder_epoch, partition)
