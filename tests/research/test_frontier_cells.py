"""What a frontier compares: its ways of blending and its cases."""

import pytest
from research.frontier.cases import KINDS, TextCases, make_case
from research.frontier.cells import cells, text_cells

from dejakv.blend.settings import QUALITIES, BlendConfig
from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError


def test_cases_follow_from_their_numbers_and_edits_ask_what_changed():
    words: dict[str, int] = {}

    def encode(text: str) -> tuple[int, ...]:
        return tuple(words.setdefault(word, len(words)) for word in text.lower().replace(".", " .").split())

    one, again = (make_case("edit", 3, 8, encode) for _ in range(2))
    assert one == again
    assert one != make_case("edit", 4, 8, encode)
    assert one.old_answer is not None
    assert one.old_answer != one.answer
    assert len(make_case("merge", 0, 8, encode).donors) == 2


def test_every_map_selector_and_share_is_among_the_cells():
    made = cells()
    assert {cell.map for cell in made} == {"context", "embedding", "lsh"}
    assert {cell.selector for cell in made} == {"prophet", "similarity", "value", "kv", "random"}
    assert {cell.share for cell in made if cell.selector == "value"} == {0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0}
    assert len({cell.name for cell in made}) == len(made)
    assert any(cell.main for cell in made)
    assert all(cell.config.share == cell.share for cell in made)


@pytest.mark.parametrize("made", [cells(), text_cells()])
def test_each_quality_is_a_cell_of_its_name_and_blends_as_a_run_does(made):
    named = {cell.name: cell for cell in made if cell.quality}
    assert list(named) == list(QUALITIES)
    for name, cell in named.items():
        quality = SemanticCacheConfig(blend_quality=name).blend
        ran = BlendConfig(selector=quality.selector, share=quality.share, max_share=1.0)
        assert cell.main
        assert cell.config == ran


def words_encoder():
    words: dict[str, int] = {}
    return lambda text: tuple(words.setdefault(word, len(words)) for word in text.replace(".", " .").split())


@pytest.mark.parametrize("kind", KINDS)
def test_cases_of_real_text_follow_from_their_numbers(kind):
    cases = TextCases(4)
    encode = words_encoder()
    asked, again, summary = (cases.make(kind, number, encode, 0) for number in (2, 2, 3))
    assert asked == again
    assert asked.answer is not None
    assert summary.answer is None
    assert set(asked.answer) <= set(asked.target)
    assert all(donor != asked.target for donor in asked.donors)
    shared = [len(set(asked.target) & set(donor)) / len(set(asked.target)) for donor in asked.donors]
    assert len(asked.donors) == (4 if kind == "apart" else 1)
    assert min(shared) > (0.2 if kind == "apart" else 0.7)
    if kind == "edit":
        assert asked.old_answer is not None
        assert set(asked.old_answer) <= set(asked.donors[0])
        assert set(asked.old_answer).isdisjoint(asked.target)
    else:
        assert asked.old_answer is None


def test_a_case_needs_two_passages():
    with pytest.raises(ConfigError, match="at least 2"):
        TextCases(1)
