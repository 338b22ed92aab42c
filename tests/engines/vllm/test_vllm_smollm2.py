"""smollm2-135m in a real vLLM: an exact hit answers as full prefill does, a blend runs, and bfloat16 starts."""

import inspect
import statistics
import textwrap
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm_harness import BLENDING, EXTENSION, running

PASSAGES = [
    inspect.getdoc(thing) or "" for thing in (textwrap.wrap, statistics.quantiles, statistics.NormalDist.samples)
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


def ids(tokenizer: Any, order: list[int]) -> list[int]:
    context = "\n\n".join(PASSAGES[number] for number in order)
    text = (
        f"<|im_start|>system\n{context}<|im_end|>\n<|im_start|>user\nWhich function breaks a long text into lines?"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    return tokenizer(text)["input_ids"]


@pytest.mark.shows("exact", "blend", model="SmolLM2-135M-Instruct")
def test_exact_hits_answer_alike_and_moved_passages_are_blended(smollm2: Path, tokenizer: Any) -> None:
    first, moved = ids(tokenizer, [0, 1, 2]), ids(tokenizer, [2, 0, 1])
    with running(smollm2, BLENDING, worker_extension_cls=EXTENSION) as engine:
        truth, full = engine.ask([first, moved], salt="truth", wish={"mode": "off", "no_store": True}, max_tokens=12)
        engine.ask([first])
        engine.settle()
        engine.reset_prefix_cache()
        (hit,) = engine.ask([first], max_tokens=12)
        assert hit.tokens == truth.tokens
        assert hit.cached >= len(first) - 32  # from the connector: vLLM's own prefix cache was emptied
        (blended,) = engine.ask([moved], wish={"mode": "blend"}, max_tokens=12)
        assert blended.told["method"] == "blend", blended.told["reason"]
        assert 0 < blended.told["tokens_recomputed"] < len(moved)
        assert blended.tokens[:1] == full.tokens[:1]


@pytest.mark.shows("exact", model="SmolLM2-135M-Instruct", dtype="bfloat16")
def test_bfloat16_serves_exact_hits(smollm2: Path, tokenizer: Any) -> None:
    prompt = ids(tokenizer, [0, 1])
    with running(smollm2, dtype="bfloat16") as engine:
        (truth,) = engine.ask([prompt], salt="truth", wish={"mode": "off", "no_store": True})
        engine.ask([prompt])
        engine.settle()
        engine.reset_prefix_cache()
        (hit,) = engine.ask([prompt])
        assert hit.cached > 0
        assert hit.tokens[:1] == truth.tokens[:1]
