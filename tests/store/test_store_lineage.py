"""What was made from a prompt, through all generations."""

from dejakv.identity import Span
from dejakv.store.lineage import continuing, derived
from dejakv.testing.prompts import prompt_chunk
from dejakv.testing.purging import rows_chunk


def test_what_came_from_a_donor_is_told_through_all_generations() -> None:
    first = rows_chunk("1", donors=("d1",)).meta
    second = rows_chunk("2", donors=(first.id, "x")).meta
    third = rows_chunk("3", donors=(second.id, first.id)).meta
    metas = [third, second, first]
    assert sorted(derived(metas, "d1")) == sorted([first.id, second.id, third.id])
    assert derived(metas, "x") == [second.id, third.id]
    assert derived(metas, third.id) == []


def test_rows_of_a_prompts_own_text_are_its() -> None:
    own = rows_chunk("1", donors=("d1",), prompt="blended").meta
    assert derived([own], "blended") == [own.id]


def test_a_prompt_continues_another_with_the_same_media_alone() -> None:
    pictures = [Span(1, 2, "a" * 64), Span(1, 2, "b" * 64)]
    first, other = (prompt_chunk((1, 2, 2, 3), spans=(picture,)).meta for picture in pictures)
    longer = prompt_chunk((1, 2, 2, 3, 4), spans=(pictures[0],)).meta
    assert continuing([first, other, longer], first) == [longer]
    assert continuing([first, other, longer], other) == []
