"""Time to the first token of an exact hit, lookup and load from disk included, beside computing the whole prompt.

    python -m research.exact_hit [--model docs-lm] [--tokens 1024] [--documents 8] [--repeats 5] [--output exact_hit.json]

Every document is asked once by an uncached pipeline and once through a cache on disk that holds nothing in memory and was
opened anew, in turns, so that a busy machine slows both. A time is from the request to its first token: tokenizing,
lookup, reading and verifying the state, one token through the model. The page cache is warm. Answers must be equal.
"""

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path

from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.engines.transformers import TransformersEngine
from dejakv.pipeline import Answer, Pipeline
from dejakv.request import Request, Sampling
from dejakv_models.docs import ask, make_document, prompt_of
from research.machine import measured


def requests(engine: TransformersEngine, tokens: int, documents: int) -> list[Request]:
    """Questions about documents of at least `tokens` tokens each."""
    rng = random.Random(7)
    made: list[Request] = []
    for index in range(documents):
        texts, size, document = [], 0, None
        while size < tokens:
            document = make_document(rng, facts=24)
            texts.append(document.text)
            size = len(engine.tokenizer("\n".join(texts))["input_ids"])
        assert document is not None
        question = ask(document.facts[0], rng)
        made.append(Request(str(index), prompt_of("\n".join(texts), question), question, sampling=Sampling(8)))
    return made


def spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=10)
    return {"p10": cuts[0], "p50": statistics.median(values), "p90": cuts[-1]}


def measure(engine: TransformersEngine, wanted: list[Request], repeats: int, folder: str) -> dict[str, object]:
    config = SemanticCacheConfig(semantic_text=False, cache_dir=folder, memory_bytes=0)
    filling = build_cache(config, engine, background=False)
    for request in wanted:
        Pipeline(engine, filling).answer(request)
    filling.close()
    cache = build_cache(config, engine)
    plain, cached = Pipeline(engine), Pipeline(engine, cache)
    none: list[Answer] = []
    hits: list[Answer] = []
    for turn in range(repeats + 1):
        for request in wanted:
            both = plain.answer(request), cached.answer(request)
            if turn:  # the first turn warms up
                none.append(both[0])
                hits.append(both[1])
    cache.close()
    assert all(hit.record.method == "exact" and hit.record.computed_tokens == 1 for hit in hits)
    return {
        "prompt_tokens": spread([float(answer.record.prompt_tokens) for answer in none]),
        "none_ttft_ms": spread([answer.record.ttft_ms for answer in none]),
        "hit_ttft_ms": spread([answer.record.ttft_ms for answer in hits]),
        "hit_lookup_ms": spread([answer.record.lookup_ms for answer in hits]),
        "bytes_loaded": spread([float(answer.record.bytes_loaded) for answer in hits]),
        "speedup": spread([a.record.ttft_ms / b.record.ttft_ms for a, b in zip(none, hits, strict=True)]),
        "answers_equal": sum(a.token_ids == b.token_ids for a, b in zip(none, hits, strict=True)) / len(hits),
        "pairs": len(hits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="docs-lm")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    engine = TransformersEngine.from_pretrained(options.model, dtype=options.dtype, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(engine, requests(engine, options.tokens, options.documents), options.repeats, folder)
    report = {
        "model": options.model,
        "dtype": options.dtype,
        **measured("research.exact_hit"),
        "goal": "speedup 5 or more",
        **found,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
