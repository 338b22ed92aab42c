"""Every store of the package passes the suite that outsiders can run on theirs, and the rest of it."""

from pathlib import Path
from typing import Any

import pytest
from tests.services import ValkeyServer
from tests.store.suite import WholeStoreTests

from dejakv.store import Store, open_store
from dejakv.testing.stores import PersistentStoreTests


class TestMemory(WholeStoreTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return open_store(None, **settings)


class TestFolder(WholeStoreTests, PersistentStoreTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return open_store(folder, **settings)


class TestFolderBehindMemory(WholeStoreTests, PersistentStoreTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return open_store(folder, memory_bytes=50_000, memory_fill="read", **settings)


@pytest.mark.slow
class TestBucket(WholeStoreTests, PersistentStoreTests):
    """On a real S3 server, without copies."""

    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: str) -> None:
        self.url = bucket

    def make_store(self, folder: Path, **settings: Any) -> Store:
        return open_store(f"{self.url}/{folder.name}", **settings)


class TestBucketBehindMemory(TestBucket):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return open_store(f"{self.url}/{folder.name}", memory_bytes=50_000, **settings)


class TestBucketBehindMemoryAndDisk(TestBucket):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        tiers = {"memory_bytes": 20_000, "disk_dir": folder, "disk_bytes": 50_000}
        return open_store(f"{self.url}/{folder.name}", **tiers, **settings)


class TestBucketWithFeed(TestBucket):
    """With copies on disk, as `deploy/` has it. What one machine tells the others changes nothing for itself."""

    @pytest.fixture(autouse=True)
    def _feed(self, valkey_server: ValkeyServer) -> None:
        self.feed = valkey_server.url

    def make_store(self, folder: Path, **settings: Any) -> Store:
        tiers = {"memory_bytes": 20_000, "disk_dir": folder, "disk_bytes": 50_000}
        return open_store(f"{self.url}/{folder.name}", **tiers, feed=self.feed, **settings)
