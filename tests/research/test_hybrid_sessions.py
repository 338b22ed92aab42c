"""`python -m research.hybrid_sessions`: rules of placing snapshots, and the stream that checks them."""

import json
from pathlib import Path

import pytest
from research.hybrid_sessions.__main__ import main
from research.hybrid_sessions.places import Placement, Turn, aligned, at_ends, compare, on_grid, where_prompts_part
from research.training.state_kinds import main as train

HEAD = tuple(range(100))


def turn(*words: int, answer: int = 2) -> Turn:
    """A prompt of the head and 40 tokens for each word, and its answer."""
    prompt = (*HEAD, *(1000 * word + place for word in words for place in range(40)))
    return Turn((*prompt, *range(900, 900 + answer)), len(prompt))


def test_places_where_prompts_part() -> None:
    # The second prompt parts behind the head, the third begins there, the fourth repeats the third.
    turns = [turn(1), turn(2), turn(3), turn(3)]
    rules = {
        "part": Placement(where_prompts_part), "ends": Placement(at_ends),
        "grid": Placement(on_grid(50)), "align": Placement(aligned(48, 1000)), "steps": Placement(aligned(48, 96)),
    }  # fmt: skip
    figures = compare(turns, rules)
    assert {name: rule.computed for name, rule in rules.items()} == {
        "part": [140, 140, 44, 1], "ends": [140, 140, 140, 1],
        "grid": [140, 40, 40, 40], "align": [140, 44, 44, 44], "steps": [140, 44, 44, 44],
    }  # fmt: skip
    assert (figures["part"]["placed"], figures["grid"]["placed"], figures["align"]["placed"]) == (7, 2, 1)


def test_a_budget_keeps_what_saves_most() -> None:
    small = Placement(where_prompts_part, budget=3)
    # The head, which many share, stays; the ends of prompts that do not come again leave.
    compare([turn(number) for number in range(1, 9)], {"small": small})
    assert small.computed[2:] == [44] * 6
    assert small.kept == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_engine_computes_what_its_rule_counts(tmp_path: Path) -> None:
    train(["--size", "tiny", "--steps", "1", "--tokens", "200", "--out", str(tmp_path), "--device", "cpu"])
    output = tmp_path / "figures.json"
    small = "--documents 1 --sessions 2 --turns 3 --facts 12 --requests 2 --longest 1700".split()
    main(["--model", str(tmp_path / "model"), *small, "--json", str(output)])
    streams = json.loads(output.read_text())["streams"]
    for figures in streams.values():
        assert figures["equal"] == {
            "own cache": figures["requests"],
            "dejakv": figures["requests"],
            "of": figures["requests"],
        }
        assert figures["computed"]["dejakv"] == figures["rules"]["where prompts part"]["computed"]
    assert streams["talks"]["computed"]["dejakv"] < streams["talks"]["computed"]["full"]
