import os
import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tests.trust.gates import gate_of, hit, opened, pilot, teach

from dejakv.build import build_gate
from dejakv.config import SemanticCacheConfig
from dejakv.errors import StoreError
from dejakv.store import names
from dejakv.store.connection import connect
from dejakv.store.open import open_store
from dejakv.store.purge import purge_folder
from dejakv.trust.codec import decoded, encoded
from dejakv.trust.disk import FILES, DiskLedger, open_ledger
from dejakv.trust.draw import ClassKey
from dejakv.trust.gate import Gate
from dejakv.trust.ledger import Ledger, MemoryLedger
from dejakv.trust.settings import TrustSettings
from dejakv.trust.state import Counts, State

KEY = ClassKey("e", "blend", "default", "g")


def one_more(state: State) -> State:
    return state.counted(Counts(served=1))


def test_a_change_with_a_name_is_made_once(ledger: Ledger) -> None:
    assert ledger.read(KEY) is None
    for _ in range(2):
        ledger.change(KEY, one_more, once="1")
    ledger.change(KEY, one_more)
    known = ledger.read(KEY)
    assert known is not None
    assert known.counts.served == 2


def test_a_change_that_fails_changes_nothing(ledger: Ledger) -> None:
    with pytest.raises(ZeroDivisionError):
        ledger.change(KEY, lambda state: one_more(state).counted(Counts(served=1 // 0)), once="1")
    assert ledger.change(KEY, one_more, once="1").counts.served == 1


def test_classes_are_kept_apart_and_forgotten_by_group(ledger: Ledger) -> None:
    other = KEY._replace(group="h")
    for key in (KEY, other):
        ledger.change(key, one_more)
    assert {key for key, _ in ledger.classes()} == {KEY, other}
    assert [key for key, _ in ledger.classes("h")] == [other]
    ledger.forget("g")
    assert ledger.read(KEY) is None
    assert ledger.read(other) is not None


def test_a_gate_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    gate = opened(DiskLedger(tmp_path, "t"))
    audits = gate.report("a")
    gate.close()
    again = gate_of(DiskLedger(tmp_path, "t"))
    assert hit(again, 0.0).served
    assert again.report("a").explored == audits.explored == 36
    assert again.report("a").classes[0].counts.refused == audits.classes[0].counts.refused
    again.close()


def test_evidence_of_other_terms_opens_nothing(tmp_path: Path) -> None:
    asked = TrustSettings(error_bound=0.2)
    opened(open_ledger(str(tmp_path), asked)).close()
    for other in (
        TrustSettings(error_bound=0.1),
        TrustSettings(error_bound=0.2, confidence=0.9),
        TrustSettings(error_bound=0.2, differs="answer"),
        TrustSettings(error_bound=0.2, audit_share=0.1),
    ):
        ledger = open_ledger(str(tmp_path), other)
        assert list(ledger.classes()) == []
        ledger.close()
    ledger = open_ledger(str(tmp_path), asked)
    assert len(list(ledger.classes())) == 1
    ledger.close()


def test_without_a_folder_evidence_stays_in_memory() -> None:
    assert isinstance(open_ledger(None, TrustSettings(error_bound=0.2)), MemoryLedger)


def test_a_damaged_file_is_a_counted_cold_start_and_stays(tmp_path: Path) -> None:
    opened(DiskLedger(tmp_path, "t")).close()
    file = tmp_path / names.evidence(0)
    file.write_bytes(b"\0" * 100 + file.read_bytes()[100:])
    gate = gate_of(DiskLedger(tmp_path, "t"))
    assert (gate.report().cold_starts, gate.report().gate) == (1, "closed")
    pilot(gate)
    teach(gate, 36)
    assert hit(gate, 0.0).served
    gate.close()
    assert file.read_bytes()[:100] == b"\0" * 100
    again = gate_of(DiskLedger(tmp_path, "t"))
    assert hit(again, 0.0).served
    again.close()


@pytest.mark.parametrize("kind", ["database", "link", "text"])
def test_a_foreign_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    file, elsewhere = tmp_path / names.evidence(0), tmp_path / "elsewhere"
    if kind == "database":
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("CREATE TABLE theirs (a)")
    elif kind == "link":
        elsewhere.write_bytes(b"")
        file.symlink_to(elsewhere)
    else:
        file.write_text("not a database, and long enough to be read as the header of one " * 20)
    before = file.read_bytes()
    ledger = DiskLedger(tmp_path, "t")
    ledger.change(KEY, one_more)
    assert ledger.cold_starts == 1
    ledger.close()
    assert file.read_bytes() == before


def test_files_that_are_all_damaged_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    for number in range(FILES):
        (tmp_path / names.evidence(number)).write_text("no database" * 100)
    with pytest.raises(StoreError, match="remove them"):
        DiskLedger(tmp_path, "t")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"opened": 1}', "\udcff", "9" * 5000])
def test_a_damaged_row_is_a_cold_start_of_its_class(tmp_path: Path, text: str) -> None:
    opened(DiskLedger(tmp_path, "t")).close()
    with closing(connect(tmp_path / names.evidence(0), "rw")) as connection:
        connection.execute("UPDATE classes SET state = ?", (text.encode("utf-8", "surrogateescape"),))
    gate = gate_of(DiskLedger(tmp_path, "t"))
    assert not hit(gate, 0.0).served
    assert gate.report().cold_starts == 1
    gate.close()


def test_a_state_that_no_gate_wrote_is_not_used() -> None:
    ledger = MemoryLedger()
    opened(ledger)
    (_, state), *_ = ledger.classes()
    text = encoded(state)
    assert decoded(text) == state
    for sound, damaged in (
        ('"opened": 1', '"opened": 9'),
        ('"opened": 1', '"opened": true'),
        ('"band_wrong": 0', '"band_wrong": 31'),
        ('"best": 0.0', '"best": NaN'),
        ('"best": 0.0', '"best": -1'),
        ('"lost": 0', '"lost": -1'),
        ("1.0]", "0.9]"),
        ('"drift": [', '"drift": [0, '),
        ('"pilot": []', '"pilot": [7]'),
        ('"round": "', '"round": 1, "x": "'),
    ):
        assert sound in text
        assert decoded(text.replace(sound, damaged)) is None


def test_while_evidence_cannot_be_written_nothing_is_served_and_no_label_is_lost(tmp_path: Path) -> None:
    gate = opened(DiskLedger(tmp_path, "t"), error_bound=0.3)
    label = hit(gate, 0.0)
    assert label.served
    with closing(connect(tmp_path / names.evidence(0), "rw")) as other:
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


LEARNER = """
import sys
from dejakv.trust.disk import DiskLedger
from tests.trust.gates import gate_of, hit
gate = gate_of(DiskLedger(sys.argv[1], "t"), error_bound=.001)
for number in range(150):
    draw = hit(gate, number % 10 / 10)
    while not draw.labelled:  # of the hits that choose the rules
        draw = hit(gate, number % 10 / 10)
    gate.learn(draw, number % 15 == 0)
gate.close()
"""


def test_two_processes_learn_on_one_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEARNER, str(tmp_path)]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [one.wait() for one in both] == [0, 0]
    gate = gate_of(DiskLedger(tmp_path, "t"), error_bound=0.001)
    report = gate.report("a")
    gate.close()
    assert (report.explored, report.explored_wrong) == (300, 20)
    assert sum(tally.labels for tally in report.classes[0].rules[-1:]) == 300


def test_a_label_that_two_processes_hand_in_counts_once(tmp_path: Path) -> None:
    """As two connections of one process, which lock each other as processes do."""
    one, other = gate_of(DiskLedger(tmp_path, "t")), gate_of(DiskLedger(tmp_path, "t"))
    pilot(one)
    draw = hit(one)
    one.learn(draw, True)
    other.learn(draw, True)
    assert other.report("a").explored == 1
    one.close()
    other.close()


def test_what_one_process_learns_opens_the_gate_of_another(tmp_path: Path) -> None:
    one, other = gate_of(DiskLedger(tmp_path, "t")), gate_of(DiskLedger(tmp_path, "t"))
    pilot(one)
    assert not hit(other, 0.0).served
    teach(one, 30)
    assert hit(other, 0.0).served
    one.close()
    other.close()


def test_a_child_of_fork_shares_the_folder_and_waits_for_no_label_of_its_parent(tmp_path: Path) -> None:
    gate = gate_of(DiskLedger(tmp_path, "t"), error_bound=0.001)
    pilot(gate)
    waiting = hit(gate)
    child = os.fork()
    if child == 0:  # no assertion here: it would run pytest's own clean-up twice
        try:
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
    opened(DiskLedger(folder, "t")).close()
    store.close()
    (folder / names.evidence(3)).write_bytes(b"")
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
        draw = gate.draw(partition="p", epoch="e", method="adopt", setting="s", features={"score": score / 22})
        if draw.labelled:
            gate.learn(draw, False)
            told += 1
    cold += gate.report().cold_starts
    gate.close()
print(told, cold)
"""


def test_processes_that_create_one_ledger_at_the_same_moment_all_learn(tmp_path: Path) -> None:
    processes, rounds = 4, 60
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


def test_a_restart_cannot_choose_which_labels_count(tmp_path: Path) -> None:
    """A quarter of the answers is wrong, and wrong ones take longer than the process lives."""
    chances = random.Random(1)
    for seed in range(60):
        gate = Gate(TrustSettings(error_bound=0.1), ledger=DiskLedger(tmp_path, "t"), random=random.Random(seed).random)
        for _ in range(10):
            draw = hit(gate, chances.random())
            assert not draw.served
            if draw.labelled and chances.random() > 0.25:
                gate.learn(draw, False)
        gate.close()


def test_a_process_that_lives_keeps_its_draws_and_a_killed_one_does_not(tmp_path: Path) -> None:
    one, other = gate_of(DiskLedger(tmp_path, "t")), gate_of(DiskLedger(tmp_path, "t"))
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
    third = gate_of(DiskLedger(tmp_path, "t"))
    hit(third)
    report = third.report("a")
    assert (report.explored, report.explored_wrong) == (3, 2)
    one.close()
    third.close()
    assert not list(tmp_path.glob("*.lock"))
