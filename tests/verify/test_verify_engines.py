"""`dejakv verify` on our own engines with planted faults (`planted.py`), and on right ones."""

from functools import cache
from typing import Any

import pytest
import transformers as hf
from tests.tiny_models import tiny_llama
from tests.verify.planted import IN_SERVE, run, serve
from tokenizers import Tokenizer, models, pre_tokenizers

from dejakv.engines.transformers import TransformersEngine

QUICK = ("tail", "half_written", "layers")
"""Of a key, a write and a read."""


@cache
def tokenizer() -> Any:
    """A token for each word of the probes."""
    from dejakv.verify.probes import _WORDS

    words = ["<unk>", "</s>", "A", "One", "two", "three", "four", "user", "system", "assistant", *_WORDS]
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(dict.fromkeys(words))}, "<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = hf.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>", pad_token="</s>")
    named.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
    return named


def engine() -> TransformersEngine:
    model = tiny_llama(vocab_size=len(tokenizer()), max_position_embeddings=1024)
    return TransformersEngine(model, tokenizer())


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in IN_SERVE]
)
def test_a_fault_that_is_planted_in_serve_is_found(fault: str) -> None:
    with serve("docs-lm", fault, engine) as url:
        result = run(url, 8, workers=1 if fault == "stale" else 4, rounds=2)
    print(
        fault,
        result.seconds,
        result.client.events["requests"],
        [(e.kind, e.distance) for e in result.wrong],
        result.notes,
        result.noise,
    )
    assert result.wrong


def test_serve_without_a_fault_has_no_wrong_answer() -> None:
    with serve("docs-lm", make_engine=engine) as url:
        result = run(url, 8, rounds=1)
    assert not result.wrong
    assert any(cached for cached, _ in result.cached)
