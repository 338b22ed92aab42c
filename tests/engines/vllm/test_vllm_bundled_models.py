"""The bundled models answer in vLLM what they answer in transformers.

`DEJAKV_PARITY_QUESTIONS` sets how many questions a model is asked (300 for the figure in the docs, fewer in CI).
"""

import io
import os
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from vllm_harness import THREADS, running, set_threads

from dejakv.models import load, path
from dejakv_models.docs import DocsDataset
from dejakv_models.docs import prompt as docs_prompt
from dejakv_models.shapes import ShapesDataset, prompt

QUESTIONS = int(os.environ.get("DEJAKV_PARITY_QUESTIONS", "60"))
WORDS = 6  # tokens an answer may have


def compare(name: str, context: int, asked: list[dict[str, Any]], inputs: list[Any], end: int) -> None:
    model, _ = load(name)
    answers: list[Sequence[int]] = []
    for given in inputs:
        with torch.no_grad():
            out = model.generate(**given, max_new_tokens=WORDS, do_sample=False)
        answers.append(out[0, given["input_ids"].shape[1] :].tolist())
    with running(path(name), connector=False, max_model_len=context, max_num_seqs=16) as engine:
        theirs = [output.tokens for output in engine.ask(asked, max_tokens=WORDS)]

    def upto_end(tokens: Sequence[int]) -> list[int]:
        return list(tokens[: tokens.index(end)] if end in tokens else tokens)

    same = sum(upto_end(a) == upto_end(b) for a, b in zip(answers, theirs, strict=True)) / QUESTIONS
    print(f"{name}: {same:.4f} of {QUESTIONS} answers are the same in vLLM and transformers")
    assert same >= 0.99


def test_shapes_vlm_answers_alike() -> None:
    samples = list(ShapesDataset(21, QUESTIONS))
    pictures = [Image.open(io.BytesIO(sample.media[0].data)).convert("RGB") for sample in samples]
    processor = load("shapes-vlm")[1]
    prompts = [prompt(sample.question) for sample in samples]
    pairs = list(zip(prompts, pictures, strict=True))
    inputs = [processor(images=picture, text=text, return_tensors="pt") for text, picture in pairs]
    asked = [{"prompt": text, "multi_modal_data": {"image": picture}} for text, picture in pairs]
    compare("shapes-vlm", 256, asked, inputs, processor.tokenizer.eos_token_id)


def test_docs_lm_answers_alike() -> None:
    tokenizer = load("docs-lm")[1]
    ids = [tokenizer(docs_prompt(sample))["input_ids"] for sample in DocsDataset(seed=21, samples=QUESTIONS)]
    asked = [{"prompt_token_ids": tokens} for tokens in ids]
    compare("docs-lm", 2048, asked, [{"input_ids": torch.tensor([tokens])} for tokens in ids], tokenizer.eos_token_id)


def test_an_engine_answers_alike_whatever_threads_an_earlier_one_left() -> None:
    """Speculative decoding by n-grams leaves the process with another number of threads."""
    picture = Image.open(io.BytesIO(next(iter(ShapesDataset())).media[0].data)).convert("RGB")
    asked = [{"prompt": f"<image>{prompt('What color is the large object?')}", "multi_modal_data": {"image": picture}}]
    answers = []
    for threads in (THREADS, THREADS + 1):
        set_threads(threads)
        with running(path("shapes-vlm"), connector=False, max_model_len=256) as engine:
            answers.append(engine.ask(asked)[0].tokens)
    assert answers[0] == answers[1]
