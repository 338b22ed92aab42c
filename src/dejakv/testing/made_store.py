"""What the suites of stores have in common: the store under test."""

from pathlib import Path
from typing import Any

import pytest

from dejakv.store.store import Store


class MadeStore:
    """A suite over a store that its subclass makes.

    make_store  a store with the given settings of `open_store`; the same folder again is the same store
    """

    def make_store(self, folder: Path, **settings: Any) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Any:
        store = self.make_store(tmp_path / "store")
        yield store
        store.close()
