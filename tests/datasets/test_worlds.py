"""The made-up worlds give every version the same samples: published figures and the small models depend on them. And what they
say of their samples is true."""

import hashlib
import io
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dejakv.datasets.base import Sample
from dejakv.errors import DatasetError
from dejakv_models import docs, shapes
from dejakv_models.docs_facts import ATTRIBUTES
from dejakv_models.shapes import Mix, ShapesDataset
from dejakv_models.shapes_language import Reference
from dejakv_models.shapes_programs import KINDS, SceneQuestion, Step, answer, execute, find, full_answer, sample
from dejakv_models.shapes_scene import Scene, Thing, make_scene, png, render

SEEDS = st.integers(0, 10**6)


def digest(items: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for item in items:
        found.update(repr(item).encode())
    return found.hexdigest()[:16]


def told(samples: Iterable[Sample]) -> str:
    return digest((s.id, s.question, s.answer, sorted(s.fields.items())) for s in samples)


@pytest.mark.parametrize(
    ("wordings", "expected"),
    [("seen", "b2d26b8466cd07ff"), ("held-out", "fbbbaa37ddb75a18"), ("all", "fe7ef730cf8f33b8")],
)
def test_questions_about_pictures_stay_the_same(wordings: Any, expected: str) -> None:
    assert told(ShapesDataset(3, 300, images=20, wordings=wordings)) == expected


def test_pictures_stay_the_same() -> None:
    scenes = [make_scene(random.Random(seed), 1 + seed % 6) for seed in range(12)]
    means = np.stack([render(scene).reshape(16, 4, 16, 4, 3).mean((1, 3)).round() for scene in scenes])
    assert digest(means.astype(int).tolist()) == "4b5c97555be9c047"


def test_documents_and_their_changes_stay_the_same() -> None:
    rng = random.Random(5)
    documents = [docs.make_document(rng, 24, wordings=words) for words in ("train", "held_out") for _ in range(5)]
    changed = [docs.change(kind, docs.make_document(rng, 12), rng) for kind in docs.KINDS]
    said = [(made.target.text, [(q.text, q.answer, q.old_answer) for q in made.questions]) for made in changed]
    assert digest([*(doc.text for doc in documents), *said]) == "f9bb2ee881f62ac2"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: told(shapes.dataset(0, None)), "13c725d2628fa4d1"),
        (
            lambda: told(ShapesDataset(5, 80, kinds=("color", "left"), things=(1, 4), mix=Mix(0, 0, 0))),
            "4719d16c09b4fba1",
        ),
        (lambda: told(docs.dataset(0, None)), "c44545ede77e7626"),
        (lambda: digest(docs.prompt(s) for s in docs.DocsDataset(3, 60, 12, 3, "held_out", 0.3)), "fe34e95852837876"),
        (lambda: digest(variants()), "2ffbb2c8d1e63543"),
    ],
    ids=["shapes", "mix", "docs", "set", "variants"],
)
def test_streams_stay_the_same(make: Callable[[], str], expected: str) -> None:
    assert make() == expected


def variants() -> Iterable[str]:
    rng = random.Random(1)
    doc = docs.make_document(rng, 20)
    yield docs.paraphrase(doc, rng, share=0.3, wordings="held_out").target.text
    for where in ("end", "start", "inside"):
        yield docs.extend(doc, rng, facts=5, where=where).target.text
    yield docs.edit(doc, rng, facts=3, questions=6).target.text


# Documents


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(2, 40), st.sampled_from(docs.KINDS), st.sampled_from([1, 6, None]))
def test_every_question_is_answered_by_target_and_donor_as_recorded(
    seed: int, facts: int, kind: docs.Kind, questions: int | None
) -> None:
    donor = docs.make_document(random.Random(seed), facts)
    change = docs.change(kind, donor, random.Random(seed), questions=questions)
    assert (change.kind, change.donor) == (kind, donor)
    assert change.target.text != donor.text
    asked = [q.fact.key for q in change.questions]
    assert 1 <= len(set(asked)) == len(asked) <= (questions or len(change.target.facts))
    for q in change.questions:
        assert q.answer == change.target.answer(*q.fact.key)
        assert q.old_answer == donor.answer(*q.fact.key)
        assert q.must_change == (q.answer != q.old_answer)
        assert q.fact.name.capitalize() in q.text
    assert set(change.must_stay) | set(change.must_change) == set(change.questions)
    assert {f for f in change.target.facts if donor.answer(*f.key) != f.value} == set(change.changed)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(1, 16), st.sampled_from(["train", "held_out"]))
