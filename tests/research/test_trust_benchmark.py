"""The figures of `research.trust` on tables that are known."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from research.trust.__main__ import main
from research.trust.gates import Table, error_under, gate_row, hindsight_row, interval, loosest, orders_of, static_row
from research.trust.labels import LabelledHit

from dejakv.trust.evidence import Terms

TERMS = Terms(0.1, -np.log(0.05), 1.0, 0.1)


def write_labels(path: Path, hits: list[LabelledHit]) -> None:
    path.write_text("".join(json.dumps(asdict(hit)) + "\n" for hit in hits))


def table(rows: int = 1000) -> Table:
    """Half of the hits have little risk and a high score and are right, the others are wrong."""
    bad = np.arange(rows) % 2 == 1
    random = np.random.default_rng(0).random(rows) / 10
    return Table("t", np.where(bad, 0.9, 0.1) + random, np.where(bad, 0.5, 0.9) - random, bad, np.full(rows, 0.25))


def test_orders_have_each_row_once_or_are_drawn_again() -> None:
    random = np.random.default_rng(0)
    orders = orders_of(50, 3, 0, random)
    assert all(sorted(order) == list(range(50)) for order in orders.tolist())
    assert len({tuple(order) for order in orders.tolist()}) == 3
    assert orders_of(50, 3, 80, random).shape == (3, 80)


def test_intervals_are_those_of_clopper_and_pearson() -> None:
    assert interval(0, 100) == pytest.approx((0, 0.0362), abs=1e-4)
    assert interval(5, 100) == pytest.approx((0.0164, 0.1128), abs=1e-4)
    assert interval(0, 0) == (0, 1)


def test_the_error_under_a_cutoff() -> None:
    errors = error_under(np.array([0.3, 0.1, 0.2]), np.array([True, False, False]), np.array([-1, 0.1, 0.2, 0.3]))
    assert errors.tolist() == pytest.approx([0, 0, 0, 1 / 3])


def test_the_gate_keeps_the_good_half_and_its_figures_add_up() -> None:
    row = gate_row(table(), TERMS, 40, 0, 0)
    assert (row["violated"], row["opened"]) == (0, 1)
    assert 0.3 < row["hits"] < 0.5
    assert row["error"] < 0.1
    assert row["twice"] == pytest.approx(row["labels"] / 1000)
    assert 20 < row["first"] < 500


def test_what_is_refused_late_has_been_computed() -> None:
    early = table()
    late = Table(early.name, early.risks, early.scores, early.wrong, early.computed, late=True)
    hits = ~early.wrong
    assert early.work(hits) == pytest.approx(0.5 * 0.25 + 0.5)
    assert late.work(hits) == pytest.approx(0.5 * 0.25 + 0.5 * 1.25)
    assert gate_row(late, TERMS, 10, 0, 0)["work"] >= gate_row(early, TERMS, 10, 0, 0)["work"]


def test_the_loosest_threshold_that_keeps_the_bound() -> None:
    scores, wrong = np.array([0.9, 0.8, 0.8, 0.7]), np.array([False, False, True, False])
    assert loosest(scores, wrong, 0.25) == 0.7
    assert loosest(scores, wrong, 0.2) == 0.9
    assert loosest(scores, np.ones(4, bool), 0.2) == np.inf


def test_thresholds() -> None:
    chosen = static_row(table(), 0.1, "score", 20, 0, 0)
    assert chosen["error"] <= 0.15
    assert 0.2 < chosen["hits"] < 0.3  # of all hits; half of them chose
    best = hindsight_row(table(), 0.1)
    assert (best["hits"], best["error"]) == (pytest.approx(0.555, abs=0.01), pytest.approx(0.1, abs=0.002))


def test_the_command_prints_every_rule_and_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hits = [
        LabelledHit(n, "blend", {"share_rows": n / 100}, {"first": n > 60}, score=1 - n / 100, margin=1.0)
        for n in range(100)
    ]
    write_labels(tmp_path / "t.jsonl", hits)
    told = ["replay", str(tmp_path / "t.jsonl"), "--orders", "5", "--bound", "0.1"]
    assert main([*told, "--json", str(tmp_path / "f.json")]) == 0
    found = json.loads((tmp_path / "f.json").read_text())
    assert (found["hits"], found["wrong"]) == (100, 39)
    methods = [row["method"].split(",")[0] for row in found["rows"]]
    assert methods == [
        "gate",
        "best threshold on the risk in hindsight",
        "threshold on the risk",
        "threshold on the score",
    ]
    printed = capsys.readouterr().out
    assert all(row["method"] in printed for row in found["rows"])


def test_a_mistake_is_said_and_exits_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_labels(tmp_path / "t.jsonl", [LabelledHit(1, "blend", {}, {"first": True})])
    assert main(["replay", str(tmp_path / "t.jsonl"), "--late"]) == 2
    assert main(["replay", str(tmp_path / "t.jsonl"), "--differs", "tool"]) == 2
    assert main(["replay", str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.count("research.trust:") == 3
