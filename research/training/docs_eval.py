"""Measure docs-lm as a user would run it: `python -m research.training.docs_eval`.

With `--model FOLDER` it writes FOLDER/curve.json.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from dejakv.errors import DatasetError
from dejakv.models import load
from dejakv_models import docs
from dejakv_models.docs import RESERVED, Wordings, ask
from research.machine import measured

LENGTHS = (50, 100, 250, 500, 750, 1000, 1250, 1500, 1750, 2000)


def document_of_length(rng: random.Random, tokens: int, wordings: Wordings) -> docs.Document:
    """A document of within 20 tokens of `tokens`, with as many facts as that takes."""
    tokens = min(tokens, docs.CONTEXT - RESERVED)
    facts = max(1, int(tokens / 9))
    while True:
        try:
            doc = docs.make_document(rng, facts, wordings=wordings)
        except DatasetError:
            facts -= 1
            continue
        if abs(doc.tokens - tokens) <= 20:
            return doc
        facts = max(1, facts + round((tokens - doc.tokens) / 9) or 1)


def questions(
    length: int, count: int, wordings: Wordings, per_document: int = 4
) -> Iterator[tuple[str, docs.Fact]]:
    """`count` prompts of one question each, `per_document` on each document of about `length`
    tokens.
    """
    rng = random.Random(f"docs-eval/{length}/{wordings}")
    made = 0
    while made < count:
        doc = document_of_length(rng, length, wordings)
        for fact in rng.sample(doc.facts, min(per_document, len(doc.facts), count - made)):
            yield docs.prompt_of(doc.text, ask(fact, rng, wordings)), fact
            made += 1


class Reader:
    """A model folder, loaded by the ordinary code path; `answer` is greedy."""

    def __init__(self, folder: str, device: str = "cpu") -> None:
        model, self.tokenizer = load(folder, dtype=torch.float32)
        self.model = model.to(device)

    @torch.inference_mode()
    def answer(self, prompt: str) -> tuple[str, bool]:
        """The decoded answer, and whether the model ended it by itself."""
        ids = self.tokenizer(prompt, return_tensors="pt").to(self.model.device)
        out = self.model.generate(**ids, max_new_tokens=4, do_sample=False)[
            0, ids["input_ids"].shape[1] :
        ]
        ended = bool((out == self.tokenizer.eos_token_id).any())
        return self.tokenizer.decode(out, skip_special_tokens=True).strip(), ended


def measure(reader: Reader, length: int, count: int, wordings: Wordings) -> dict:
    """Accuracy at one length."""
    began = time.perf_counter()
    said = [
        (*reader.answer(prompt), fact.value) for prompt, fact in questions(length, count, wordings)
    ]
    return {
        "tokens": length,
        "wordings": wordings,
        "questions": count,
        "accuracy": round(sum(answer == value for answer, _, value in said) / count, 4),
        "ended": round(sum(ended for _, ended, _ in said) / count, 4),
        "seconds_per_question": round((time.perf_counter() - began) / count, 4),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m research.training.docs_eval", description=__doc__
    )
    parser.add_argument("--model", default="packages/dejakv-models/src/dejakv_models/docs-lm")
    parser.add_argument("--questions", type=int, default=200, help="questions at each length")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", default=None, help="default: curve.json in the model's folder")
    o = parser.parse_args(arguments)
    if o.threads:
        torch.set_num_threads(o.threads)
    reader = Reader(o.model, o.device)
    rows = []
    for wordings in ("train", "held_out"):
        for length in o.lengths:
            rows.append(measure(reader, length, o.questions, wordings))
            print(json.dumps(rows[-1]), flush=True)
    result = {
        **measured("research.training.docs_eval"),
        "threads": torch.get_num_threads(),
        "lengths": rows,
    }
    Path(o.out or Path(o.model) / "curve.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
