"""The figures of ways that were tried, and what the command refuses."""

from pathlib import Path
from typing import Any

import pytest
from research.frontier.trials import summary_of, table, trials
from research.frontier.tried import longest_run

from dejakv.errors import ConfigError


def row(top1: float, *, changed: bool = False, **more: Any) -> dict[str, Any]:
    return {"kl_mean": 0.25, "top1": top1, "changed": changed, "right": None, "share": 0.1, **more}


def test_figures_count_equal_answers_by_kind_and_way() -> None:
    lines = [
        {"kind": "apart", "rows": {"default": row(1.0, stays=64), "layer 19": row(1.0)}},
        {"kind": "apart", "rows": {"default": row(0.5, changed=True, stays=0), "layer 19": row(0.9)}},
    ]
    figures = summary_of(lines)["apart"]
    counted = {way: (each["first_equal"], each["whole_equal"], each["cases"]) for way, each in figures.items()}
    assert counted == {"default": (1, 1, 2), "layer 19": (2, 1, 2)}
    assert (figures["default"]["stays"], figures["default"]["asked"]) == ([64, 0], 0)
    assert "| apart | default | 10% | 0.2500 (0.2500 to 0.2500) | 1 of 2 | 1 | 0 of 0 |" in table({"apart": figures})


def test_a_run_behind_the_common_beginning_is_compared() -> None:
    assert longest_run((1, 2, 7, 8, 9), (1, 2, 5, 7, 8, 9, 4)) == (2, 3, 3)
    assert longest_run((1, 2), (3, 4)) == (0, 0, 0)


@pytest.mark.parametrize(("trial", "kind"), [(["means"], None), (["order"], ["agents"])])
def test_an_unknown_name_is_refused(trial: list[str], kind: list[str] | None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is unknown: choose from"):
        trials(trial, tmp_path / "trials.json", kind=kind)
