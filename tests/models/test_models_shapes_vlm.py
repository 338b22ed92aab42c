"""shapes-vlm as it ships: its processor, its answers, and its card."""

import io
import json
import string
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dejakv.datasets.base import Sample
from dejakv.models import load, path
from dejakv_models.shapes import Mix, ShapesDataset, prompt
from dejakv_models.shapes_language import HELD_OUT, SEEN, noun_phrase, templates, wording


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load("shapes-vlm")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path("shapes-vlm"))


def _picture(sample: Sample) -> Image.Image:
    return Image.open(io.BytesIO(sample.media[0].data))


def _ask(loaded: tuple[Any, Any], samples: list[Sample]) -> tuple[list[str], torch.Tensor]:
    model, processor = loaded
    inputs = processor(
        images=[_picture(s) for s in samples],
        text=[prompt(s.question) for s in samples],
        padding=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=6)[:, inputs["input_ids"].shape[1] :]
    return processor.batch_decode(out, skip_special_tokens=True), out


@pytest.mark.parametrize("split", ["seen", "held-out"])
def test_it_answers_well_and_with_one_word(loaded: tuple[Any, Any], split: Any) -> None:
    mix = Mix(exact=0, paraphrase=0, recurring=0)
    samples = list(ShapesDataset(77, 150, images=150, wordings=split, mix=mix))
    answers, tokens = _ask(loaded, samples)
    right = sum(a == s.answer for a, s in zip(answers, samples, strict=True))
    assert right / len(samples) >= 0.9
    eos = loaded[0].config.text_config.eos_token_id
    assert (tokens[:, 1] == eos).float().mean() > 0.99


def test_case_spacing_and_compression_do_not_change_its_input(loaded: tuple[Any, Any]) -> None:
    sample = next(iter(ShapesDataset(1, 1)))
    processor = loaded[1]
    plain = processor(images=_picture(sample), text=prompt(sample.question), return_tensors="pt")
    loud = processor(images=_picture(sample), text=prompt(f"  {sample.question.upper()} "), return_tensors="pt")
    assert torch.equal(plain["input_ids"], loud["input_ids"])


def test_a_picture_is_64_tokens(loaded: tuple[Any, Any]) -> None:
    model, processor = loaded
    sample = next(iter(ShapesDataset(1, 1)))
    for size in ((64, 64), (200, 120)):
        inputs = processor(images=_picture(sample).resize(size), text=prompt("How many things are there?"))
        assert inputs["input_ids"][0].count(model.config.image_token_id) == 64
        assert inputs["input_ids"][0][:64] == [model.config.image_token_id] * 64


def test_the_chat_template_makes_the_prompt(loaded: tuple[Any, Any]) -> None:
    question = "Is there a red ball?"
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
    template = loaded[1].apply_chat_template
    assert template([user], add_generation_prompt=True) == prompt(question)
    assert template([user]) == prompt(question).removesuffix("<|answer|>")
    system = {"role": "system", "content": "Be brief."}
    assert template([system, user], add_generation_prompt=True).startswith("<image>Be brief.")
    turns = [user, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "Is it large?"}]
    assert template(turns, add_generation_prompt=True) == f"{prompt(question)}yes</s>Is it large?<|answer|>"


@given(text=st.text(st.sampled_from(string.printable), max_size=120).filter(lambda text: "<unk>" not in text))
def test_ascii_text_is_always_spelled(tokenizer: Any, text: str) -> None:
    assert tokenizer.unk_token_id not in tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("text", ["x" * 5000, "a_b" * 300, "9" * 1000, "".join(map(chr, range(32, 127)))])
def test_very_long_words_are_spelled(tokenizer: Any, text: str) -> None:
    assert tokenizer.unk_token_id not in tokenizer(text, add_special_tokens=False)["input_ids"]


def test_every_word_of_the_data_set_is_one_token(tokenizer: Any) -> None:
    from dejakv_models.shapes_language import Reference
    from dejakv_models.shapes_scene import COLORS, SHAPES, SIZES

    things = [Reference(s, c, z) for s in SHAPES for c in COLORS for z in SIZES]
    for reference in things:
        for synonym in (0, 1):
            phrase = noun_phrase(reference, synonym)
            assert len(tokenizer.tokenize(phrase)) == len(phrase.split())
    for kind in SEEN:
        for template in templates(kind, "all"):
            text = wording(kind, tuple(things[:2] if "{b}" in template else things[:1]), template)
            assert not [t for t in tokenizer.tokenize(text) if t.startswith("##")]
    assert len(HELD_OUT) == len(SEEN)


def test_greedy_answers_are_the_default(loaded: tuple[Any, Any]) -> None:
    config = loaded[0].generation_config
    assert config.do_sample is False
    assert config.eos_token_id == loaded[1].tokenizer.eos_token_id


def test_card_and_curve_come_along() -> None:
    folder = path("shapes-vlm")
    card = (folder / "MODEL_CARD.md").read_text()
    assert "make train-shapes" in card
    assert "held-out" in card
    curve = json.loads((folder / "curve.json").read_text())
    assert len(curve) > 3
    assert all({"step", "minutes", "accuracy"} <= set(point) for point in curve)
