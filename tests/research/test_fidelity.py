"""`python -m research.fidelity`: its kinds of change, its figures, and its command."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from research.command import app_of
from research.fidelity import fidelity
from research.frontier.cases import TextCases, turns_of_agents
from research.frontier.cells import CELLS
from research.frontier.report import rows_of
from typer.testing import CliRunner


@pytest.fixture
def encode() -> Callable[[str], tuple[int, ...]]:
    words: dict[str, int] = {}
    return lambda text: tuple(words.setdefault(word, len(words)) for word in text.lower().replace(".", " .").split())


def test_the_two_halves_of_a_two_hop_answer_were_computed_apart() -> None:
    texts: list[str] = []
    case = TextCases(3).make("two-hop", 5, lambda text: (texts.append(text), (len(texts),))[1], 0)
    target, *donors = texts[:4]
    assert len(case.donors) == 3
    assert case.answer is not None
    code = next(text for text in texts if text.startswith("is ")).removeprefix("is ")
    asked = target.split("What is the release code of ")[1].split("?")[0]
    (other,) = re.findall(rf"The release code of (\S+) is {code}\.", target)
    states, refers = (f"The release code of {name} is" for name in (other, asked))
    assert f"{refers} the release code of {other}." in target
    states, refers = (f"{states} {code}", f"{refers} the")
    assert [donor for donor in donors if states in donor] != [donor for donor in donors if refers in donor]
    assert sum(states in donor for donor in donors) == sum(refers in donor for donor in donors) == 1


def test_each_passage_stands_in_several_donors(encode: Any) -> None:
    assert len(TextCases(4).make("several", 1, encode, 0).donors) == 6


def test_an_agents_turn_has_an_earlier_turn_of_its_conversation_as_donor(encode: Any) -> None:
    cases = TextCases(3)
    assert cases.most["agent"] == len(turns_of_agents()) >= 100
    assert len(set(turns_of_agents())) == len(turns_of_agents())
    for target, donor in turns_of_agents():
        assert target.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")
        common = next(i for i, (one, other) in enumerate(zip(target, donor, strict=False)) if one != other)
        assert target[:common].startswith("<|im_start|>system\n")  # the same tools, and then something else
        assert common < len(donor) - len("<|im_start|>assistant\n")
    one, again, other = (cases.make("agent", number, encode, 0) for number in (3, 3, 4))
    assert one == again
    assert one != other


def test_differences_are_taken_case_by_case() -> None:
    def row(kl: float, top1: float, seconds: float) -> dict[str, Any]:
        marks = {"right": None, "stale": None}
        return {**marks, "kl": kl, "kl_mean": kl, "top1": top1, "share": 0.2, "seconds": seconds}

    lines = [
        {"kind": "apart", "rows": {"full": row(0, 1, 2.0), "default": row(kl, 0.9, 1.0), "strict": row(kl - 0.01, 1.0, t)}}
        for kl, t in ((0.02, 1.0), (0.5, 1.6), (3.0, 0.2))
    ]  # fmt: skip
    cells = [cell for cell in CELLS if cell.name in ("default", "strict")]
    found = {row["way"]: row for row in rows_of(lines, cells, ["apart"])}
    assert found["strict"]["kl_more"] == [-0.01] * 3
    assert found["strict"]["top1_more"] == [0.1] * 3
    assert found["default"]["kl_more"] == [0.0] * 3
    assert found["strict"]["time_by_full"] == [0.5, 0.3, 0.65]
    alone = rows_of([{"kind": "apart", "rows": {"full": row(0, 1, 2.0)}}], [], ["apart"])
    assert alone[0]["kl_more"] is None


def test_the_command_writes_figures_by_kind(tmp_path: Path) -> None:
    file = tmp_path / "of" / "fidelity.json"
    line = ["--output", str(file), "--model", "docs-lm", "--samples", "2", "--kind", "merge", "--way", "strict"]
    done = CliRunner().invoke(app_of(fidelity), line)
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    rows = {row["way"]: row for row in json.loads((file.with_suffix("") / "frontier.json").read_text())["rows"]}
    assert list(found["kinds"]) == ["merge"]
    for way, figures in (("default", found["kinds"]["merge"]), ("strict", found["ways"]["strict"]["merge"])):
        assert figures["n"] == 2
        assert figures["kl"] == rows[way]["kl_mean"]
        assert figures["top1"] == rows[way]["top1"]
        assert figures["top1_bf16"] is None
        assert figures["accuracy_by_full"] == 1.0
        assert 0 < figures["share"] == rows[way]["mean_share"] < 1
        assert figures["time_by_full"] == rows[way]["time_by_full"]
    assert found["ways"]["strict"]["merge"]["kl_more"] is not None
    assert {"command", "machine", "versions", "model", "seed"} <= found.keys()
    assert str(file) in done.stdout
