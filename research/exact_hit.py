"""What an exact hit takes beside full computation and beside the model's own cache.

    OMP_NUM_THREADS=1 python -m research.exact_hit [--models docs-lm,smollm2-135m] [--prompts 12]
    [--tokens 800] [--times 5] [--dtype float32] [--json FILE]

Prompts are source text of installed packages. Of each the first token is computed in full, by
DejaKV's exact hit, and by transformers from a KV cache of the same prompt that never left memory,
in turns. The last is the least that any hit can take: the difference is what looking up, checking
the model and loading cost. All three first tokens are compared.
"""

import argparse
import copy
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import dejakv
from dejakv.config import SemanticCacheConfig
from dejakv.models import load
from dejakv.models.cache_name import CACHE_NAME
from research.machine import measured, spread

CHARACTERS_A_TOKEN = 7.5
"""More than any text has, so that a prompt is cut to its tokens."""


def source_texts(count: int, characters: int) -> Iterator[str]:
    """Yield the beginnings of modules of the standard library, each of so many characters."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in modules)
    long_texts = (text for text in texts if len(text) >= characters)
    for _ in range(count):
        yield next(long_texts)[:characters]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1000, result


def measure(name: str, prompts: int, tokens: int, times: int, dtype: str) -> dict[str, Any]:
    """Measure one model: milliseconds to the first token by each way, and to attach."""
    model, tokenizer = load(name, dtype=dtype)
    options = {"max_new_tokens": 1, "do_sample": False, "use_cache": True}
    rows: dict[str, list[float]] = {"full": [], "own_cache": [], "exact_hit": []}
    equal = dict.fromkeys(("own_cache", "exact_hit"), 0)
    # The class's method: an attached model has another one of its own.
    alone = partial(type(model).generate, model)

    attached = dejakv.attach(model, tokenizer, SemanticCacheConfig(reuse="exact"))
    attach_ms, cache = timed(attached.__enter__)
    try:
        for text in source_texts(prompts, int(tokens * CHARACTERS_A_TOKEN)):
            inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=tokens)
            with torch.no_grad():
                past = model(inputs["input_ids"][:, :-1], use_cache=True)[CACHE_NAME]
            model.generate(**inputs, **options)
            cache.store.flush()

            answers: dict[str, Any] = {}
            for _ in range(times):
                appended = copy.deepcopy(past)  # a run appends to it
                for way, generate in (
                    ("full", alone),
                    ("own_cache", partial(alone, **{CACHE_NAME: appended})),
                    ("exact_hit", model.generate),
                ):
                    milliseconds, answers[way] = timed(partial(generate, **inputs, **options))
                    rows[way].append(milliseconds)
            for way in equal:
                equal[way] += int(torch.equal(answers["full"], answers[way]))
    finally:
        attached.__exit__(None, None, None)
    return {
        "prompt_tokens": tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attach_ms": round(attach_ms, 1),
        **{f"{way}_ms": spread(values) for way, values in rows.items()},
        "first_tokens_equal": {**equal, "of": prompts},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default="docs-lm,smollm2-135m")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument(
        "--dtype", default="auto", help="of the weights; auto: the checkpoint's own"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    sizes = options.prompts, options.tokens, options.times, options.dtype
    result = measured("research.exact_hit") | {
        "models": {name: measure(name, *sizes) for name in options.models.split(",")}
    }
    text = json.dumps(result, indent=2)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