def test_an_edit_changes_one_token_for_each_edited_fact(seed: int, facts: int, wordings: Any) -> None:
    doc = docs.make_document(random.Random(seed), 16, wordings=wordings)
    change = docs.edit(doc, random.Random(seed), facts=facts, questions=None)
    old, new = change.donor.text.split(), change.target.text.split()
    assert sum(a != b for a, b in zip(old, new, strict=True)) == facts == len(change.changed) == len(change.must_change)
    for q in change.must_change:
        assert q.answer in ATTRIBUTES[q.fact.attribute].values


def test_a_document_stream_says_what_it_repeats_and_which_answers_are_wrong() -> None:
    samples = list(docs.DocsStream(seed=1, samples=400, documents=10))
    assert samples == list(docs.DocsStream(seed=1, samples=400, documents=10))
    seen = {s.fields["relation"] for s in samples}
    assert seen == {"new", "same_document", "repeat", "paraphrase", "reorder", "edit", "extend", "merge"}
    earlier: set[tuple[str, str]] = set()
    for s in samples:
        assert (s.fields["relation"] == "repeat") <= ((s.context, s.question) in earlier)
        earlier.add((s.context, s.question))
        if "mustChange" in s.fields:
            assert s.fields["mustChange"] == (s.fields["oldAnswer"] != s.answer)


def test_the_prompt_holds_document_and_question_between_the_markers() -> None:
    (s,) = docs.DocsDataset(samples=1)
    assert docs.prompt(s) == f"<s> {s.context} <q> {s.question} <a>" == docs.prompt_of(s.context, s.question)
    assert s.answer in s.context.lower().split(" ") or f"{s.answer}." in s.context.lower()


