"""Every store of the package passes the suite that outsiders can run on theirs, and the rest of it."""

from pathlib import Path
from typing import Any

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
