"""A ledger of evidence, in memory and on disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dejakv.trust.disk import DiskLedger
from dejakv.trust.ledger import Ledger, MemoryLedger


@pytest.fixture(params=["memory", "disk"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    made = MemoryLedger() if request.param == "memory" else DiskLedger(tmp_path, "t")
    yield made
    made.close()
