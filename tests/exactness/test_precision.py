"""In low precision a hit computes what a miss computes: answers and scores are equal bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dejakv
from dejakv import SemanticCacheConfig
from dejakv.build import build_cache
from dejakv.engines.transformers import TransformersEngine
from dejakv.engines.transformers.kv import PREFILL_UNIT
from dejakv.pipeline import Pipeline
from dejakv.records import Record
from dejakv.request import Request, Sampling

LENGTHS = (
    40,
    PREFILL_UNIT - 1,
    PREFILL_UNIT,
    PREFILL_UNIT + 1,
    PREFILL_UNIT + 90,
    2 * PREFILL_UNIT,
    2 * PREFILL_UNIT + 1,
    2 * PREFILL_UNIT + 188,
)
WORDS = "The river rises in the hills behind the town, and the ferry crosses it at noon and at six. ".split()


def tiny(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 311, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).to(dtype).eval()


@pytest.fixture(scope="module")
def docs() -> TransformersEngine:
    return TransformersEngine.from_pretrained("docs-lm", dtype="bf16", device="cpu", check=False)


def ids_of(length: int, vocabulary: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, vocabulary, (1, length), generator=torch.Generator().manual_seed(seed + length))


def generated(model: Any, ids: torch.Tensor, **more: Any) -> Any:
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 1, "pad_token_id": 1, **more}
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True, **options
    )


def same(one: Any, other: Any) -> bool:
    """Tokens and the scores of every step, bit for bit."""
    return torch.equal(one.sequences, other.sequences) and all(map(torch.equal, one.scores, other.scores))


def repeated(model: Any, tokenizer: Any, ids: torch.Tensor, further: torch.Tensor, **more: Any) -> list[Record]:
    """Asks a prompt twice and one that goes on from it, each in an empty cache and behind the other; all must be alike."""
    records: list[Record] = []
    with dejakv.attach(model, tokenizer):
        alone = generated(model, further, **more)
    with dejakv.attach(model, tokenizer, on_record=records.append) as cache:
        miss = generated(model, ids, **more)
        cache.flush()
        assert same(generated(model, ids, **more), miss)
        cache.flush()
        assert same(generated(model, further, **more), alone)
    return records


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_hits_are_misses_bit_for_bit(docs: TransformersEngine, dtype: torch.dtype, length: int) -> None:
    model = tiny(dtype)
    ids = ids_of(length, 311)
    further = torch.cat([ids, ids_of(60, 311)], 1)
    miss, hit, longer = repeated(model, docs.tokenizer, ids, further)
    assert miss.bitwise
    assert hit.bitwise
    assert {miss.arithmetic, hit.arithmetic} == {"bf16" if dtype == torch.bfloat16 else "fp16"}
    assert hit.computed_tokens == length - (length - 1) // PREFILL_UNIT * PREFILL_UNIT
    assert longer.computed_tokens == length + 60 - length // PREFILL_UNIT * PREFILL_UNIT
    assert (hit.method == "exact") == (length > PREFILL_UNIT)
    assert (longer.method == "prefix") == (length >= PREFILL_UNIT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_each_miss_says_why(docs: TransformersEngine, dtype: torch.dtype) -> None:
    """Nothing is stored; a stored prompt is too short; a stored prefix is."""
    model = tiny(dtype)
    ids = ids_of(PREFILL_UNIT - 30, 311)
    miss, again, longer = repeated(model, docs.tokenizer, ids, torch.cat([ids, ids_of(60, 311)], 1))
    assert {record.method for record in (miss, again, longer)} == {"none"}
    assert miss.reason == "no stored prompt begins like this one"
    assert again.reason.startswith(f"the prompt is shorter than a prefill unit of {PREFILL_UNIT} tokens")
    assert longer.reason.startswith(f"the stored prefix is shorter than a prefill unit of {PREFILL_UNIT} tokens")
    assert [bool(record.refused) for record in (miss, again, longer)] == [False, True, True]


@pytest.mark.parametrize("length", LENGTHS[::2])
def test_an_answer_is_that_of_chunked_prefill(docs: TransformersEngine, length: int) -> None:
    model = tiny()
    ids = ids_of(length, 311)
    plain = generated(model, ids, prefill_chunk_size=PREFILL_UNIT)
    with dejakv.attach(model, docs.tokenizer) as cache:
        assert same(generated(model, ids), plain)
        cache.flush()
        assert same(generated(model, ids), plain)


@pytest.mark.parametrize("more", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_beams(docs: TransformersEngine, more: dict[str, int]) -> None:
    """State that beams left behind serves others too."""
    model = tiny()
    for length in (PREFILL_UNIT, PREFILL_UNIT + 1, 2 * PREFILL_UNIT, 2 * PREFILL_UNIT + 90):
        ids = ids_of(length, 311)
        further = torch.cat([ids, ids_of(60, 311)], 1)
        repeated(model, docs.tokenizer, ids, further, **more)
        with dejakv.attach(model, docs.tokenizer):
            alone = generated(model, further)
        with dejakv.attach(model, docs.tokenizer) as cache:
            generated(model, ids, **more)
            cache.flush()
            assert same(generated(model, further), alone)


def test_a_sliding_window(docs: TransformersEngine) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = tiny().config.to_dict() | {"sliding_window": 100, "model_type": "mistral"}
    model = MistralForCausalLM(MistralConfig(**config)).to(torch.bfloat16).eval()
    ids = ids_of(2 * PREFILL_UNIT + 30, 311)
    repeated(model, docs.tokenizer, ids, torch.cat([ids, ids_of(60, 311)], 1))


def test_fp32_prompts_are_not_divided(docs: TransformersEngine) -> None:
    ids = ids_of(PREFILL_UNIT + 90, 311)
    _, hit, longer = repeated_in_fp32(docs, ids)
    assert (hit.computed_tokens, hit.arithmetic, hit.bitwise) == (1, "fp32", False)
    assert longer.computed_tokens == 60


def repeated_in_fp32(docs: TransformersEngine, ids: torch.Tensor) -> list[Record]:
    model, records = tiny(torch.float32), list[Record]()
    with dejakv.attach(model, docs.tokenizer, on_record=records.append) as cache:
        miss = generated(model, ids)
        cache.flush()
        assert torch.equal(generated(model, ids).sequences, miss.sequences)
        cache.flush()
        generated(model, torch.cat([ids, ids_of(60, 311)], 1))
    return records


@pytest.mark.parametrize(
    "length",
    [PREFILL_UNIT + 30, *(pytest.param(n, marks=pytest.mark.soak) for n in (PREFILL_UNIT, 2 * PREFILL_UNIT + 70))],
)
def test_smollm2(smollm2: Path, length: int) -> None:
    engine = TransformersEngine.from_pretrained(str(smollm2), dtype="bf16", device="cpu", check=False)
    ids = engine.tokenizer(" ".join(WORDS * 40), return_tensors="pt")["input_ids"][:, :length]
    further = torch.cat([ids, engine.tokenizer(" When does it cross?", return_tensors="pt")["input_ids"]], 1)
    repeated(engine.model, engine.tokenizer, ids, further, max_new_tokens=4)


def test_the_pipeline_says_how_exact_it_is(docs: TransformersEngine, tmp_path: Path) -> None:
    """Through the disk and after a restart; a short prompt says why nothing of it was reused."""
    config = SemanticCacheConfig(semantic_text=False, cache_dir=str(tmp_path), memory_bytes=0)
    text = " ".join(WORDS * 60)
    prompt = docs.tokenizer.decode(docs.tokenizer(text)["input_ids"][: 2 * PREFILL_UNIT], skip_special_tokens=True)
    request = Request("r", prompt, prompt, sampling=Sampling(8))
    answers: list[Any] = []
    for _ in range(2):
        cache = build_cache(config, docs, background=False)
        answers.append(Pipeline(docs, cache).answer(request))
        cache.close()
    miss, hit = answers
    assert hit.record.method == "exact"
    assert hit.record.reused_tokens >= PREFILL_UNIT
    assert hit.record.reused_tokens % PREFILL_UNIT == 0
    assert hit.token_ids == miss.token_ids
    assert (hit.record.arithmetic, hit.record.bitwise) == ("bf16", True)
    cache = build_cache(SemanticCacheConfig(semantic_text=False), docs, background=False)
    short = Request("s", "the ferry", "the ferry", sampling=Sampling(4))
    pipeline = Pipeline(docs, cache)
    first, again = pipeline.answer(short), pipeline.answer(short)
    assert first.token_ids == again.token_ids
    assert (again.record.method, again.record.reused_tokens) == ("none", 0)
    assert "shorter than a prefill unit" in again.record.reason
