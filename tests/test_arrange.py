"""The order of parts: never a worse prefix than the one given, the same parts, the same answer each time."""

import re
from collections.abc import Sequence
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dejakv
from dejakv.decide.part_order import PartArrangement, SeenPrompts
from dejakv.errors import ConfigError, InputError


def tokenize(text: str) -> list[int]:
    """Words and what stands between them, by their hash: what a border is depends on both sides, as in a real tokenizer."""
    return [crc32(piece.encode()) for piece in re.findall(r"\w+|\W+", text)]


def passage(number: int, words: int = 40) -> str:
    return " ".join(f"p{number}w{word}" for word in range(words))


HEAD, ASK = "answer from these passages of the manual please.\n\n", "\n\nwhat is it?"


def prompt(numbers: Sequence[int]) -> str:
    return HEAD + "\n\n".join(map(passage, numbers)) + ASK


def best(numbers: Sequence[int], seen: SeenPrompts, partition: str = "default") -> PartArrangement:
    parts = [passage(number) for number in numbers]
    return dejakv.arrange(parts, seen, tokenize=tokenize, before=HEAD, after=ASK, partition=partition)


def test_parts_that_were_sent_before_come_first_in_their_old_order() -> None:
    seen = SeenPrompts()
    seen.add(tokenize(prompt([3, 1, 4])))
    found = best([1, 5, 3, 2], seen)
    assert found.order == (2, 0, 1, 3)
    assert found.prompt == prompt([3, 1, 5, 2])
    assert found.held > 2 * 70
    assert found.given == 16  # the head, in whole blocks
    assert best([2, 1, 3], seen, "another").order == (0, 1, 2)


def test_nothing_seen_leaves_the_order() -> None:
    found = best([2, 1, 3], SeenPrompts())
    assert (found.order, found.changed, found.held, found.prompt) == ((0, 1, 2), False, 0, prompt([2, 1, 3]))


def test_of_equal_ways_the_callers_comes_first() -> None:
    seen = SeenPrompts()
    for number in (1, 2, 3):
        seen.add(tokenize(prompt([number])))
    assert best([9, 2, 1], seen).order == (1, 0, 2)
    assert best([9, 1, 2], seen).order == (1, 0, 2)


streams = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True), min_size=1, max_size=6)


@settings(deadline=None)
@given(streams)
def test_an_order_is_a_permutation_with_no_shorter_prefix(stream: list[list[int]]) -> None:
    seen = SeenPrompts()
    for numbers in stream:
        found, again = best(numbers, seen), best(numbers, seen)
        assert found.order == again.order
        assert sorted(found.order) == list(range(len(numbers)))
        assert found.prompt == prompt([numbers[place] for place in found.order])
        assert found.held == seen.prefix_length(tokenize(found.prompt))
        assert found.given == seen.prefix_length(tokenize(prompt(numbers)))
        assert found.held >= found.given
        assert found.changed == (found.held > found.given)
        seen.add(tokenize(found.prompt))


@settings(deadline=None)
@given(streams)
def test_a_prompt_that_was_sent_is_found_from_any_order(stream: list[list[int]]) -> None:
    for numbers in stream:
        seen = SeenPrompts()
        seen.add(tokenize(prompt(numbers)))
        found = best(sorted(numbers), seen)
        assert found.prompt == prompt(numbers)


def test_no_more_openings_are_tokenized_than_are_of_use() -> None:
    calls: list[str] = []

    def counted(text: str) -> list[int]:
        calls.append(text)
        return tokenize(text)

    parts = [passage(number, words=400) for number in range(8)]
    dejakv.arrange(parts, SeenPrompts(), tokenize=counted, before=HEAD, after=ASK)
    assert len(calls) == 2 + 8  # the prompt, what stands before the parts, and each part's beginning
    assert sum(map(len, calls[1:])) < len(calls[0]) / 4


def test_seen_prompts_forget_the_oldest_and_from_the_end() -> None:
    seen = SeenPrompts(max_blocks=4)
    first, second = list(range(64)), list(range(100, 132))
    seen.add(first)
    assert seen.prefix_length(first) == 48  # its last token is computed for the answer
    seen.add(second)
    assert (seen.prefix_length([*first, 1]), seen.prefix_length([*second, 1]), len(seen)) == (32, 32, 4)
    with pytest.raises(ConfigError, match="give 1 or more"):
        SeenPrompts(0)


@pytest.mark.parametrize("parts", [[], [""], ["one", "one"], "one", [1, 2]])
def test_wrong_parts_are_refused(parts: list[str]) -> None:
    with pytest.raises(InputError):
        dejakv.arrange(parts, SeenPrompts(), tokenize=tokenize)
