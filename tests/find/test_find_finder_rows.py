"""Rows of blended prompts in the finder: donors of later blends, within their bound, and of nothing else."""

import numpy as np
from tests.find.finders import ASKED, WORDS, Likes, copied, described, finder_of, id_of

from dejakv.decide.finder import Finder
from dejakv.decide.plan import Ask
from dejakv.store.base import ROWS, Chunk, ChunkMeta, Tensor


def rows_of(made: Finder, tokens: tuple[int, ...], generation: int = 1, name: str = "rows", **other: str) -> ChunkMeta:
    """Stores rows of a blended prompt; their description."""
    where = {"partition": "p", "epoch": "e", **other}
    meta = ChunkMeta(
        name, where["partition"], where["epoch"], tokens, "", "", kind=ROWS, position=700, generation=generation
    )
    made.store.put(Chunk(meta, Tensor(np.zeros((2, 1, 1, len(tokens), 1), np.float32), "F32")))
    made.add(meta)
    return meta


def test_rows_of_a_blended_prompt_are_found_by_blends_alone() -> None:
    """Not by a prompt that begins with them or equals them, and not by a level; by name by a blend."""
    level = Likes({"rows": 1.0})
    made = finder_of(level=level)
    rows_of(made, WORDS[:100])
    for tokens in (WORDS[:100], (*WORDS[:100], 7, 8)):
        for mode in ("off", "exact", "adopt", "top_layer"):
            decision = made.decide(copied(tokens), Ask(mode))
            assert (decision.plan.method, decision.found.donors, decision.found.prefix) == ("none", (), None)
        assert made.decide(copied(tokens), Ask("blend")).plan.method == "blend"
        assert made.exactly(copied(tokens)).plan.method == "none"
    for mode in ("exact", "adopt", "top_layer"):
        decision = made.decide(ASKED, Ask(mode, named=("rows",)))
        assert "not known" in decision.plan.reason
    assert [meta.id for meta in made.decide(ASKED, Ask("blend", named=("rows",))).plan.donors] == ["rows"]
    assert made.decide(ASKED, Ask("adopt")).plan.donors == ()


def test_of_equal_runs_the_least_generation_is_taken() -> None:
    made = finder_of(max_generation=3)
    names = [rows_of(made, WORDS[:100], generation=g, name=f"rows {g}").id for g in (2, 1, 3)]
    asked = copied((7, 8), WORDS[:100])
    assert [meta.id for meta in made.decide(asked, Ask("blend")).plan.donors] == [names[1]]
    exact = copied((1, 2, 3), WORDS[:100])
    made.store.put(Chunk(described(exact), Tensor(np.zeros((2, 1, 1, 103, 1), np.float32), "F32")))
    made.add(described(exact))
    assert [meta.id for meta in made.decide(asked, Ask("blend")).plan.donors] == [id_of(exact)]


def test_rows_are_found_where_the_index_of_copied_text_is_made_late() -> None:
    made = finder_of()
    late = rows_of(made, WORDS[:100])
    other = ChunkMeta("other", "p", "e", WORDS[100:300], "", "", kind="encoder output")
    made.store.put(Chunk(other, Tensor(np.zeros((2, 1, 1, 200, 1), np.float32), "F32")))
    assert [meta.id for meta in made.decide(copied((7, 8), WORDS[:100]), Ask("blend")).plan.donors] == [late.id]
    assert made.decide(copied((7, 8), WORDS[100:300]), Ask("blend")).plan.method == "none"
