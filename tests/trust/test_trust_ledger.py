import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tests.trust.conftest import gate_of, hit, opened, pilot, teach

from dejakv.build import build_gate
from dejakv.config import SemanticCacheConfig
from dejakv.errors import StoreError
from dejakv.store.claim import purge_folder
from dejakv.store.open import open_store
from dejakv.trust.draw import ClassKey, HitDraw
from dejakv.trust.evidence import ClassEvidence, HitCounts, fingerprint
from dejakv.trust.ledger import FILE, EvidenceLedger
from dejakv.trust.settings import TrustSettings

KEY = ClassKey("e", "blend", "default", "g")


def one_more(state: ClassEvidence) -> ClassEvidence:
    return state.counted(HitCounts(served=1))


def test_a_label_is_counted_once(ledger: EvidenceLedger) -> None:
    assert ledger.read(KEY) is None
    draw = HitDraw(KEY, 0.5, id="1")
    ledger.note(draw)
    for _ in range(2):
        ledger.change(KEY, one_more, labelled_draw=draw)
    ledger.change(KEY, one_more)
    known = ledger.read(KEY)
    assert known is not None
    assert known.counts.served == 2


def test_classes_are_kept_apart_and_removed_by_model(ledger: EvidenceLedger) -> None:
    other = KEY._replace(epoch="f", group="h")
    for key in (KEY, other):
        ledger.change(key, one_more)
    assert {key for key, _, _ in ledger.classes()} == {KEY, other}
    assert [key for key, _, _ in ledger.classes("h")] == [other]
    assert ledger.remove(epoch="e") == 1
    assert ledger.read(KEY) is None
    assert ledger.read(other) is not None


def test_a_gate_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    gate = opened(EvidenceLedger(tmp_path, "t"))
    gate._random = lambda: 0.99
    assert not hit(gate, 0.0).labelled, "it is counted when the gate is closed"
    audits = gate.report("a")
    gate.close()
    again = gate_of(EvidenceLedger(tmp_path, "t"))
    assert hit(again, 0.0).served
    assert again.report("a").explored == audits.explored == 36
    assert again.report("a").served == audits.served + 1 == 2
    again.close()


def test_at_the_end_a_known_label_counts_as_it_is_and_an_awaited_one_as_wrong(tmp_path: Path) -> None:
    gate = gate_of(EvidenceLedger(tmp_path, "t"))
    pilot(gate)
    _awaited, known = hit(gate), hit(gate)
    gate.learn(known, False)
    gate.close()
    again = gate_of(EvidenceLedger(tmp_path, "t"))
    report = again.report("a")
    assert (report.explored, report.explored_wrong) == (2, 1)
    again.close()


def test_evidence_of_other_terms_opens_nothing(tmp_path: Path) -> None:
    asked = TrustSettings(error_bound=0.2)
    opened(EvidenceLedger(tmp_path, fingerprint(asked))).close()
    for other in (
        TrustSettings(error_bound=0.1),
        TrustSettings(error_bound=0.2, confidence=0.9),
        TrustSettings(error_bound=0.2, differs="answer"),
        TrustSettings(error_bound=0.2, audit_share=0.1),
    ):
        ledger = EvidenceLedger(tmp_path, fingerprint(other))
        assert ledger.classes() == []
        ledger.close()
    ledger = EvidenceLedger(tmp_path, fingerprint(asked))
    assert len(ledger.classes()) == 1
    ledger.close()


def test_a_damaged_file_closes_the_gate_with_the_reason_and_stays(tmp_path: Path) -> None:
    gate = opened(EvidenceLedger(tmp_path, "t"))
    waiting = hit(gate, 0.99)
    gate.close()
    file = tmp_path / FILE
    file.write_bytes(b"\0" * 100 + file.read_bytes()[100:])
    before = file.read_bytes()
    gate = gate_of(EvidenceLedger(tmp_path, "t"))
    gate.learn(waiting, False)
    refused = hit(gate, 0.0)
    assert (refused.served, refused.labelled) == (False, False)
    assert "gate closed: evidence in" in refused.reason
    assert "remove the file" in refused.reason
    assert gate.report_or_none() is None
    with pytest.raises(StoreError, match="remove the file"):
        gate.report()
    assert file.read_bytes() == before
    file.unlink()
    assert "choose the rules" in hit(gate).reason, "it begins anew as soon as the file is gone"
    gate.close()


