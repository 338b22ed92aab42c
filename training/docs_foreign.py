"""How docs-lm stands words that it does not know: `python -m training.docs_foreign` writes FOLDER/foreign.json.

The same questions as ever, with foreign text in one place of the prompt each time.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from dejakv.datasets import docs
from training.docs_eval import Reader

PLACES: dict[str, Callable[[str, str], str]] = {
    "nowhere": lambda document, question: docs.prompt_of(document, question),
    "before the document": lambda document, question: docs.prompt_of(
        f"You are a helpful assistant; read this carefully: {document}", question
    ),
    "in the middle of the document": lambda document, question: docs.prompt_of(_in_the_middle(document), question),
    "before the question": lambda document, question: docs.prompt_of(document, f"Quickly now, my friend: {question}"),
    "after the question": lambda document, question: docs.prompt_of(
        document, f"{question} Please answer with a single word only."
    ),
}


def _in_the_middle(document: str) -> str:
    sentences = document.split(". ")
    half = len(sentences) // 2
    return ". ".join([*sentences[:half], "Zorblatt @ 99,999 xyz!", *sentences[half:]])


def measure(reader: Reader, count: int, facts: int = 30) -> dict[str, list[int]]:
    """For each place: right answers and questions."""
    samples = list(docs.DocsDataset(seed=5, samples=count, facts=facts))
    return {
        place: [sum(reader.answer(put(s.context, s.question))[0] == s.answer for s in samples), count]
        for place, put in PLACES.items()
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.docs_foreign", description=__doc__)
    parser.add_argument("--model", default="src/dejakv/models/docs-lm")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--threads", type=int, default=None)
    o = parser.parse_args(arguments)
    if o.threads:
        torch.set_num_threads(o.threads)
    found = {
        "command": f"python -m training.docs_foreign --questions {o.questions}",
        "right_of": measure(Reader(o.model), o.questions),
    }
    print(json.dumps(found, indent=1))
    (Path(o.model) / "foreign.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
