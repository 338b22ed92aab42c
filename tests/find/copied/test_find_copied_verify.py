"""Candidates compared token by token."""

import numpy as np

from dejakv.decide.copied.search import Candidates, Runs, verified
from dejakv.tokens import Ids

WORDS = np.arange(3_000)


def windows(*places: tuple[int, int], shift: int = 0) -> Candidates:
    firsts, stops = (np.array(ends, np.int64) for ends in zip(*places, strict=True))
    return Candidates(np.zeros(len(places), np.int64), np.full(len(places), shift), firsts, stops)


def runs_of(target: Ids, text: Ids, found: Candidates, least: int = 32) -> list[tuple[int, int]]:
    runs = verified(target, found, ["text"], {"text": text}.get, least)
    return list(zip(runs.starts.tolist(), runs.stops.tolist(), strict=True))


def test_two_windows_of_one_run_give_it_once_and_whole() -> None:
    assert runs_of(WORDS, WORDS, windows((0, 40), (2_000, 2_040))) == [(0, 3_000)]


def test_a_run_ends_where_a_token_differs_and_another_begins_behind_it() -> None:
    target = WORDS.copy()
    target[[500, 1_700, 1_720]] = -1
    assert runs_of(target, WORDS, windows((470, 540), (1_690, 1_760))) == [(0, 500), (501, 1_700), (1_721, 3_000)]


def test_windows_beyond_either_text_are_cut() -> None:
    assert runs_of(WORDS, WORDS[100:200], windows((110, 900), shift=-100)) == [(100, 200)]
    assert runs_of(WORDS[100:200], WORDS, windows((10, 100), shift=100)) == [(0, 100)]


def test_what_is_shorter_than_asked_for_is_left_out() -> None:
    target = WORDS.copy()
    target[[40, 80]] = -1
    assert runs_of(target[:81], WORDS, windows((0, 81)), least=40) == [(0, 40)]


def test_segments_without_tokens_give_nothing_and_are_counted() -> None:
    found = verified(WORDS, windows((0, 40)), ["text"], {}.get, 32)
    assert isinstance(found, Runs)
    assert (len(found), found.gone) == (0, 1)
