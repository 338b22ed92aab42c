"""Every argument of `generate`: attached, on a hit too, a call returns what the model alone returns."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.tiny_models import text_model, tokenizer
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextIteratorStreamer,
    WatermarkingConfig,
)
from transformers.generation.stopping_criteria import StoppingCriteria

import dejakv
from dejakv.config import SemanticCacheConfig
from dejakv.models.cache_name import CACHE_NAME
from dejakv.records import Record

PROMPT = "three green balls, two red cones and one cube: what colour is the cube beside the red cone"
SHORT = "how many are left of it, yes or no"
BASE = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
WHOLE = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}


class Seen(LogitsProcessor):
    """Forbids the tokens of the prompt, and so depends on all that it is shown."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, :-1], -1e4)


class AtLength(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] % 3 == 0)


def inputs(*prompts: str) -> dict[str, torch.Tensor]:
    words = tokenizer()
    words.padding_side = "left"
    given = words(list(prompts), return_tensors="pt", padding=True)
    return {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"]}


def second_prompt() -> dict[str, torch.Tensor]:
    return {"negative_prompt_ids": inputs(SHORT)["input_ids"], "guidance_scale": 1.5}


Options = Callable[[], Mapping[str, Any]]
SERVED: dict[str, Options] = {
    "scores": lambda: WHOLE,
    "beams": lambda: {**WHOLE, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True},
    "samples": lambda: {**WHOLE, "do_sample": True, "num_return_sequences": 2, "temperature": 0.7, "top_k": 9, "top_p": 0.9},
    "more samplers": lambda: {
        "do_sample": True, "typical_p": 0.9, "min_p": 0.01, "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4,
    },
    "repetition": lambda: {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "prompt penalties": lambda: {"encoder_repetition_penalty": 1.4, "encoder_no_repeat_ngram_size": 2},
    "words": lambda: {"bad_words_ids": [[5], [7, 8]], "suppress_tokens": [9], "begin_suppress_tokens": [11]},
    "bias": lambda: {"sequence_bias": [[[12], 4.0]], "renormalize_logits": True, "remove_invalid_values": True},
    "forced end": lambda: {"forced_eos_token_id": 3, "exponential_decay_length_penalty": (2, 1.2)},
    "lengths": lambda: {"max_new_tokens": None, "min_new_tokens": None, "max_length": 60, "min_length": 50},
    "stop string": lambda: {"stop_strings": ["e"], "tokenizer": tokenizer()},
    "no time": lambda: {"max_time": 0.0, "min_new_tokens": None},
    "time enough": lambda: {"max_time": 600.0},
    "watermark": lambda: {"watermarking_config": WatermarkingConfig(bias=9.0)},
    "processor": lambda: {"logits_processor": LogitsProcessorList([Seen()]), **WHOLE},
    "criteria": lambda: {"stopping_criteria": StoppingCriteriaList([AtLength()]), "min_new_tokens": None},
    "prefix function": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: [int(ids[0]) % 7 + 20, int(ids[5]) % 9 + 30]},
    "configuration": lambda: {"generation_config": GenerationConfig(**BASE, num_beams=2, repetition_penalty=1.3)},
    "hidden states refused": lambda: {"output_hidden_states": False, "use_cache": True, **WHOLE},
    "guidance of one": lambda: {"guidance_scale": 1.0},
}  # fmt: skip
UNTOUCHED: dict[str, Options] = {
    "output_hidden_states": lambda: {**WHOLE, "output_hidden_states": True},
    "output_attentions": lambda: {**WHOLE, "output_attentions": True},
    "output_hidden_states is configured": lambda: {
        **WHOLE, "generation_config": GenerationConfig(**BASE, output_hidden_states=True),
    },
    "use_cache": lambda: {"use_cache": False},
    CACHE_NAME: lambda: {CACHE_NAME: DynamicCache()},
    "position_ids": lambda: {"position_ids": torch.arange(inputs(PROMPT)["input_ids"].shape[1])[None]},
    "cache_implementation": lambda: {"cache_implementation": "dynamic"},
    "prefill_chunk_size": lambda: {"prefill_chunk_size": 8},
    "prompt_lookup_num_tokens": lambda: {"prompt_lookup_num_tokens": 3},
    "assistant_model": lambda: {"assistant_model": text_model("llama")},
    "negative_prompt_ids": second_prompt,
    "guidance_scale": lambda: {"guidance_scale": 1.5},
    "custom_generate": lambda: {"custom_generate": shortest},
    "logits_to_keep": lambda: {"logits_to_keep": 1},
}  # fmt: skip


def shortest(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.cat([input_ids, input_ids[:, :1]], dim=1)


def same(got: Any, expected: Any) -> None:
    """Equal in every field, whatever `generate` returned."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected)
        return
    assert set(got) == set(expected)
    assert torch.equal(got.sequences, expected.sequences)
    for name in set(expected) - {"sequences", CACHE_NAME}:
        flat = [_flat(given[name]) for given in (got, expected)]
        assert [part.shape for part in flat[0]] == [part.shape for part in flat[1]], name
        for one, other in zip(*flat, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    if CACHE_NAME in expected:
        for one, other in zip(got[CACHE_NAME].layers, expected[CACHE_NAME].layers, strict=True):
            torch.testing.assert_close(one.keys, other.keys, atol=1e-4, rtol=1e-4)


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value or () for tensor in _flat(part)]


def compare(options: Options, given: Mapping[str, torch.Tensor], attn: str = "sdpa") -> list[Record]:
    model = text_model("llama", attn=attn)
    torch.manual_seed(4)
    expected = model.generate(**given, **{**BASE, **options()})
    records: list[Record] = []
    config = SemanticCacheConfig(semantic_text=False)
    with dejakv.attach(model, tokenizer(), config, on_record=records.append) as cache:
        for _ in range(2):
            torch.manual_seed(4)
            same(model.generate(**given, **{**BASE, **options()}), expected)
            cache.flush()
    return records


@pytest.mark.parametrize("name", SERVED)
def test_a_hit_returns_what_the_model_alone_returns(name: str) -> None:
    assert [record.method for record in compare(SERVED[name], inputs(PROMPT))] == ["none", "exact"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_a_hit_would_answer_otherwise_goes_to_the_model(name: str) -> None:
    records = compare(UNTOUCHED[name], inputs(PROMPT), attn="eager")
    assert [record.request_id for record in records] == ["untouched"] * 2
    assert name.split()[0] in records[0].reason


@pytest.mark.parametrize(
    ("options", "served"),
    [
        (dict, True),
        (lambda: {"num_beams": 2, "num_return_sequences": 2}, True),
        (lambda: {"repetition_penalty": 1.9}, False),
        (lambda: {"generation_config": GenerationConfig(**BASE, no_repeat_ngram_size=2)}, False),
        (lambda: {"max_new_tokens": None, "min_new_tokens": None, "max_length": 80}, False),
        (lambda: {"logits_processor": LogitsProcessorList([Seen()])}, False),
        (lambda: {"prefix_allowed_tokens_fn": lambda row, ids: [20 + row, 30 + row]}, False),
        (lambda: WHOLE, False),
        (lambda: {"bad_words_ids": [[5], [7, 8]]}, False),
        (lambda: {"sequence_bias": [[[12, 13], 4.0]]}, False),
        (lambda: {"encoder_repetition_penalty": 1.4}, False),
        (lambda: {"encoder_no_repeat_ngram_size": 2}, False),
        (lambda: {"forced_bos_token_id": 9}, False),
        (lambda: {"watermarking_config": WatermarkingConfig(bias=9.0)}, False),
        (lambda: {"stop_strings": ["e"], "tokenizer": tokenizer()}, False),
        (lambda: {"suppress_tokens": [9], "temperature": 0.5}, True),
    ],
    ids=lambda value: next(iter(value()), "plain") if callable(value) else "",
)
@pytest.mark.parametrize("prompts", [(PROMPT, SHORT), (SHORT,)], ids=["batch", "one"])
def test_padding_comes_back_and_what_sees_it_goes_to_the_model(
    prompts: tuple[str, ...], options: Options, served: bool
) -> None:
    given = inputs(*prompts)
    if len(prompts) == 1:
        given = {
            name: torch.nn.functional.pad(value, (5, 0), value=int(name == "input_ids"))
            for name, value in given.items()
        }
    records = compare(options, given)
    assert (records[-1].method == "exact") == served
    assert served or records[-1].reason.endswith(("padding", "a batch"))


def test_a_batch_of_equal_lengths_is_served_but_for_what_sees_all_rows() -> None:
    given = {name: value.repeat(2, 1) for name, value in inputs(PROMPT).items()}
    assert compare(lambda: {"repetition_penalty": 1.9}, given)[-1].method == "exact"
    stop = compare(lambda: {"stopping_criteria": StoppingCriteriaList([AtLength()]), "min_new_tokens": None}, given)
    assert stop[-1].reason == "stopping_criteria with a batch"


@pytest.mark.parametrize("reuse", ["exact", "adopt"])
def test_a_streamer_sees_the_callers_own_prompt_first(reuse: Any) -> None:
    model, words = text_model("llama"), tokenizer()
    config = SemanticCacheConfig(
        reuse=reuse, index_encoder="model", similarity_threshold=0.5, lexical_guard=False, min_gain=1
    )
    records: list[Record] = []
    with dejakv.attach(model, words, config, on_record=records.append) as cache:
        model.generate(**inputs(PROMPT), **BASE)
        cache.flush()
        asked = inputs(("is it " if reuse == "adopt" else "") + PROMPT)
        streamer = TextIteratorStreamer(words)
        out = model.generate(**asked, **BASE, streamer=streamer)
        assert records[-1].method == reuse
        assert "".join(streamer) == words.decode(out[0])


def test_a_name_that_nobody_knows_is_the_models_to_refuse() -> None:
    model = text_model("llama")
    with dejakv.attach(model, tokenizer()), pytest.raises(ValueError, match="max_new_toking"):
        model.generate(**inputs(PROMPT), **BASE, max_new_toking=3)


def test_every_field_of_the_configuration_is_decided() -> None:
    """A setting of a later transformers must be looked at before it is served."""
    from dejakv.engines.transformers import generate_call

    beside = {
        "assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind", "continuous_batching_config",
        "decoder_start_token_id", "diversity_penalty", "max_matching_ngram_size", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "num_beam_groups", "speculation_type", "target_lookbehind", "transformers_version",
    }  # only together with others that are decided, or for other kinds of models  # fmt: skip
    fields = {name for name in vars(copy.copy(GenerationConfig())) if not name.startswith("_")}
    assert fields <= generate_call.SERVED | set(generate_call._CONFIGURED) | beside