ONE, DOC = docs.make_document(random.Random(0), 1, filler_share=0), docs.make_document(random.Random(0), 16)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda rng: docs.make_document(rng, 260), r"at most about \d+ facts"),
        (lambda rng: docs.make_document(rng, 0), "between 1 and"),
        (lambda rng: docs.reorder(ONE, rng), "at least 2 facts"),
        (lambda rng: docs.edit(DOC, rng, facts=17), "give 1 to 16"),
        (lambda rng: docs.merge(DOC, rng, other=DOC), "different things"),
        (lambda rng: docs.merge(docs.make_document(rng, 180), rng), "docs-lm reads 2048"),
        (lambda rng: docs.reorder(DOC, rng, questions=0), "at least one question"),
        (lambda rng: docs.change("shuffle", DOC, rng), "choose one of paraphrase, reorder"),  # type: ignore[arg-type]
        (lambda rng: make_scene(rng, 0), "fewer things"),
        (lambda rng: make_scene(rng, 17), "fewer things"),
        (lambda _: ShapesDataset(kinds=("color", "weight")), "weight"),
        (lambda _: ShapesDataset(wordings="other"), "'seen', 'held-out', 'all'"),  # type: ignore[arg-type]
        (lambda _: list(ShapesDataset(0, 500, images=1, things=(1, 1), kinds=("size",), mix=Mix(0, 0))), "give more images"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused_with_a_remedy(make: Callable[[random.Random], Any], says: str) -> None:
    with pytest.raises(DatasetError, match=says):
        make(random.Random(0))


# Pictures


def _plain_answer(query: SceneQuestion, scene: Scene) -> str:
    found = [
        [t for t in scene.things if all(getattr(t, k) == v for k, v in vars(r).items() if v is not None)]
        for r in query.references
    ]
    if query.kind == "count":
        return str(len(found[0]))
    if query.kind == "exist":
        return "yes" if found[0] else "no"
    first, second = found[0][0], found[-1][0]
    if query.kind in ("color", "size", "shape"):
        return getattr(first, query.kind)
    truth = {
        "same color": first.color == second.color,
        "same size": first.size == second.size,
        "left": first.x + first.diameter / 2 < second.x + second.diameter / 2,
        "right": first.x + first.diameter / 2 > second.x + second.diameter / 2,
        "above": first.y + first.diameter / 2 < second.y + second.diameter / 2,
        "below": first.y + first.diameter / 2 > second.y + second.diameter / 2,
    }[query.kind]
    return "yes" if truth else "no"


@given(SEEDS, st.integers(1, 6), st.sampled_from(KINDS))
def test_a_question_names_things_without_doubt_and_is_answered_as_the_picture_reads(
    seed: int, count: int, kind: str
) -> None:
    rng = random.Random(seed)
    scene = make_scene(rng, count)
    query = sample(scene, rng, kind)
    if query is None:
        return
    assert answer(query, scene) == _plain_answer(query, scene)
    if kind not in ("exist", "count"):
        found = [find(scene, r) for r in query.references]
        assert [len(f) for f in found] == [1] * len({f[0] for f in found})
    asked = kind.removeprefix("same ")
    assert asked not in ("color", "size", "shape") or all(getattr(r, asked) is None for r in query.references)


def test_a_record_reads_as_gqas() -> None:
    made = next(iter(ShapesDataset(0, 1))).fields
    assert set(made) >= {
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
    assert {"structural", "semantic", "detailed"} == set(made["types"])
    scene = Scene((Thing("ball", "red", "small", 0, 0, 2, 2, 8), Thing("cube", "gray", "large", 2, 1, 33, 17, 14)))
    steps = shapes.record("p", scene, SceneQuestion("color", (Reference("cube", size="large"),)), shapes.Wording(0))
    assert steps["semanticStr"] == "select: cube (1)->filter size: large [0]->query: color [1]"
    with pytest.raises(ValueError, match="ends with"):
        execute([Step("select", "ball")], scene)


@pytest.mark.parametrize(
    ("kind", "references", "said", "sentence"),
    [
        ("color", (Reference("ball"),), "red", "The ball is red."),
        ("shape", (Reference(color="red"),), "ball", "The red thing is a ball."),
        ("exist", (Reference("ball", "orange"),), "yes", "Yes, there is an orange ball."),
        ("exist", (Reference("ball", "orange"),), "no", "No, there is no orange ball."),
        ("count", (Reference("cube"),), "1", "There is 1 cube."),
        ("count", (Reference("cube"),), "0", "There are 0 cubes."),
        ("same color", (Reference("ball"), Reference("cube")), "no", "No, the ball and the cube do not have the same color."),
        ("left", (Reference("ball"), Reference("cube")), "yes", "Yes, the ball is left of the cube."),
        ("below", (Reference("ball"), Reference("cube")), "no", "No, the ball is not below the cube."),
    ],
)  # fmt: skip
def test_full_answers_are_sentences(kind: str, references: tuple[Reference, ...], said: str, sentence: str) -> None:
    assert full_answer(SceneQuestion(kind, references), said) == sentence


def test_a_stream_of_pictures_says_what_it_repeats() -> None:
    data = ShapesDataset(0)
    stream = list(data)
    assert stream == list(data)
    assert len(stream) == len({s.id for s in stream}) == 300
    by_id, origins = {s.id: s for s in stream}, [s.fields["origin"] for s in stream]
    assert min(map(origins.count, ("exact", "paraphrase", "other-image", "near-duplicate"))) >= 5
    plain = {s.fields["imageId"]: s.media[0].digest for s in stream if not s.fields["reencoded"]}
    assert any(s.fields["reencoded"] for s in stream)
    for again in stream:
        if again.fields["imageId"] in plain:
            assert (again.media[0].digest != plain[again.fields["imageId"]]) == again.fields["reencoded"]
        origin, first = again.fields["origin"], by_id.get(again.fields["of"])
        if first is None:
            continue
        same_words = again.question.lower().split() == first.question.lower().split()
        assert same_words == (origin != "paraphrase")
        assert (again.fields["imageId"] == first.fields["imageId"]) == (origin in ("exact", "paraphrase"))
        assert (again.fields["id"] == first.fields["id"]) == (origin == "exact")
        assert origin == "other-image" or (again.answer == first.answer) == (origin != "near-duplicate")


def test_the_same_pixels_in_other_bytes() -> None:
    pixels = render(make_scene(random.Random(1), 4))
    one, other = (png(pixels, compression) for compression in (1, 6))
    assert one != other
    assert all(np.array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels) for data in (one, other))


def test_endless_streams_and_the_prompt() -> None:
    with pytest.raises(TypeError, match="no length"):
        len(ShapesDataset(0, None))
    assert shapes.prompt("What color is the ball?") == "<image>What color is the ball?<|answer|>"
