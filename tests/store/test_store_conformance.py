"""Every store of the package passes the suite that outsiders can run on theirs."""

from pathlib import Path
from typing import Any

from dejakv.quotas import Parts
from dejakv.store.admission import Admission, AdmittingStore
from dejakv.store.base import Store
from dejakv.store.deltas import DeltaStore
from dejakv.store.disk import DiskStore
from dejakv.store.memory import MemoryStore
from dejakv.store.quota import QuotaStore
from dejakv.store.tiered import TieredStore
from dejakv.testing.deltas import DeltasTests
from dejakv.testing.expiry import ExpiryTests, PersistentExpiryTests
from dejakv.testing.purging import PurgingTests
from dejakv.testing.stores import PersistentStoreTests, StoreTests


class TestMemoryStore(StoreTests, DeltasTests, PurgingTests, ExpiryTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return MemoryStore(**settings)


class TestDiskStore(PersistentStoreTests, DeltasTests, PurgingTests, PersistentExpiryTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return DiskStore(folder, **settings)


class TestMemoryOverDisk(PersistentStoreTests, DeltasTests, PurgingTests, PersistentExpiryTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return TieredStore(MemoryStore(in_front=True, **settings), DiskStore(folder, **settings))


class TestSmallMemoryOverDisk(PersistentStoreTests, DeltasTests, PurgingTests, PersistentExpiryTests):
    """A memory tier that holds one entry: nearly everything is found behind it."""

    def make_store(self, folder: Path, *, max_entries: int = 0, **settings: Any) -> Store:
        return TieredStore(
            MemoryStore(max_entries=1, in_front=True, **settings),
            DiskStore(folder, max_entries=max_entries, **settings),
        )


class TestAdmittingStore(StoreTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return AdmittingStore(MemoryStore(**settings), Admission(min_tokens=1))


class TestQuotaOnDisk(PersistentStoreTests, DeltasTests, PurgingTests, PersistentExpiryTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return QuotaStore(DiskStore(folder, **settings), Parts(2))


class TestSharingInMemory(StoreTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return DeltaStore(MemoryStore(**settings))


class TestSharingOnDisk(PersistentStoreTests):
    def make_store(self, folder: Path, **settings: Any) -> Store:
        return DeltaStore(DiskStore(folder, **settings))
