"""Every store of the package passes the suite that outsiders can run on theirs."""

from pathlib import Path
from typing import Any

from dejakv.store import Store, open_store
from dejakv.testing.stores import PersistentStoreTests, StoreTests


class TestMemory(StoreTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return open_store(None, **settings)


class TestFolder(PersistentStoreTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return open_store(folder, **settings)


class TestFolderBehindMemory(PersistentStoreTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return open_store(folder, memory_bytes=50_000, memory_fill="read", **settings)
