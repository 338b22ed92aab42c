"""Every store of the package passes the suites that outsiders can run on theirs."""

from pathlib import Path
from typing import Any

from dejakv.store import Store, open_store
from dejakv.testing.expiry import ExpiryTests, PersistentExpiryTests
from dejakv.testing.prefixes import PrefixTests
from dejakv.testing.purging import PurgingTests
from dejakv.testing.stores import PersistentStoreTests, StoreTests


class TestMemory(StoreTests, PrefixTests, PurgingTests, ExpiryTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return open_store(None, **settings)


class TestFolder(PersistentStoreTests, PrefixTests, PurgingTests, PersistentExpiryTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return open_store(folder, **settings)


class TestFolderBehindMemory(PersistentStoreTests, PrefixTests, PurgingTests, PersistentExpiryTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return open_store(folder, memory_bytes=50_000, memory_fill="read", **settings)
