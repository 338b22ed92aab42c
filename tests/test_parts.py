"""Parts of a prompt: where they stand, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.errors import InputError
from dejakv.request import MAX_PARTS, Media, Request, find_frame

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(str.strip)


@settings(deadline=None)
@given(st.lists(texts, min_size=1, max_size=5, unique=True), texts, st.sampled_from(["\n\n", " ", "--", ""]), st.data())
def test_a_prompt_with_another_order_has_the_same_parts(
    parts: list[str], around: str, between: str, data: st.DataObject
) -> None:
    prompt = f"{around}: {between.join(parts)}\n{around}"
    frame = find_frame(prompt, parts)
    order = data.draw(st.permutations(range(len(parts))))
    assert frame.prompt(range(len(parts))) == prompt
    assert sorted(frame.prompt(order)) == sorted(prompt)


def test_what_stands_between_two_parts_may_hold_a_part() -> None:
    frame = find_frame("a b. a, b, c?", ["a", "b", "c"])
    assert (frame.before, frame.between, frame.after) == ("a b. ", ", ", "?")
    assert frame.prompt([2, 0, 1]) == "a b. c, a, b?"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), "needs the parts"),
        (("one", " "), "part 1 is empty"),
        (("one", "two", "one"), "part 2 is given twice"),
        (("two", "one"), "in the order given"),
        (("one", "three", "two"), "in the order given"),  # not the same text between them
        (("one", "four"), "word for word"),
        (tuple(map(str, range(MAX_PARTS + 1))), "too many"),
    ],
)
def test_parts_that_contradict_the_prompt_are_refused(parts: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Request("r", "say: one, two; three", "say", parts=parts, order="free")


def test_parts_need_an_order_and_an_order_parts() -> None:
    with pytest.raises(InputError, match="order='free'"):
        Request("r", "one, two", "x", parts=("one", "two"))
    with pytest.raises(InputError, match="choose one of given, free"):
        Request("r", "one, two", "x", parts=("one", "two"), order="any")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="pictures"):
        Request("r", "one, two", "x", media=(Media(b"x"),), parts=("one", "two"), order="free")


def test_a_prompt_of_one_repeated_letter_is_no_work() -> None:
    with pytest.raises(InputError, match="do not stand"):
        find_frame("a" * 100_000, ["a", "aa", "b"])
