"""What storing the state of answers saves in chats, and whether the answers stay the same.

    OMP_NUM_THREADS=1 python -m research.generated_text [--model smollm2-135m] [--chats 10]
    [--turns 4] [--output FILE.json]

Each chat asks to explain a docstring of the standard library, then goes on. Every prompt is
answered in full, with the state of prompts (`generated_text="off"`) and with that of answers too
(`keep`), in turns; the chat goes on with the answer of full computation. The model runs in float32.
"""

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dejakv import Pipeline, Request, Sampling, SemanticCacheConfig, build_cache
from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.models import load
from dejakv.pipeline import Answer
from research.machine import measured, spread

MODULES = ("json", "inspect", "shutil", "statistics", "textwrap", "heapq", "difflib", "tempfile")
DOCSTRING_CHARACTERS = (400, 1600)
FOLLOW_UPS = (
    "Now give one example, and say when not to use it.",
    "What would a beginner get wrong here?",
    "Say the same in one sentence.",
)


def docstrings(count: int) -> list[str]:
    """Return docstrings of functions of the standard library, in the order of their modules."""
    texts: dict[str, None] = {}
    for module in map(importlib.import_module, MODULES):
        for _, function in inspect.getmembers(module, inspect.isfunction):
            text = inspect.getdoc(function) or ""
            if DOCSTRING_CHARACTERS[0] <= len(text) <= DOCSTRING_CHARACTERS[1]:
                texts[text] = None
    return list(texts)[:count]


def conversations(
    tokenizer: Any, texts: Sequence[str], turns: int, full: Pipeline
) -> Iterator[tuple[int, Request, Answer]]:
    """Yield each turn's request with full computation's answer to it."""
    for number, text in enumerate(texts):
        chat = [{"role": "user", "content": f"Explain in your own words:\n{text}"}]
        for turn in range(turns):
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            request = Request(f"{number}-{turn}", prompt, prompt, sampling=Sampling(64))
            answer = full.answer(request)
            yield turn, request, answer
            follow_up = FOLLOW_UPS[turn % len(FOLLOW_UPS)]
            chat += [
                {"role": "assistant", "content": answer.text},
                {"role": "user", "content": follow_up},
            ]


def measure(name: str, chats: int, turns: int) -> dict[str, Any]:
    """Return tokens, milliseconds to the first token and equal answers of all turns by arm."""
    model, tokenizer = load(name)
    engine = TransformersEngine(model.float(), tokenizer)
    arms = {
        mode: Pipeline(engine, build_cache(SemanticCacheConfig(generated_text=mode), engine))
        for mode in ("off", "keep")
    }
    computed = {arm: [0, 0] for arm in ("full", *arms)}
    milliseconds: dict[str, list[float]] = {arm: [] for arm in ("full", *arms)}
    equal = {arm: {"first_tokens": 0, "answers": 0} for arm in arms}

    turns_seen = 0
    texts = docstrings(chats)
    for turn, request, expected in conversations(tokenizer, texts, turns, Pipeline(engine)):
        turns_seen += 1
        answers = {"full": expected} | {
            arm: pipeline.answer(request) for arm, pipeline in arms.items()
        }
        for arm, answer in answers.items():
            # A chat's first turn has no answer before it.
            computed[arm][turn > 0] += answer.record.computed_tokens
            if turn > 0:
                milliseconds[arm].append(answer.record.ttft_ms)
        for arm, counts in equal.items():
            counts["first_tokens"] += answers[arm].token_ids[:1] == expected.token_ids[:1]
            counts["answers"] += answers[arm].token_ids == expected.token_ids
        for pipeline in arms.values():
            pipeline.cache.flush()

    full_milliseconds = milliseconds["full"]
    return {
        "model": name,
        "chats": len(texts),
        "turns": turns_seen,
        "computed_tokens_first_turns": {arm: first for arm, (first, _) in computed.items()},
        "computed_tokens_later_turns": {arm: later for arm, (_, later) in computed.items()},
        "ttft_ms_later_turns": {arm: spread(values) for arm, values in milliseconds.items()},
        "ttft_by_full": {
            arm: spread(
                [
                    mine / whole
                    for mine, whole in zip(milliseconds[arm], full_milliseconds, strict=True)
                ]
            )
            for arm in arms
        },
        "equal": equal,
        "stored_bytes": {arm: pipeline.cache.store.stats().bytes for arm, pipeline in arms.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--chats", type=int, default=10)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    result = measured("research.generated_text") | measure(
        options.model, options.chats, options.turns
    )
    text = json.dumps(result, indent=2)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
