"""Questions as programs: their answers against a second, plain implementation, and their balance."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dejakv_models.shapes_language import Reference
from dejakv_models.shapes_programs import KINDS, SceneQuestion, Step, answer, execute, find, program, sample
from dejakv_models.shapes_scene import Scene, Thing, make_scene

SEEDS = st.integers(0, 10**6)


def _matching(scene: Scene, ref: Reference) -> list[Thing]:
    wanted = {k: v for k, v in vars(ref).items() if v is not None}
    return [t for t in scene.things if all(getattr(t, k) == v for k, v in wanted.items())]


def _plain_answer(query: SceneQuestion, scene: Scene) -> str:
    found = [_matching(scene, r) for r in query.references]
    kind = query.kind
    if kind == "count":
        return str(len(found[0]))
    if kind == "exist":
        return "yes" if found[0] else "no"
    first = found[0][0]
    if kind in ("color", "size", "shape"):
        return getattr(first, kind)
    second = found[1][0]
    truth = {
        "same color": first.color == second.color,
        "same size": first.size == second.size,
        "left": first.x + first.diameter / 2 < second.x + second.diameter / 2,
        "right": first.x + first.diameter / 2 > second.x + second.diameter / 2,
        "above": first.y + first.diameter / 2 < second.y + second.diameter / 2,
        "below": first.y + first.diameter / 2 > second.y + second.diameter / 2,
    }[kind]
    return "yes" if truth else "no"


@given(SEEDS, st.integers(1, 6), st.sampled_from(KINDS))
def test_answers_agree_with_a_plain_reading_of_the_picture(seed: int, count: int, kind: str) -> None:
    rng = random.Random(seed)
    scene = make_scene(rng, count)
    query = sample(scene, rng, kind)
    if query is not None:
        assert answer(query, scene) == _plain_answer(query, scene)


@given(SEEDS, st.sampled_from([k for k in KINDS if k not in ("exist", "count")]))
def test_a_question_names_things_without_doubt_and_does_not_give_the_answer_away(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    scene = make_scene(rng, 5)
    query = sample(scene, rng, kind)
    if query is None:
        return
    found = [find(scene, r) for r in query.references]
    assert [len(f) for f in found] == [1] * len(found)
    assert len({f[0] for f in found}) == len(found)
    asked = kind.removeprefix("same ")
    if asked in ("color", "size", "shape"):
        assert all(getattr(r, asked) is None for r in query.references)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("color", "size", "shape", "count")])
def test_yes_and_no_come_out_even(kind: str) -> None:
    rng = random.Random(kind)
    said: Counter[str] = Counter()
    for _ in range(1500):
        scene = make_scene(rng, rng.randint(2, 6))
        query = sample(scene, rng, kind)
        if query is not None:
            said[answer(query, scene)] += 1
    assert 0.42 < said["yes"] / said.total() < 0.58


def test_a_program_reads_like_gqas() -> None:
    query = SceneQuestion("left", (Reference("ball", "red"), Reference("cube")))
    assert program(query) == (
        Step("select", "ball"),
        Step("filter color", "red", (0,)),
        Step("select", "cube"),
        Step("verify rel", "left", (1, 2)),
    )


def test_a_program_without_a_last_step_is_refused() -> None:
    with pytest.raises(ValueError, match="ends with"):
        execute([Step("select", "ball")], make_scene(random.Random(0), 2))
