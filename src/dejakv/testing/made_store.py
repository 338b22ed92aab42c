"""What the suites of stores have in common: the store under test."""

from pathlib import Path
from typing import Any

import pytest

from dejakv.store.base import Store


class MadeStore:
    """A suite over a store that its subclass makes.

    make_store  a store with the given budgets; the same folder again is the same store
    """

    def make_store(self, folder: Path, *, max_bytes: int = 0, max_entries: int = 0, policy: Any = "lru") -> Store:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Any:
        store = self.make_store(tmp_path / "store")
        yield store
        store.close()
