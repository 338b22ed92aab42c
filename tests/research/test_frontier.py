"""The frontier: its ways of blending and its cases, what a run writes, that a stopped one goes on, and its command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from research.frontier.cases import TEXT_KINDS, TextCases, make_case
from research.frontier.cells import CELLS, by_deviation
from research.frontier.run import run_frontier

from dejakv.blend.settings import QUALITIES, BlendConfig
from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError
from dejakv.experiments.summary import RunProgress, SampleRow

QUESTION, CHANGED, WHOLE = "context/similarity/within/0", "context/similarity/need/0", "context/value/share/1"
SOME = (QUESTION, CHANGED, WHOLE, "embedding/kv/share/0.2", "context/first/need/0.2", "context/kv/need/0.2")


def test_a_small_run_and_its_rows(tmp_path: Path) -> None:
    report = run_frontier("docs-lm", 2, tmp_path, facts=6, kinds=("edit", "extend"), only=SOME)
    assert json.loads((tmp_path / "frontier.json").read_text()) == report
    rows = report["rows"]
    assert len(rows) == 2 * (len(SOME) + 1)
    for row in rows:
        assert row["n"] == 2
        for name in ("accuracy", "kl_mean", "same"):
            value, low, high = row[name]
            assert 0 <= low <= value + 1e-5
            assert value <= high + 1e-5
        assert row["ttft_ratio"] > 0
    edits = {(row["selector"], row["budget"], row["share"]): row for row in rows if row["kind"] == "edit"}
    full, whole = edits["full", "share", 1.0], edits["value", "share", 1.0]
    assert full["stale_rate"][0] == 0.0
    assert (full["kl"][0], full["top1"][0], full["accuracy"][0]) == (0.0, 1.0, 1.0)
    # Nothing but the question computed: answered as before the edit. By need: as it is.
    assert edits["similarity", "within", 0.0]["stale_rate"][0] == 1.0
    assert edits["similarity", "need", 0.0]["stale_rate"][0] == 0.0
    assert edits["similarity", "need", 0.0]["accuracy"] == full["accuracy"]
    assert whole["kl"][0] < 1e-5
    assert whole["mean_share"] == 1.0
    assert edits["kv", "share", 0.2]["mean_share"] < 0.3
    assert "| 100% |" in (tmp_path / "frontier-table.md").read_text()


class Counting(RunProgress):
    """Notes how far the work is."""

    def __init__(self, seen: list[tuple[int, int]]) -> None:
        self.seen = seen

    def sample(self, done: int, total: int, row: SampleRow | None) -> None:
        self.seen.append((done, total))


def test_a_stopped_run_goes_on_and_other_settings_are_refused(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    given: dict[str, Any] = {"facts": 5, "kinds": ("merge",), "only": SOME[:2]}
    run_frontier("docs-lm", 2, tmp_path, **given)
    cases = tmp_path / "cases.jsonl"
    whole = cases.read_text()
    cases.write_text(whole[: len(whole) - 40])  # the second case was cut off
    run_frontier("docs-lm", 3, tmp_path, **given, watch=Counting(seen))
    assert seen == [(1, 2), (2, 2)]
    lines = [json.loads(line) for line in cases.read_text().splitlines()]
    assert [line["number"] for line in lines] == [0, 1, 2]
    assert lines[0]["rows"].keys() == lines[2]["rows"].keys()
    for other in ({"facts": 6}, {"only": SOME[:1]}):
        with pytest.raises(ConfigError, match="other settings"):
            run_frontier("docs-lm", 2, tmp_path, **{**given, **other})
    (tmp_path / "settings.json").write_text("mine")
    with pytest.raises(ConfigError, match="other settings"):
        run_frontier("docs-lm", 2, tmp_path, **given)
    assert (tmp_path / "settings.json").read_text() == "mine"


def test_each_quality_is_a_cell_of_its_name_and_blends_as_a_run_does() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)
    named = {cell.name: cell for cell in CELLS if cell.quality}
    assert list(named) == list(QUALITIES)
    for name, cell in named.items():
        quality = SemanticCacheConfig(blend_quality=name).blend
        assert cell.config == BlendConfig(selector=quality.selector, share=quality.share, max_share=1.0)


def test_cacheblends_choice_is_where_the_donors_state_is_furthest_off() -> None:
    fresh = torch.ones(2, 2, 1, 4, 3)
    donors = fresh.clone()
    donors[0, 1, 0, 3], donors[1, 1, 0, 2], donors[1, 0, 0, 1] = (
        9,
        5,
        99,
    )  # K of the last token, V of the third, another layer
    none = torch.zeros(4, dtype=torch.bool)
    chosen = [by_deviation(fresh, donors, 1, keys=keys)(torch.zeros(4), none, 1).tolist() for keys in (True, False)]
    assert chosen == [[3], [2]]


def words_encoder() -> Any:
    words: dict[str, int] = {}
    return lambda text: tuple(words.setdefault(word, len(words)) for word in text.lower().replace(".", " .").split())


def test_cases_follow_from_their_numbers_and_edits_ask_what_changed() -> None:
    encode = words_encoder()
    one, again = (make_case("edit", 3, 8, encode) for _ in range(2))
    assert one == again
    assert one != make_case("edit", 4, 8, encode)
    assert one.old_answer is not None
    assert one.old_answer != one.answer
    assert len(make_case("merge", 0, 8, encode).donors) == 2


@pytest.mark.parametrize(
    "kind", [kind for kind in TEXT_KINDS if kind not in ("foreign", "several", "two-hop", "foreign-two-hop", "agent")]
)
def test_cases_of_real_text_follow_from_their_numbers(kind: str) -> None:
    cases = TextCases(4)
    encode = words_encoder()
    asked, again, summary = (cases.make(kind, number, encode, 0) for number in (2, 2, 3))
    assert asked == again
    assert asked.answer is not None
    assert summary.answer is None
    assert set(asked.answer) <= set(asked.target)
    assert all(donor != asked.target for donor in asked.donors)
    shared = [len(set(asked.target) & set(donor)) / len(set(asked.target)) for donor in asked.donors]
    assert len(asked.donors) == (4 if kind == "apart" else 1)
    assert min(shared) > (0.2 if kind == "apart" else 0.7)
    if kind == "edit":
        assert asked.old_answer is not None
        assert set(asked.old_answer) <= set(asked.donors[0])
        assert set(asked.old_answer).isdisjoint(asked.target)
    else:
        assert asked.old_answer is None