@pytest.mark.parametrize("kind", ["database", "link", "text", "newer"])
def test_a_foreign_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    file, elsewhere = tmp_path / FILE, tmp_path / "elsewhere"
    if kind == "database":
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("CREATE TABLE theirs (a)")
    elif kind == "newer":
        opened(EvidenceLedger(tmp_path, "t")).close()
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA user_version = 4")
    elif kind == "link":
        elsewhere.write_bytes(b"")
        file.symlink_to(elsewhere)
    else:
        file.write_text("not a database, and long enough to be read as the header of one " * 20)
    before = file.read_bytes()
    ledger = EvidenceLedger(tmp_path, "t")
    with pytest.raises(StoreError, match="cannot be read or written"):
        ledger.change(KEY, one_more)
    ledger.close()
    assert file.read_bytes() == before


@pytest.mark.parametrize("version", [1, 2])
def test_evidence_of_an_earlier_version_begins_anew(tmp_path: Path, version: int) -> None:
    ledger = EvidenceLedger(tmp_path, "t")
    ledger.change(KEY, one_more)
    ledger.close()
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    ledger = EvidenceLedger(tmp_path, "t")
    assert ledger.read(KEY) is None
    ledger.close()


def test_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="give one that you may write to"):
        EvidenceLedger(tmp_path / "none")


@pytest.mark.parametrize(
    "damage",
    [
        "state || ' '",
        "''",
        "X'FF'",
        "replace(state, '\"opened\": 1', '\"opened\": 2')",
    ],
)
def test_a_damaged_row_closes_the_gate_of_its_class(tmp_path: Path, damage: str) -> None:
    opened(EvidenceLedger(tmp_path, "t")).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        connection.execute(f"UPDATE classes SET state = {damage}")
        connection.commit()
    gate = gate_of(EvidenceLedger(tmp_path, "t"))
    refused = hit(gate, 0.0)
    assert not refused.served
    assert "a row differs" in refused.reason
    assert "choose the rules" in hit(gate, partition="b").reason
    gate.close()


def test_while_evidence_cannot_be_written_nothing_is_served_and_no_label_is_lost(tmp_path: Path) -> None:
    gate = opened(EvidenceLedger(tmp_path, "t"), error_bound=0.3)
    label = hit(gate, 0.0)
    assert label.served
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        gate.learn(label, True)
        refused = hit(gate, 0.0)
        assert not refused.served
        assert not refused.labelled
        assert "locked" in refused.reason
        other.execute("ROLLBACK")
    assert hit(gate, 0.0).served
    assert gate.report("a").wrong == 1
    gate.close()


def test_what_one_process_learns_opens_the_gate_of_another(tmp_path: Path) -> None:
    one, other = gate_of(EvidenceLedger(tmp_path, "t")), gate_of(EvidenceLedger(tmp_path, "t"))
    pilot(one)
    assert not hit(other, 0.0).served
    teach(one, 30)
    assert hit(other, 0.0).served
    one.close()
    other.close()


