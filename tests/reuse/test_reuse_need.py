"""What must be computed: edits, the rest of their sentences, the question, openings."""

import numpy as np

from dejakv.blend.forced import mark_forced
from dejakv.blend.maps import token_map
from dejakv.blend.sentences import split_sentences
from dejakv.blend.token_map import DonorTokens

TABLE = np.random.default_rng(3).standard_normal((400, 48)).astype(np.float32)
ENDS = np.array([9], dtype=np.int64)


def sentence(*ids: int) -> list[int]:
    return [*ids, 9]


DONOR = [
    1,
    *(x for s in range(6) for x in sentence(*range(20 + 10 * s, 28 + 10 * s))),
    *sentence(300, 301, 302, 303),
    2,
]


def found_for(target, donor=DONOR, **options):
    held = DonorTokens.of(donor)
    ids = np.asarray(target)
    found = token_map("context", ids, held, lambda i: TABLE[np.asarray(i)], ends=ENDS)
    return mark_forced(ids, held, found, ends=ENDS, **options)


def test_an_equal_prompt_needs_its_question_only():
    made = found_for(DONOR)
    assert np.flatnonzero(made.forced).tolist() == list(range(len(DONOR) - 6, len(DONOR)))
    assert made.tail == 6
    assert not made.changed.any()


def test_a_changed_token_takes_the_rest_of_its_sentence_with_it():
    target = list(DONOR)
    target[13] = 399  # the fourth token of the second sentence
    made = found_for(target)
    assert np.flatnonzero(made.changed).tolist() == [13]
    assert np.flatnonzero(made.forced).tolist()[:6] == [13, 14, 15, 16, 17, 18]
    assert made.forced.sum() == 6 + made.tail


def test_a_deleted_token_forces_what_follows():
    target = DONOR[:13] + DONOR[14:]  # "not" left out changes what the rest says
    made = found_for(target)
    assert made.forced[13:18].all()
    assert not made.forced[:13].any()


def test_an_inserted_sentence_is_computed_and_its_neighbours_are_not():
    new = sentence(351, 352, 353, 354, 355)
    target = [*DONOR[:28], *new, *DONOR[28:]]
    made = found_for(target)
    assert made.forced[28:34].all()
    assert not made.forced[:28].any()
    assert not made.forced[34:-6].any()


def test_a_new_sentence_is_computed_from_its_first_word():
    """A common word would begin it with other text's state, and leave the rest of it in pieces when it is kept."""
    common = [1, *(x for s in range(7) for x in sentence(5, *range(20 + 10 * s, 27 + 10 * s))), 2]
    new = [*sentence(351, 352, 353, 354), *sentence(5, 355, 356, 357, 358)]
    made = found_for([*common[:28], *new, *common[28:]], common)
    assert made.forced[28:39].all()
    assert not made.forced[:28].any()
    assert not made.forced[39:-10].any()


def test_a_short_copied_run_is_computed_and_a_long_one_is_not():
    """A path in another tool's result has the state of that result, however equal its tokens."""
    for copied, forced in ((7, True), (8, False)):
        new = [*DONOR[38 : 38 + copied], *sentence(*range(351, 371))]
        made = found_for([*DONOR[:28], *new, *DONOR[28:]])
        assert made.forced[28 : 28 + copied].any() == made.forced[28 : 28 + copied].all() == forced
        assert made.forced[28 + copied : 28 + len(new)].all()
        assert not made.forced[:28].any()


def test_a_donors_first_sentence_is_computed_where_it_moved():
    """It was computed with nothing before it; and the first token is the attention sink."""
    target = [1, *DONOR[10:19], *DONOR[1:10], *DONOR[19:]]
    made = found_for(target)
    assert made.forced[10:19].all()
    assert not made.forced[1:10].any()


def test_a_budget_takes_whole_sentences_edits_first():
    target = list(DONOR)
    target[12] = 399
    target[39] = 398
    n = len(target)
    free = found_for(target)
    assert free.forced.sum() == 7 + 7 + free.tail
    tight = found_for(target, budget=(free.tail + 8) / n)
    assert tight.forced.sum() == free.tail + 7
    assert tight.excluded.sum() == 7
    assert not (tight.forced & tight.excluded).any()
    none = found_for(target, budget=0.0)
    assert none.forced.sum() == none.tail


def test_the_question_is_the_last_sentence_of_some_length():
    parts = split_sentences(np.asarray(DONOR), ENDS)
    assert parts.stops[-1] - parts.starts[-1] == 1  # the marker behind the question
    assert found_for(DONOR).tail == 6
    assert found_for(DONOR, tail=1).tail == 1
    assert found_for(DONOR, tail=10_000).forced.all()


def test_without_known_sentence_ends_fixed_lengths_do():
    ids = np.arange(3, 60)
    held = DonorTokens.of(ids)
    found = token_map("context", ids, held, lambda i: TABLE[np.asarray(i)])
    made = mark_forced(ids, held, found)
    assert 1 <= made.tail <= 16
    assert made.forced.sum() == made.tail
