"""What `generate` makes of padding, end tokens and precision: attached, on misses and on hits, it is what the model alone makes."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from tests.services import python
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import dejakv
from dejakv.records import Record

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of options that are drawn together

WORDS = 97
SMALL = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.4,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "padding": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, bos_token_id=None, eos_token_id=2, pad_token_id=1)),
    "padding of zero": lambda: hf.MistralForCausalLM(
        hf.MistralConfig(**SMALL, bos_token_id=None, eos_token_id=[2, 9], pad_token_id=0, sliding_window=12)
    ),
    "no end": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**SMALL, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    ),
    "padding without an end": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**SMALL, bos_token_id=None, eos_token_id=None, pad_token_id=1)
    ),
}


def made(kind: str) -> Any:
    """A random model with sharp logits: rounding does not change its answers."""
    torch.manual_seed(5)
    return MODELS[kind]().eval()


def words() -> Any:
    """A tokenizer of numbers, with an end token."""
    raw = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w3"))
    raw.pre_tokenizer = Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="w2", pad_token="w1", unk_token="w3")


def equal(model: Any, calls: Sequence[Mapping[str, Any]], *, hits: bool = True, attached: Any = None) -> list[Record]:
    """Asks each call of the model alone, attached, and attached again; what each must return is the same."""
    wants = [model.generate(**call) for call in calls]
    records: list[Record] = []
    attached = model if attached is None else attached
    with dejakv.attach(attached, words(), on_record=records.append) as cache:
        for call, want in zip(calls, wants, strict=True):
            for _ in range(2):
                got = attached.generate(**call)
                cache.flush()
                assert torch.equal(got, want)
                assert got.dtype == want.dtype
    assert not hits or any(record.provenance.startswith("hit") for record in records)
    return records


def prompts(*lengths: int, pad: int) -> torch.Tensor:
    """Random prompts of these lengths, padded on the left."""
    torch.manual_seed(sum(lengths))
    width = max(lengths)
    rows = [torch.randint(3, WORDS, (length,)) for length in lengths]
    return torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=pad) for row in rows])


def test_a_mask_is_inferred_from_padding_as_transformers_does() -> None:
    calls = [{"input_ids": prompts(*lengths, pad=1), "max_new_tokens": 6} for lengths in ((12, 20), (9, 14, 22))]
    records = equal(made("padding"), calls)
    assert {record.request_id == "untouched" for record in records} == {False}
    kinds = (torch.bool, torch.int32, torch.float32)
    equal(made("padding"), [{**calls[0], "attention_mask": (calls[0]["input_ids"] != 1).to(kind)} for kind in kinds])
    equal(made("padding"), [{"inputs": calls[0]["input_ids"].to(torch.int32), "max_new_tokens": 6}])
    # Padding that is an end token, too, is text, and so is padding that nobody named.
    equal(made("padding"), [{**calls[0], "eos_token_id": [1, 2]}])
    equal(made("no end"), calls)
    equal(made("padding without an end"), calls)


def test_a_hole_that_is_inferred_goes_to_the_model() -> None:
    ids = prompts(20, pad=1)
    ids[0, 7] = 1
    records = equal(made("padding"), [{"input_ids": ids, "max_new_tokens": 4}], hits=False)
    assert {record.request_id for record in records} == {"untouched"}


def test_rows_that_ended_are_filled_as_transformers_fills_them() -> None:
    model, ids = made("padding of zero"), prompts(12, 16, 20, pad=0)
    ends = [int(model.generate(ids[:1], max_new_tokens=3, do_sample=False)[0, -1])]
    equal(model, [{"input_ids": ids, "max_new_tokens": 9, "eos_token_id": ends}])
    for beams in ({"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}):
        calls = [{"input_ids": ids, "max_new_tokens": 9, "eos_token_id": end, **beams} for end in (5, 11)]
        assert all(((model.generate(**call)[:, 20:] == call["eos_token_id"]).sum(1) > 1).any() for call in calls)
        equal(model, calls)


def test_no_end_token_is_added_where_none_is_configured() -> None:
    model, words_ = made("no end"), words()
    call = {"input_ids": prompts(20, pad=1), "max_new_tokens": 9}
    words_.eos_token = f"w{int(model.generate(**call)[0, 21])}"
    want = model.generate(**call)
    with dejakv.attach(model, words_) as cache:
        for _ in range(2):
            assert torch.equal(model.generate(**call), want)
            cache.flush()


def test_a_compiled_model_is_served() -> None:
    model = made("padding")
    compiled: Any = torch.compile(model, backend="eager")
    records = equal(model, [{"input_ids": prompts(20, pad=1), "max_new_tokens": 5}], attached=compiled)
    assert "generate" not in vars(compiled)
    assert [record.method for record in records] == ["none", "exact"]


PRECISIONS = """
import torch
import dejakv
from tests.exactness.test_generate_options import made, prompts, words

model, call, records = made("padding"), {"input_ids": prompts(20, pad=1), "max_new_tokens": 3}, []

def ask_twice(cache):
    for _ in range(2):
        model.generate(**call)
        cache.flush()

with dejakv.attach(model, words(), on_record=records.append) as cache:
    ask_twice(cache)
    torch.set_float32_matmul_precision("medium")
    ask_twice(cache)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    ask_twice(cache)
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    ask_twice(cache)
    torch.backends.fp32_precision = "tf32"
    ask_twice(cache)
with dejakv.attach(model, words(), on_record=records.append) as cache:
    ask_twice(cache)
print(*(record.method for record in records))
"""


def test_every_way_to_set_the_precision_of_products_is_taken_and_counts() -> None:
    done = python("-c", PRECISIONS, environment={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["none", "exact"] * 6