def test_a_child_of_fork_shares_the_folder_and_waits_for_no_label_of_its_parent(tmp_path: Path) -> None:
    gate = gate_of(EvidenceLedger(tmp_path, "t"), error_bound=0.001)
    pilot(gate)
    waiting = hit(gate)
    child = os.fork()
    if child == 0:  # no assertion here: it would run pytest's own clean-up twice
        try:
            inherited = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
            if str(tmp_path / FILE) in inherited:
                os._exit(3)  # SQLite would rely on locks that the child does not have
            gate.learn(hit(gate), True)
            os._exit(0 if gate.report("a").explored == 1 else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    gate.learn(waiting, False)
    assert (gate.report("a").explored, gate.report("a").explored_wrong) == (2, 1)
    gate.close()


def test_evidence_goes_with_its_store(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    store = open_store(str(folder))
    opened(EvidenceLedger(folder, "t")).close()
    store.close()
    (folder / "trust-3.sqlite").write_bytes(b"")
    open_store(str(folder)).close()
    purge_folder(folder)
    assert not folder.exists()


RACE = """
import os, sys, time
from pathlib import Path
from dejakv.build import build_gate
from dejakv.config import SemanticCacheConfig
from dejakv.errors import StoreError
os.umask(0o002)
top, me, processes, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
told = cold = 0
for number in range(rounds):
    folder = top / str(number)
    folder.mkdir(0o700, exist_ok=True)
    (top / f"{number}-{me}").touch()
    while len(list(top.glob(f"{number}-*"))) < processes:
        time.sleep(0)
    try:
        gate = build_gate(SemanticCacheConfig(cache_dir=str(folder), error_bound=0.1))
    except StoreError:
        cold += 1
        continue
    for score in range(22):
        draw = gate.draw(gate.class_of("p", "e", "adopt", "s"), {"score": score / 22})
        if draw.labelled:
            gate.learn(draw, False)
            told += 1
    gate.close()
print(told, cold)
"""


@pytest.mark.slow
def test_processes_that_create_one_ledger_at_the_same_moment_all_learn(tmp_path: Path) -> None:
    processes, rounds = 4, 20
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    all_of_them = [
        subprocess.Popen([*command, str(number), str(processes), str(rounds)], stdout=subprocess.PIPE, text=True)
        for number in range(processes)
    ]
    figures = [one.communicate()[0].split() for one in all_of_them]
    assert [one.returncode for one in all_of_them] == [0] * processes
    assert sum(int(cold) for _, cold in figures) == 0
    counted = 0
    for number in range(rounds):
        gate = build_gate(SemanticCacheConfig(cache_dir=str(tmp_path / str(number)), error_bound=0.1))
        assert gate is not None
        report = gate.report()
        counted += report.explored + report.audited
        gate.close()
    assert counted == sum(int(told) for told, _ in figures)


def test_a_process_that_lives_keeps_its_draws_and_a_killed_one_does_not(tmp_path: Path) -> None:
    one, other = gate_of(EvidenceLedger(tmp_path, "t")), gate_of(EvidenceLedger(tmp_path, "t"))
    pilot(one)
    draw = hit(one)
    hit(other)
    assert other.report("a").explored_wrong == 0
    one.learn(draw, False)
    child = os.fork()
    if child == 0:
        hit(one)
        os._exit(0)
    os.waitpid(child, 0)
    other.close()  # with one draw that nobody told
    third = gate_of(EvidenceLedger(tmp_path, "t"))
    hit(third)
    report = third.report("a")
    assert (report.explored, report.explored_wrong) == (3, 2)
    one.close()
    third.close()
    assert not list(tmp_path.glob("*.lock"))


def test_of_an_ended_process_all_is_known_that_its_label_needs(tmp_path: Path) -> None:
    draw = HitDraw(KEY, 0.5, time=0.9, served=True, labelled=True, id="1", round="r", opened=2, warned=True)
    ended, later = EvidenceLedger(tmp_path, "t"), EvidenceLedger(tmp_path, "t")
    ended.note(draw)
    assert later.abandoned_draws() == []
    ended.close()
    assert later.abandoned_draws() == [draw]
    later.drop("1")
    assert later.abandoned_draws() == []
    later.close()


@pytest.fixture
def _few_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dejakv.trust.ledger.MAX_CLASSES", 6)


@pytest.mark.usefixtures("_few_classes")
def test_old_models_and_classes_leave(ledger: EvidenceLedger) -> None:
    """What was changed longest ago goes first, and what is used stays."""
    for number in range(10):
        ledger.change(KEY._replace(group=str(number)), one_more)
        ledger.change(KEY._replace(group="0"), one_more)
    left = {key.group: state.counts.served for key, state, _ in ledger.classes()}
    assert set(left) == {"0", "5", "6", "7", "8", "9"}
    assert left["0"] == 11, "it was never lost"
    assert ledger.read(KEY._replace(group="1")) is None


def test_a_change_that_fails_changes_nothing(ledger: EvidenceLedger) -> None:
    draw = HitDraw(KEY, 0.5, id="1")
    ledger.note(draw)
    with pytest.raises(ZeroDivisionError):
        ledger.change(KEY, lambda state: one_more(state).counted(HitCounts(served=1 // 0)), labelled_draw=draw)
    assert ledger.change(KEY, one_more, labelled_draw=draw).counts.served == 1


def test_evidence_of_all_terms_is_listed_and_removed_for_the_operator(tmp_path: Path) -> None:
    ledger, other = EvidenceLedger(tmp_path, "t"), EvidenceLedger(tmp_path, "u")
    other.change(KEY._replace(epoch="old"), one_more)
    for number in range(3):
        ledger.change(KEY._replace(epoch=f"e{number}"), one_more)
    assert {key.epoch for key, _, _ in ledger.classes()} == {"e0", "e1", "e2"}
    latest, _, terms = ledger.classes(any_terms=True)[0]
    assert (latest.epoch, terms) == ("e2", "t")
    assert ledger.remove(epoch="e2") == 1
    assert ledger.remove() == 3
    assert other.classes() == []
    ledger.close()
    other.close()
