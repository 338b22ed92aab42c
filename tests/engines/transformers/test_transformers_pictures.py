"""Pictures: the tower runs once for each, and answers equal those of transformers with its own processor."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.tiny_models import (
    IMAGES,
    PLACEHOLDER,
    WAYS,
    asking,
    begun,
    image_engine,
    image_model,
    picture,
    request,
    state_of,
    text_engine,
)

import dejakv
from dejakv.encoder_cache import VisualKVCache
from dejakv.engines.base import Prepared
from dejakv.engines.transformers import TransformersEngine
from dejakv.errors import InputError
from dejakv.request import Media, Sampling

ONE, TWO = picture(1), picture(2, 40, 24)


def prompt_for(name: str, words: str = "what colour is the cube", pictures: int = 1) -> str:
    return "how " + " and ".join([PLACEHOLDER[name]] * pictures) + f" {words}"


def own_inputs(engine: TransformersEngine, prepared: Prepared) -> dict[str, Any]:
    """The processor's whole output, as anybody would use it without DejaKV."""
    images = [Image.open(io.BytesIO(item.data)).convert("RGB") for item in prepared.request.media]
    given = engine.processor(text=[prepared.request.prompt], images=images, return_tensors="pt")
    return {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}


def stock(engine: TransformersEngine, prepared: Prepared, sampling: Sampling, **more: Any) -> Any:
    options: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "num_beams": sampling.num_beams}
    if not sampling.greedy:
        options |= {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
        torch.manual_seed(sampling.seed or 0)
    return engine.model.generate(**own_inputs(engine, prepared), pad_token_id=1, **options, **more)


@contextmanager
def counted(function: Any, owner: Any = None) -> Iterator[list[int]]:
    """Calls of a Python function in this thread, of one object alone if it is named.

    Seen by the interpreter's profile hook: a function that a test replaces is another model's code.
    """
    calls: list[int] = []

    def seen(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is function.__code__ and owner in (None, frame.f_locals.get("self")):
            calls.append(1)

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def counted_towers(engine: TransformersEngine) -> Any:
    """How often the vision tower's first layer ran, and for how many pictures' worth is checked by the caller."""
    base = engine.model.base_model
    tower = getattr(base, "visual", None) or base.vision_tower
    kinds = (torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.Linear)
    first = next(module for module in tower.modules() if isinstance(module, kinds))
    return counted(type(first).forward, first)


@pytest.mark.parametrize("sampling", WAYS, ids=lambda way: f"beams{way.num_beams}-temperature{way.temperature}")
@pytest.mark.parametrize("name", IMAGES)
def test_answers_equal_those_of_transformers(name: str, sampling: Sampling) -> None:
    engine = image_engine(name, VisualKVCache())
    prepared = engine.prepare(replace(request(prompt_for(name, pictures=2), (ONE, TWO)), sampling=sampling))
    n = len(prepared.token_ids)
    expected = stock(engine, prepared, sampling)[0, n:].tolist()
    whole = engine.run(prepared)
    assert list(whole.token_ids) == expected
    stored_state = state_of(engine, prepared, whole)
    for tokens in (prepared.spans[0].start + 2, n - 1):
        assert list(begun(engine, prepared, stored_state, tokens).token_ids) == expected


@pytest.mark.shows("exact")
@pytest.mark.parametrize("name", IMAGES)
def test_every_split_gives_the_logits_of_transformers(name: str) -> None:
    engine = image_engine(name, VisualKVCache())
    prepared = engine.prepare(request(prompt_for(name, pictures=2), (ONE, TWO)))
    options = {"max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 1}
    expected = torch.cat(
        stock(engine, prepared, Sampling(max_new_tokens=3), output_logits=True, return_dict_in_generate=True).logits
    )
    stored_state = state_of(engine, prepared, engine.run(prepared))
    for tokens in range(len(prepared.token_ids)):
        got = torch.cat(engine.compute(asking(prepared, **options), [stored_state], tokens).details["output"].logits)
        assert (got - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max())), tokens


@pytest.mark.shows("encoder")
@pytest.mark.parametrize("name", IMAGES)
def test_a_known_picture_never_runs_the_tower_again(name: str) -> None:
    engine = image_engine(name, VisualKVCache())
    engine.run(
        engine.prepare(request(prompt_for(name), (picture(9),)))
    )  # the layout of its features is known from now on
    with counted_towers(engine) as calls:
        first = engine.prepare(request(prompt_for(name), (ONE,)))
        whole = engine.run(first)
        assert (len(calls), whole.encoder_runs) == (1, 1)
        again = engine.run(engine.prepare(request(prompt_for(name, "how many balls"), (ONE,))))
        assert (len(calls), again.encoder_runs) == (1, 0)
        both = engine.run(engine.prepare(request(prompt_for(name, pictures=2), (ONE, TWO))))
        assert (len(calls), both.encoder_runs) == (2, 1)
        last = len(first.token_ids) - 1
        hit = begun(engine, first, state_of(engine, first, whole), last)
        assert (len(calls), hit.encoder_runs, hit.computed_tokens) == (2, 0, 1)


def test_without_a_registry_the_tower_runs_every_time_and_not_for_reused_pictures() -> None:
    engine = image_engine("qwen3_vl")
    prepared = engine.prepare(request(prompt_for("qwen3_vl"), (ONE,)))
    with counted_towers(engine) as calls:
        whole = engine.run(prepared)
        engine.run(prepared)
        assert len(calls) == 2
        begun(engine, prepared, state_of(engine, prepared, whole), len(prepared.token_ids) - 2)
        assert len(calls) == 2


def test_pixels_are_processed_only_when_the_tower_must_run() -> None:
    engine = image_engine("qwen2_5_vl", VisualKVCache())
    with counted(Image.Image.resize) as processed:
        for index in range(8):
            engine.run(engine.prepare(request(prompt_for("qwen2_5_vl"), (picture(index + 50),))))
        assert len(processed) == 8
        for index in range(8):
            prepared = engine.prepare(request(prompt_for("qwen2_5_vl", "how many"), (picture(index + 50),)))
            assert engine.run(prepared).encoder_runs == 0
        assert len(processed) == 8


def test_a_donors_prompt_runs_in_place_of_this_one() -> None:
    """`adopt`: token ids and spans of the donor, everything else of the request."""
    engine = image_engine("qwen2_5_vl", VisualKVCache())
    donor = engine.prepare(request(prompt_for("qwen2_5_vl"), (TWO,)))
    whole = engine.run(donor)
    stored_state = state_of(engine, donor, whole)
    mine = engine.prepare(request(prompt_for("qwen2_5_vl", "which colour has the cube"), (TWO,)))
    adopted = replace(mine, token_ids=donor.token_ids, spans=donor.spans, inputs=None)
    assert begun(engine, adopted, stored_state, len(donor.token_ids) - 1).token_ids == whole.token_ids


def test_the_picture_decides_the_answer_and_the_epoch_the_registry() -> None:
    model, processor = image_model("internvl")
    registry = VisualKVCache()
    engine = TransformersEngine(model, processor.tokenizer, processor, encoder_cache=registry)
    prepared = engine.prepare(request(prompt_for("internvl"), (ONE,)))
    engine.run(prepared)
    before, epoch = engine.vision.epoch if engine.vision else "", engine.epoch
    with torch.no_grad():
        next(model.base_model.vision_tower.parameters()).add_(0.5)
    assert engine.weights_changed() != epoch
    assert engine.vision is not None
    assert engine.vision.epoch != before
    assert engine.run(prepared).encoder_runs == 1


def test_embedding_of_a_picture_counts_its_run_once_with_the_next_request() -> None:
    engine = image_engine("qwen3_vl", VisualKVCache())
    vector = engine.embed_image(ONE)
    assert vector.shape == (32,)
    assert vector.dtype == np.float32
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
    assert vector @ engine.embed_image(TWO) < 0.9999
    run = engine.run(engine.prepare(request(prompt_for("qwen3_vl"), (ONE,))))
    assert run.encoder_runs == 2
    assert engine.run(engine.prepare(request(prompt_for("qwen3_vl"), (TWO,)))).encoder_runs == 0


def test_pictures_that_cannot_be_used_say_how_to_help() -> None:
    engine = image_engine("llava")
    words = prompt_for("llava")
    for data in (b"", b"no picture", ONE.data[: len(ONE.data) // 2]):
        with pytest.raises(InputError, match=r"broken\.png is not a readable image"):
            engine.prepare(request(words, (Media(data, name="broken.png"),)))
    with pytest.raises(InputError, match=r"1 placeholders .* for 2 pictures"):
        engine.prepare(request(words, (ONE, TWO)))
    with pytest.raises(InputError, match=r"1 placeholders .* for 0 pictures"):
        engine.prepare(request(words))
    with pytest.raises(InputError, match="audio is not supported"):
        engine.prepare(request(words, (Media(ONE.data, modality="audio"),)))
    with pytest.raises(InputError, match="takes no pictures"):
        text_engine("llama").prepare(request("what", (ONE,)))
    with pytest.raises(InputError, match="takes no pictures"):
        text_engine("llama").embed_image(ONE)
    lost = engine.prepare(request(words, (picture(77),)))
    for seed in range(80, 86):
        engine.prepare(request(words, (picture(seed),)))
    with pytest.raises(InputError, match="not among the request's media"):
        engine.run(replace(lost, request=replace(lost.request, media=())))


def test_a_model_whose_pictures_fail_the_self_check_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import dejakv.engines.transformers.capabilities as checks

    monkeypatch.setattr(checks, "_model_logits", lambda *_: torch.zeros(320))
    engine = image_engine("llava")
    assert not engine.capabilities.images
    assert "self-check" in engine.capabilities.reasons["images"]
    with pytest.raises(InputError, match="self-check"):
        engine.prepare(request(prompt_for("llava"), (ONE,)))
    assert engine.run(engine.prepare(request("what colour"))).token_ids


def test_more_pictures_than_are_kept_for_later_are_served_in_one_call() -> None:
    model, processor = image_model("llava")
    images = [Image.open(io.BytesIO(picture(seed).data)) for seed in range(6)]
    given = processor(text=[prompt_for("llava", pictures=6)], images=images, return_tensors="pt")
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 1}
    wanted = model.generate(**given, **options)
    with dejakv.attach(model, processor) as cache:
        for _ in range(2):
            assert torch.equal(model.generate(**given, **options), wanted)
            cache.flush()
