"""The made-up worlds give every version the same samples: published figures and the small models depend on them."""

import hashlib
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from dejakv.errors import DatasetError
from dejakv_models import docs
from dejakv_models.shapes import ShapesDataset
from dejakv_models.shapes_scene import make_scene, png, render


def digest(items: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for item in items:
        found.update(repr(item).encode())
    return found.hexdigest()[:16]


@pytest.mark.parametrize(
    ("wordings", "expected"),
    [("seen", "b2d26b8466cd07ff"), ("held-out", "fbbbaa37ddb75a18"), ("all", "fe7ef730cf8f33b8")],
)
def test_questions_about_pictures_stay_the_same(wordings: Any, expected: str) -> None:
    made = ShapesDataset(3, 300, images=20, wordings=wordings)
    assert digest((s.id, s.question, s.answer, sorted(s.fields.items())) for s in made) == expected


def test_pictures_stay_the_same() -> None:
    scenes = [make_scene(random.Random(seed), 1 + seed % 6) for seed in range(12)]
    means = np.stack([render(scene).reshape(16, 4, 16, 4, 3).mean((1, 3)).round() for scene in scenes])
    assert digest(means.astype(int).tolist()) == "4b5c97555be9c047"


def test_the_same_pixels_in_other_bytes() -> None:
    from io import BytesIO

    from PIL import Image

    pixels = render(make_scene(random.Random(1), 4))
    one, other = (png(pixels, compression) for compression in (1, 6))
    assert one != other
    assert all(np.array_equal(np.asarray(Image.open(BytesIO(data))), pixels) for data in (one, other))


@pytest.mark.parametrize("count", [0, 17])
def test_a_crowded_or_empty_scene_is_refused_with_a_remedy(count: int) -> None:
    with pytest.raises(DatasetError, match="fewer things"):
        make_scene(random.Random(0), count)


def test_documents_and_their_changes_stay_the_same() -> None:
    rng = random.Random(5)
    documents = [docs.make_document(rng, 24, wordings=words) for words in ("train", "held_out") for _ in range(5)]
    changed = [docs.change(kind, docs.make_document(rng, 12), rng) for kind in docs.KINDS]
    said = [(made.target.text, [(q.text, q.answer, q.old_answer) for q in made.questions]) for made in changed]
    assert digest([*(doc.text for doc in documents), *said]) == "f9bb2ee881f62ac2"


def test_too_long_a_document_is_refused_with_the_number_that_fits() -> None:
    with pytest.raises(DatasetError, match=r"at most about \d+ facts"):
        docs.make_document(random.Random(0), 260)


@pytest.mark.parametrize(("options", "says"), [({"facts": 0}, "between 1 and"), ({"filler_share": 1.5}, "0 to 1")])
def test_impossible_documents_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(DatasetError, match=says):
        docs.make_document(random.Random(0), **options)
