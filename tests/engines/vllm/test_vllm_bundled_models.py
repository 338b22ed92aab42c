"""The bundled models answer in vLLM what they answer in transformers.

`DEJAKV_PARITY_QUESTIONS` sets how many questions a model is asked (300 for the figure in the docs, fewer in CI).
"""

import gc
import io
import os
from typing import Any

import pytest
import torch
from PIL import Image

from dejakv.models import available, load, path
from dejakv_models.shapes import ShapesDataset, prompt

QUESTIONS = int(os.environ.get("DEJAKV_PARITY_QUESTIONS", "60"))
WORDS = 6  # tokens an answer may have


def _vllm_answers(name: str, prompts: list[Any], context: int) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(path(name)),
        dtype="float32",
        enforce_eager=True,
        max_model_len=context,
        block_size=32,
        max_num_seqs=16,
    )
    sampling = SamplingParams(temperature=0, max_tokens=WORDS)
    answers = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)]
    del llm
    gc.collect()
    return answers


def _upto_end(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens


def _same(ours: list[list[int]], theirs: list[list[int]], end: int) -> float:
    pairs = zip(ours, theirs, strict=True)
    return sum(_upto_end(a, end) == _upto_end(b, end) for a, b in pairs) / len(ours)


def test_shapes_vlm_answers_alike() -> None:
    samples = list(ShapesDataset(21, QUESTIONS))
    pictures = [Image.open(io.BytesIO(s.media[0].data)).convert("RGB") for s in samples]
    model, processor = load("shapes-vlm")
    answers: list[list[int]] = []
    for sample, picture in zip(samples, pictures, strict=True):
        inputs = processor(images=picture, text=prompt(sample.question), return_tensors="pt")
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=WORDS)
        answers.append(out[0, inputs["input_ids"].shape[1] :].tolist())
    asked = [
        {"prompt": prompt(s.question), "multi_modal_data": {"image": p}} for s, p in zip(samples, pictures, strict=True)
    ]
    same = _same(answers, _vllm_answers("shapes-vlm", asked, 256), processor.tokenizer.eos_token_id)
    print(f"shapes-vlm: {same:.4f} of {QUESTIONS} answers are the same in vLLM and transformers")
    assert same >= 0.99


def test_docs_lm_answers_alike() -> None:
    if "docs-lm" not in {m.name for m in available()}:
        pytest.fail("docs-lm does not ship: train it (research/training/README.md)")
    from dejakv_models.docs import DocsDataset
    from dejakv_models.docs import prompt as docs_prompt

    model, tokenizer = load("docs-lm")
    prompts = [docs_prompt(s) for s in DocsDataset(seed=21, samples=QUESTIONS)]
    asked = [tokenizer(p)["input_ids"] for p in prompts]
    answers: list[list[int]] = []
    for tokens in asked:
        with torch.no_grad():
            out = model.generate(torch.tensor([tokens]), max_new_tokens=WORDS, do_sample=False)
        answers.append(out[0, len(tokens) :].tolist())
    theirs = _vllm_answers("docs-lm", [{"prompt_token_ids": t} for t in asked], 2048)
    same = _same(answers, theirs, tokenizer.eos_token_id)
    print(f"docs-lm: {same:.4f} of {QUESTIONS} answers are the same in vLLM and transformers")
    assert same >= 0.99
