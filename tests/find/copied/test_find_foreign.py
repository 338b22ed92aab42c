"""Foreign context: which of a donor's tokens stand behind text that the prompt lacks."""

import numpy as np
import pytest
from tests.find.copied.test_find_copied_text import search, stored

from dejakv.decide.copied.foreign import KNOWN_RUN, ForeignContext
from dejakv.decide.copied.search import CopiedText, TokenRun
from dejakv.store.open import open_store

HEAD, PASSAGE, OTHER = np.arange(10), np.arange(100, 140), np.arange(200, 240)
STRANGER = np.arange(900, 920)


def usable(target: list[np.ndarray], donor: list[np.ndarray], limit: int, first: int = 0) -> int:
    """How many of the donor's first tokens may serve; the others equal nothing."""
    ids = np.concatenate(donor)
    hidden = ForeignContext(np.concatenate(target), limit).hide(ids, first)
    kept = int((hidden == ids).sum())
    assert (hidden[:kept] == ids[:kept]).all()
    assert (hidden[kept:] < -(1 << 60)).all()
    assert len(set(hidden[kept:].tolist())) == len(ids) - kept
    return kept


def test_without_a_limit_everything_may_serve() -> None:
    donor = np.concatenate([STRANGER, PASSAGE])
    assert ForeignContext(PASSAGE, None).hide(donor) is donor


@pytest.mark.parametrize(("limit", "kept"), [(0, 11), (19, 30), (20, 70)])
def test_a_passage_behind_other_text_serves_within_the_limit(limit: int, kept: int) -> None:
    """The first token of the other text has nothing but the head before it."""
    assert usable([HEAD, OTHER, PASSAGE], [HEAD, STRANGER, PASSAGE], limit) == kept


def test_text_that_the_prompt_has_elsewhere_is_not_foreign() -> None:
    target = [HEAD, OTHER, PASSAGE]
    assert usable(target, [HEAD, PASSAGE, OTHER], 0) == 90


def test_text_counts_as_often_as_the_prompt_has_it() -> None:
    assert usable([HEAD, OTHER, PASSAGE], [HEAD, OTHER, OTHER, PASSAGE], 0) == 51
    assert usable([HEAD, OTHER, OTHER, PASSAGE], [HEAD, OTHER, OTHER, PASSAGE], 0) == 130


def test_text_made_of_the_prompts_words_is_foreign() -> None:
    mixed = np.concatenate([OTHER[i : i + KNOWN_RUN - 1] for i in (0, 20, 10, 30)])
    assert usable([HEAD, OTHER, PASSAGE], [HEAD, mixed, PASSAGE], 8) < len(HEAD) + len(mixed)


def test_an_edited_word_counts_alone() -> None:
    edited = OTHER.copy()
    edited[20] = 7_777
    assert usable([HEAD, OTHER, PASSAGE], [HEAD, edited, PASSAGE], 1) == 90
    assert usable([HEAD, OTHER, PASSAGE], [HEAD, edited, PASSAGE], 0) == 31


def test_a_beginning_shorter_than_a_run_is_known() -> None:
    assert usable([HEAD[:3], OTHER, PASSAGE], [HEAD[:3], PASSAGE], 0) == 43


def test_what_stands_before_a_late_donor_is_foreign() -> None:
    assert usable([PASSAGE], [PASSAGE], 8, first=8) == 40
    assert usable([PASSAGE], [PASSAGE], 7, first=8) == 0


@pytest.mark.parametrize("tokens", [1, KNOWN_RUN - 1])
def test_short_prompts_and_donors(tokens: int) -> None:
    assert usable([PASSAGE[:tokens]], [PASSAGE], 0) == tokens + 1
    assert usable([PASSAGE], [PASSAGE[:tokens]], 0) == tokens


def test_the_search_prefers_a_donor_with_known_context() -> None:
    """The stranger's prompt has more of the prompt's text than the other donor."""
    store = open_store(max_bytes=1 << 30)
    stranger = stored(store, [*HEAD, *STRANGER, *PASSAGE, *OTHER])
    alone = stored(store, [*HEAD, *PASSAGE])
    prompt = [*HEAD, 5_000, *PASSAGE, *OTHER, 5_001]
    runs = {}
    for limit in (None, 0):
        copied = CopiedText(store, limit)
        copied.add([stranger, alone])
        runs[limit] = search(copied, prompt).runs
    assert runs[None] == (TokenRun(11, 80, stranger.id, 30),)
    assert runs[0] == (TokenRun(11, 40, alone.id, 10),)
