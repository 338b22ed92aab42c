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
from dejakv_models.shapes import Mix, ShapesDataset
from dejakv_models.shapes_scene import make_scene, png, render

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
    assert {f for f in change.target.facts if donor.answer(*f.key) != f.value} == set(change.changed)


def test_the_prompt_holds_document_and_question_between_the_markers() -> None:
    (s,) = docs.DocsDataset(samples=1)
    assert docs.prompt(s) == f"<s> {s.context} <q> {s.question} <a>" == docs.prompt_of(s.context, s.question)
    assert s.answer in s.context.lower().split(" ") or f"{s.answer}." in s.context.lower()


DOC = docs.make_document(random.Random(0), 16)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda rng: docs.make_document(rng, 260), r"at most about \d+ facts"),
        (lambda rng: docs.edit(DOC, rng, facts=17), "give 1 to 16"),
        (lambda rng: docs.merge(docs.make_document(rng, 180), rng), "docs-lm reads 2048"),
        (lambda rng: docs.change("shuffle", DOC, rng), "choose one of paraphrase, reorder"),  # type: ignore[arg-type]
        (lambda rng: make_scene(rng, 17), "fewer things"),
        (lambda _: ShapesDataset(kinds=("color", "weight")), "weight"),
        (lambda _: list(ShapesDataset(0, 500, images=1, things=(1, 1), kinds=("size",), mix=Mix(0, 0))), "give more images"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused_with_a_remedy(make: Callable[[random.Random], Any], says: str) -> None:
    with pytest.raises(DatasetError, match=says):
        make(random.Random(0))


# Pictures


def test_the_same_pixels_in_other_bytes() -> None:
    pixels = render(make_scene(random.Random(1), 4))
    one, other = (png(pixels, compression) for compression in (1, 6))
    assert one != other
    assert all(np.array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels) for data in (one, other))
