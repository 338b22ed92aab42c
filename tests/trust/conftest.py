"""A ledger of evidence, in memory and in a folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dejakv.trust.ledger import EvidenceLedger


@pytest.fixture(params=["memory", "disk"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EvidenceLedger]:
    made = EvidenceLedger(None if request.param == "memory" else tmp_path, "t")
    yield made
    made.close()
