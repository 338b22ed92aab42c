"""Pictures through a real engine: never another picture's answer, and the tower runs once a picture."""

import io

import pytest
from PIL import Image
from vllm_harness import SHAPES, running

from dejakv_models.shapes import ShapesDataset, prompt

QUESTION = prompt("What color is the large object?")


def _encoder():
    from vllm.distributed.ec_transfer import get_ec_transfer

    return get_ec_transfer()


def _pictures(count):
    seen, pictures = set(), []
    for sample in ShapesDataset():
        (medium,) = sample.media
        picture = Image.open(io.BytesIO(medium.data)).convert("RGB")
        if picture.tobytes() not in seen:  # some files differ only in their encoding
            seen.add(picture.tobytes())
            pictures.append(picture)
        if len(pictures) == count:
            break
    return pictures


PICTURES = _pictures(6)


def _one(picture, **more):
    return {"prompt": f"<image>{QUESTION}", "multi_modal_data": {"image": picture}, **more}


def _two(first, second):
    return {"prompt": f"<image><image>{QUESTION}", "multi_modal_data": {"image": [first, second]}}


def _reset(engine):
    """Nothing of vLLM's own caches is left: what is reused from here on comes from us. In the last step the worker says that
    its weights are those of the start."""
    engine.reset_prefix_cache()
    engine.llm.llm_engine.reset_mm_cache()
    engine.core.scheduler.reset_encoder_cache()
    engine.core.model_executor.collective_rpc("reset_encoder_cache")
    engine.ask([[9, 9, 9, 9]], max_tokens=2, wish={"mode": "off", "no_store": True})


CASES = [
    *map(_one, PICTURES),
    _two(PICTURES[0], PICTURES[2]),
    _two(PICTURES[2], PICTURES[0]),
    _two(PICTURES[0], PICTURES[0]),
]
OPTIONS = {"limit_mm_per_prompt": {"image": 2}, "max_model_len": 512, "model": SHAPES}


@pytest.fixture(scope="module")
def truth():
    with running(connector=False, **OPTIONS) as engine:
        answers = []
        for case in CASES:  # one by one, nothing shared
            answers.extend(engine.ask([case]))
            _reset(engine)
        return answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def engine(truth, folder):
    stores = {"extra": {"store_dir": str(folder / "kv")}, "encoder": {"store_dir": str(folder / "encoder")}}
    with running(**OPTIONS, **stores) as running_engine:
        yield running_engine


@pytest.mark.shows("exact", "pictures", "encoder", model="shapes-vlm")
def test_images_never_swap(engine, truth):
    """Same text with another picture, swapped order, a repeated picture: each its own answer, on the first pass, from the
    stores, and in one batch. The tower runs once a distinct picture."""
    assert len({answer.tokens for answer in truth[:6]}) > 1, "the pictures must have different answers"
    for expected, case in zip(truth, CASES, strict=True):
        (answer,) = engine.ask([case])
        assert answer.tokens == expected.tokens
        assert answer.told["reason"] != "the media's data does not reach the scheduler in this configuration"
    engine.settle()
    _encoder().flush()
    assert _encoder().encoded == len(PICTURES)

    _reset(engine)
    for expected, case in zip(truth, CASES, strict=True):
        (answer,) = engine.ask([case])
        assert answer.tokens == expected.tokens
        assert answer.told["method"] == "exact"
        assert answer.told["level"] == "exact_text"
    assert _encoder().encoded == len(PICTURES)

    _reset(engine)
    for expected, answer in zip(truth, engine.ask(CASES), strict=True):
        assert answer.tokens == expected.tokens
    assert _encoder().encoded == len(PICTURES)


def test_encoder_output_under_a_new_question(engine, truth):
    """Another question on the same pictures: a miss for KV behind the picture, no tower run, the picture's own answer."""
    _reset(engine)
    question = prompt("How many objects are there?")
    asked = [{"prompt": f"<image>{question}", "multi_modal_data": {"image": picture}} for picture in PICTURES]
    fresh = engine.ask(asked, wish={"mode": "off", "no_store": True})
    assert _encoder().encoded == len(PICTURES)
    _reset(engine)
    assert [answer.tokens for answer in engine.ask(asked)] == [answer.tokens for answer in fresh]


def test_uuid_is_not_identity(engine, truth):
    """A client that names two pictures alike does not get one's state from the stores for the other."""
    _reset(engine)
    (first,) = engine.ask([_one(PICTURES[0], multi_modal_uuids={"image": ["same"]})], salt="u1")
    engine.settle()
    _encoder().flush()
    _reset(engine)
    (second,) = engine.ask([_one(PICTURES[1], multi_modal_uuids={"image": ["same"]})], salt="u1")
    assert first.tokens == truth[0].tokens
    assert second.tokens == truth[1].tokens
    assert second.told["level"] != "exact_text"


@pytest.mark.parametrize("wish", [{"no_store": True}, {"no_store": "yes"}])
def test_a_picture_of_which_nothing_is_to_be_kept_is_not_filed(engine, wish):
    picture = PICTURES[0].rotate(90)
    before = _encoder().encoded
    for asked in range(2):
        _reset(engine)
        engine.ask([_one(picture)], wish=wish)
        _encoder().flush()
        assert _encoder().encoded == before + asked + 1


def test_pictures_after_restart(engine, truth, folder):
    """A new process finds the tower's outputs and the KV."""
    engine.close()
    stores = {"extra": {"store_dir": str(folder / "kv")}, "encoder": {"store_dir": str(folder / "encoder")}}
    with running(**OPTIONS, **stores) as again:
        for expected, case in zip(truth, CASES, strict=True):
            (answer,) = again.ask([case])
            assert answer.tokens == expected.tokens
            assert answer.told["level"] == "exact_text"
        assert _encoder().encoded == 0
