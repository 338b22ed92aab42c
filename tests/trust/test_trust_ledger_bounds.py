"""How much evidence is kept: models and classes that were served longest ago leave."""

from contextlib import closing
from pathlib import Path

import pytest

from dejakv.store import names
from dejakv.store.connection import connect
from dejakv.trust.disk import DiskLedger
from dejakv.trust.draw import ClassKey
from dejakv.trust.ledger import MOST_EPOCHS, Ledger
from dejakv.trust.state import Counts, State

KEY = ClassKey("e", "blend", "default", "g")


def one_more(state: State) -> State:
    return state.counted(Counts(served=1))


@pytest.fixture
def _few_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dejakv.trust.disk.MOST_CLASSES", 6)
    monkeypatch.setattr("dejakv.trust.ledger.MOST_CLASSES", 6)


@pytest.mark.usefixtures("_few_classes")
def test_old_models_and_classes_leave(ledger: Ledger) -> None:
    """What was changed longest ago goes first, and what is used stays."""
    for number in range(10):
        ledger.change(KEY._replace(group=str(number)), one_more)
        ledger.change(KEY._replace(group="0"), one_more)
    left = {key.group: state.counts.served for key, state in ledger.classes()}
    assert set(left) == {"0", "5", "6", "7", "8", "9"}
    assert left["0"] == 11, "it was never lost"
    assert ledger.read(KEY._replace(group="1")) is None


def test_a_folder_keeps_the_models_served_last(tmp_path: Path) -> None:
    ledger, other = DiskLedger(tmp_path, "t"), DiskLedger(tmp_path, "u")
    other.change(KEY._replace(epoch="old"), one_more)
    for number in range(2 * MOST_EPOCHS):
        ledger.change(KEY._replace(epoch=f"e{number}"), one_more)
    ledger.change(KEY._replace(epoch="e0", method="adopt"), one_more)
    assert {key.epoch for key, _ in ledger.classes() if key.method == "blend"} == {"e4", "e5", "e6", "e7"}
    assert ledger.read(KEY._replace(epoch="e0")) is None
    assert other.read(KEY._replace(epoch="old")) is not None, "evidence of other terms has models of its own"
    latest, terms, _ = ledger.every()[0]
    assert (latest.method, terms) == ("adopt", "t")
    assert ledger.remove("e7") == 1
    assert ledger.remove(None) == 5
    assert list(other.classes()) == []
    ledger.close()
    other.close()


def test_evidence_without_turns_is_read(tmp_path: Path) -> None:
    """Of an older version, which kept no turns: it is the first to leave, and not before."""
    ledger = DiskLedger(tmp_path, "t")
    ledger.change(KEY, one_more)
    with closing(connect(tmp_path / names.evidence(0), "rw")) as connection:
        connection.execute("DROP TABLE changed")
    ledger.close()
    ledger = DiskLedger(tmp_path, "t")
    ledger.change(KEY, one_more)
    for number in range(MOST_EPOCHS):
        ledger.change(KEY._replace(epoch=str(number)), one_more)
    assert KEY not in dict(ledger.classes())
    ledger.close()
