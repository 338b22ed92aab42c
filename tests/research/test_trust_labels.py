from pathlib import Path

import pytest
from research.trust.labels import LabelledHit, read_labels

from dejakv.errors import ConfigError, DatasetError

ROW = (
    '{"request": 4, "workload": "rag", "model": "smollm2-135m", "method": "blend", "setting": "default", "score": 0.97,'
    ' "features": {"share_rows": 0.18, "donors": 4.0}, "prompt_tokens": 337, "wrong": {"first": false, "answer": true},'
    ' "kl": 0.0085, "entropy": 1.2388, "margin": 2.3249, "computed_tokens": 235}'
)


def test_a_recorded_row_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(ROW + "\n\n" + ROW.replace("}}", '}, "later": 1}') + "\n")
    hit = read_labels(tmp_path / "t.jsonl")[0]
    assert (hit.request, hit.method, hit.features["share_rows"], hit.margin) == (4, "blend", 0.18, 2.3249)
    wrong = [hit.is_wrong(differs) for differs in ("first", "answer", "kl:0.005", "kl:0.05")]
    assert wrong == [False, True, True, False]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 .*is no labelled hit .*JSON"),
        ("[]", "no labelled hit"),
        ("[" * 100_000, "JSON"),
        (ROW.replace('"method"', '"way"'), "'method'"),
        (ROW.replace("0.18", '"much"'), "'features'"),
        (ROW.replace("0.18", "NaN"), "'features'"),
        (ROW.replace("true", "1"), "'wrong'"),
        (ROW.replace("0.0085", "Infinity"), "'kl'"),
        (ROW.replace("337", "3.5"), "'prompt_tokens'"),
    ],
)
def test_a_line_that_is_no_hit_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "t.jsonl").write_text(f"{ROW}\n{line}\n")
    with pytest.raises(DatasetError, match=said):
        read_labels(tmp_path / "t.jsonl")


def test_a_missing_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot be read"):
        read_labels(tmp_path / "none.jsonl")


@pytest.mark.parametrize("differs", ["tool", "kl:0.1", "kl:much"])
def test_what_the_table_does_not_say_is_an_error(differs: str) -> None:
    hit = LabelledHit(1, "blend", {}, {"first": True}, kl=0.1 if differs == "kl:much" else None)
    with pytest.raises(ConfigError, match=r"first|no number"):
        hit.is_wrong(differs)
