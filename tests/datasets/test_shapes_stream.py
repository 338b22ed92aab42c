"""The stream: deterministic, and its repeats are what they say they are."""

import io
from collections import Counter
from functools import lru_cache
from itertools import islice

import numpy as np
import pytest
from PIL import Image

from dejakv.datasets.base import Sample
from dejakv.errors import DatasetError
from dejakv_models.shapes import Mix, ShapesDataset, prompt


@lru_cache(maxsize=4)
def _stream(seed: int = 0) -> tuple[Sample, ...]:
    return tuple(ShapesDataset(seed))


def _pairs(origin: str) -> list[tuple[Sample, Sample]]:
    by_id = {s.id: s for s in _stream()}
    return [(s, by_id[s.fields["of"]]) for s in _stream() if s.fields["origin"] == origin]


def _normal(question: str) -> str:
    return " ".join(question.lower().split())


def test_the_same_seed_gives_the_same_samples_and_another_seed_others() -> None:
    data = ShapesDataset(3, 40)
    assert list(data) == list(data) == list(ShapesDataset(3, 40))
    assert [s.question for s in data] != [s.question for s in ShapesDataset(4, 40)]
    assert [s.media[0].digest for s in data] != [s.media[0].digest for s in ShapesDataset(4, 40)]
    assert len(data) == len(list(data)) == 40


def test_a_longer_stream_begins_like_a_shorter_one_on_the_same_pictures() -> None:
    short, long = ShapesDataset(0, 20, images=30), ShapesDataset(0, 50, images=30)
    assert list(short) == list(islice(long, 20))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_enough_repeats_for_a_cache_to_show_itself(seed: int) -> None:
    samples = _stream(seed)
    assert len(samples) == 300
    origins = Counter(s.fields["origin"] for s in samples)
    said: set[tuple[str, str]] = set()
    exact = 0
    for s in samples:
        key = (s.question, s.media[0].digest)
        exact += key in said
        said.add(key)
    assert exact >= 10
    assert origins["paraphrase"] >= 20
    assert 0.18 < origins["exact"] / 300 < 0.32
    assert 0.2 < origins["paraphrase"] / 300 < 0.35
    assert origins["near-duplicate"] >= 5
    assert origins["other-image"] >= 5
    assert len({s.id for s in samples}) == 300
    assert len({s.fields["type"] for s in samples}) == 7


def test_popularity_is_uneven() -> None:
    counts = Counter(s.fields["imageId"] for s in _stream()).most_common()
    assert counts[0][1] >= 4 * counts[len(counts) // 2][1]


def test_exact_repeats_say_the_same_about_the_same_picture() -> None:
    pairs = _pairs("exact")
    for again, first in pairs:
        assert again.fields["id"] == first.fields["id"]
        assert again.answer == first.answer
        assert _normal(again.question) == _normal(first.question)
        if not again.fields["altered"]:
            assert again.question == again.fields["question"]
    assert any(a.fields["altered"] for a, _ in pairs)
    assert any(not a.fields["altered"] and a.question == b.question for a, b in pairs)


def test_paraphrases_say_the_same_in_other_words() -> None:
    for again, first in _pairs("paraphrase"):
        assert again.fields["imageId"] == first.fields["imageId"]
        assert again.answer == first.answer
        assert _normal(again.question) != _normal(first.question)
        assert again.fields["id"] != first.fields["id"]


def test_near_duplicates_and_other_pictures_are_other_pictures() -> None:
    for again, first in _pairs("near-duplicate"):
        assert again.answer != first.answer
        assert again.media[0].digest != first.media[0].digest
        assert _normal(again.question) == _normal(first.question)
    for again, first in _pairs("other-image"):
        assert again.fields["imageId"] != first.fields["imageId"]
        assert _normal(again.question) == _normal(first.question)


def test_a_near_duplicate_looks_nearly_the_same() -> None:
    again, first = _pairs("near-duplicate")[0]
    a, b = (np.asarray(Image.open(io.BytesIO(s.media[0].data))).astype(int) for s in (again, first))
    assert 0 < (np.abs(a - b).max(axis=2) > 40).mean() < 0.06  # at most one cell of sixteen


def test_reencoded_copies_have_other_bytes_and_the_same_pixels() -> None:
    copies = [s for s in _stream() if s.fields["reencoded"]]
    assert copies
    plain = {s.fields["imageId"]: s for s in _stream() if not s.fields["reencoded"]}
    copy = next(s for s in copies if s.fields["imageId"] in plain)
    original = plain[copy.fields["imageId"]]
    assert copy.media[0].digest != original.media[0].digest
    pixels = [np.asarray(Image.open(io.BytesIO(s.media[0].data))) for s in (copy, original)]
    assert np.array_equal(*pixels)


def test_wordings_held_out_from_training_only() -> None:
    assert all(s.fields["heldOut"] for s in ShapesDataset(1, 60, wordings="held-out"))
    assert not any(s.fields["heldOut"] for s in ShapesDataset(1, 60, wordings="seen"))


def test_kinds_and_shares_are_options() -> None:
    data = list(ShapesDataset(0, 80, kinds=("color", "left"), mix=Mix(exact=0, paraphrase=0), images=60))
    assert {s.fields["kind"] for s in data} == {"color", "left"}
    assert {s.fields["origin"] for s in data} <= {"new", "other-image", "near-duplicate"}


def test_the_stream_never_ends_if_asked_not_to() -> None:
    data = ShapesDataset(0, None)
    assert len(list(islice(data, 400))) == 400
    with pytest.raises(TypeError, match="no length"):
        len(data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples must be 1 or more"),
        ({"images": 0}, "images must be 1 or more"),
        ({"things": (2, 17)}, "too crowded to draw"),
        ({"things": (3, 2)}, "least"),
        ({"things": (0, 2)}, "least"),
        ({"wordings": "other"}, "'seen', 'held-out', 'all'"),
        ({"kinds": ("color", "weight")}, "weight"),
        ({"kinds": ()}, "kinds of questions"),
    ],
)
def test_wrong_options_say_what_is_right(options: dict, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        ShapesDataset(**options)


@pytest.mark.parametrize(
    ("shares", "message"),
    [({"exact": 1.2}, "from 0 to 1"), ({"exact": 0.6, "paraphrase": 0.6}, "more than 1"), ({"zipf": -1.0}, "zipf")],
)
def test_wrong_shares_say_what_is_right(shares: dict, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        Mix(**shares)


def test_running_out_of_new_questions_is_an_error_with_a_remedy() -> None:
    data = ShapesDataset(0, 500, images=1, things=(1, 1), kinds=("size",), mix=Mix(exact=0, paraphrase=0))
    with pytest.raises(DatasetError, match="give more images"):
        list(data)


def test_prompt_is_picture_question_sign() -> None:
    assert prompt("What color is the ball?") == "<image>What color is the ball?<|answer|>"
