"""Records: GQA's fields, and that what they claim about answers holds."""

import random

import pytest

from dejakv_models.shapes_language import Reference
from dejakv_models.shapes_programs import (
    KINDS,
    SceneQuestion,
    Wording,
    answer,
    find,
    full_answer,
    question_id,
    record,
    sample,
    semantic_text,
    wordings,
)
from dejakv_models.shapes_scene import Scene, Thing, make_scene

GQA = {
    "id",
    "imageId",
    "question",
    "answer",
    "fullAnswer",
    "semantic",
    "semanticStr",
    "groups",
    "types",
}
RED_BALL = Thing("ball", "red", "small", 0, 0, 2, 2, 8)
GRAY_CUBE = Thing("cube", "gray", "large", 2, 1, 33, 17, 14)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_has_gqas_fields(kind: str) -> None:
    scene, query, rng = make_scene(random.Random(0), 4), None, random.Random(kind)
    while query is None:
        scene = make_scene(rng, 4)
        query = sample(scene, rng, kind)
    wording = Wording(1, 1)
    made = record("pic-7", scene, query, wording)
    assert set(made) >= GQA
    assert made["imageId"] == "pic-7"
    assert made["question"] == wording.text(query)
    assert made["answer"] == answer(query, scene)
    assert {"structural", "semantic", "detailed"} == set(made["types"])
    assert {"global", "local"} == set(made["groups"])


def test_semantic_string_as_in_gqa() -> None:
    scene = Scene((RED_BALL, GRAY_CUBE))
    query = SceneQuestion("color", (Reference("cube", size="large"),))
    made = record("p", scene, query, Wording(0))
    assert made["semanticStr"] == "select: cube (1)->filter size: large [0]->query: color [1]"
    assert made["semantic"][1] == {"operation": "filter size", "dependencies": [0], "argument": "large"}
    assert semantic_text(made["semantic"]) == made["semanticStr"]
    absent = record("p", scene, SceneQuestion("exist", (Reference("cone"),)), Wording(0))
    assert absent["semanticStr"] == "select: cone (-)->exist: ? [0]"


@pytest.mark.parametrize(
    ("query", "said", "sentence"),
    [
        (SceneQuestion("color", (Reference("ball"),)), "red", "The ball is red."),
        (SceneQuestion("shape", (Reference(color="red"),)), "ball", "The red thing is a ball."),
        (SceneQuestion("exist", (Reference("ball", "orange"),)), "yes", "Yes, there is an orange ball."),
        (SceneQuestion("exist", (Reference("ball", "orange"),)), "no", "No, there is no orange ball."),
        (SceneQuestion("count", (Reference("cube"),)), "1", "There is 1 cube."),
        (SceneQuestion("count", (Reference("cube"),)), "0", "There are 0 cubes."),
        (
            SceneQuestion("same color", (Reference("ball"), Reference("cube"))),
            "no",
            "No, the ball and the cube do not have the same color.",
        ),
        (SceneQuestion("left", (Reference("ball"), Reference("cube"))), "yes", "Yes, the ball is left of the cube."),
        (SceneQuestion("below", (Reference("ball"), Reference("cube"))), "no", "No, the ball is not below the cube."),
    ],
)
def test_full_answers_are_sentences(query: SceneQuestion, said: str, sentence: str) -> None:
    assert full_answer(query, said) == sentence


def _apart(scene: Scene, query: SceneQuestion) -> bool:
    a, b = (scene.things[find(scene, r)[0]] for r in query.references)
    if query.kind in ("left", "right"):
        return a.column != b.column
    return query.kind not in ("above", "below") or a.row != b.row


def test_ids_depend_on_picture_query_and_wording() -> None:
    one, two = SceneQuestion("color", (Reference("ball"),)), SceneQuestion("size", (Reference("ball"),))
    ids = {question_id(p, q, w) for p in ("a", "b") for q in (one, two) for w in wordings(one)}
    assert len(ids) == 2 * 2 * len(wordings(one))


def test_splits_of_wordings() -> None:
    query = SceneQuestion("color", (Reference("ball"),))
    seen, held_out = wordings(query, "seen"), wordings(query, "held-out")
    assert {*seen, *held_out} == set(wordings(query))
    assert not any(w.held_out(query) for w in seen)
    assert all(w.held_out(query) for w in held_out)
