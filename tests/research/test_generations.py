"""The passages of a case of `research.generations`."""

import random

import pytest
from research.generations import GENERATIONS, SHARED, drawn, figures

from dejakv.errors import ConfigError


def runs(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + SHARED]) for i in range(len(words) - SHARED + 1)}


@pytest.mark.parametrize("seed", range(5))
def test_no_two_passages_share_text(seed: int) -> None:
    chosen = drawn(random.Random(seed), 32)
    assert len(chosen) == 32
    every = [run for text in chosen for run in runs(text)]
    assert len(every) == len(set(every))


def test_more_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--passages"):
        drawn(random.Random(0), 100_000)


def test_cases_without_all_generations_are_left_out() -> None:
    row = {"kl": 0.1, "kl_mean": 0.2, "top1": 0.9, "held": 0.8, "computed": 0.2}
    whole = {"rows": dict.fromkeys(("noise", *map(str, range(GENERATIONS + 1))), row)}
    (noise, *generations) = figures([whole, {"rows": {}}, whole])
    assert (noise["cases"], len(generations)) == (2, GENERATIONS + 1)
    assert generations[0]["kl_mean"] == 0.2
    with pytest.raises(ConfigError, match="more --cases"):
        figures([{"rows": {}}])
