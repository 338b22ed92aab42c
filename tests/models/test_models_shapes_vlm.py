"""shapes-vlm as it ships: its processor, its answers, and its card."""

import io
from typing import Any

import pytest
import torch
from PIL import Image

from dejakv.datasets.base import Sample
from dejakv.models import load
from dejakv_models.shapes import Mix, ShapesDataset, prompt


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load("shapes-vlm")


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
