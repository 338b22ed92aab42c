"""Generated text is state: the next prompt of a chat computes its new message alone, and the answers stay the same."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import tiny_models as tiny
from tests.documents import DOCUMENT, EXACT, OTHER, request, uncached, wordings
from transformers import LogitsProcessorList, MinPLogitsWarper, TextIteratorStreamer

import dejakv
from dejakv.build import build_cache
from dejakv.engines.transformers import TransformersEngine
from dejakv.errors import ConfigError
from dejakv.pipeline import Pipeline
from dejakv.request import Request, Sampling
from dejakv.store.selection import Selection

FIRST = Request("r", DOCUMENT.text[:400], DOCUMENT.text[:400])
"""A text that breaks off: the model goes on for many tokens."""
NEW = " where else?"
KEEP = replace(EXACT, generated_text="keep")


def _next(asked: Request, answer: str) -> Request:
    return replace(asked, prompt=f"{asked.prompt} {answer}{NEW}", chunk=NEW)


def _new_tokens(pipeline: Pipeline, first: Any, following: Request) -> int:
    """Tokens of the second prompt behind the last token with state: the answer's last but one."""
    return len(pipeline.engine.prepare(following).token_ids) - first.record.prompt_tokens - len(first.token_ids) + 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=24),
        Sampling(max_new_tokens=24, temperature=0.8, seed=3),
        Sampling(max_new_tokens=24, stop=("in ",)),
    ],
    ids=["greedy", "sampled", "stopped"],
)
def test_next_prompt_computes_its_new_message(docs_engine: Any, served: Any, sampling: Sampling) -> None:
    keeping, without = served(KEEP), served(EXACT)
    first = replace(FIRST, sampling=sampling)
    for pipeline, saved in ((keeping, True), (without, False)):
        answered = pipeline.answer(first)
        assert len(answered.token_ids) > 4
        following = replace(_next(first, answered.text), sampling=Sampling(max_new_tokens=8))
        second = pipeline.answer(following)
        assert second.token_ids == uncached(docs_engine, following).token_ids
        assert second.record.method == "prefix"
        assert (second.record.computed_tokens <= _new_tokens(pipeline, answered, following)) is saved


def test_an_exact_hit_keeps_another_answer(served: Any) -> None:
    """Its prompt is stored already; its own words are not."""
    pipeline = served(KEEP)
    first = replace(FIRST, sampling=Sampling(max_new_tokens=24, temperature=1.5, seed=1))
    pipeline.answer(first)
    again = pipeline.answer(replace(first, sampling=replace(first.sampling, seed=2)))
    assert again.record.method == "exact"
    following = _next(first, again.text)
    assert pipeline.answer(following).record.computed_tokens <= _new_tokens(pipeline, again, following)


@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=24, num_beams=2), Sampling(max_new_tokens=1)])
def test_what_has_no_state_of_its_answer_is_not_stored(served: Any, sampling: Sampling) -> None:
    pipeline = served(KEEP)
    pipeline.answer(replace(request(wordings()[0]), sampling=sampling))
    assert len(list(pipeline.cache.store.metas())) == 1


def test_no_store_keeps_no_answer(served: Any) -> None:
    pipeline = served(KEEP)
    pipeline.answer(replace(request(wordings()[0]), no_store=True))
    assert not list(pipeline.cache.store.metas())


def test_a_purge_of_a_prompt_takes_its_answer(served: Any) -> None:
    pipeline = served(KEEP)
    answered = pipeline.answer(request(wordings()[0]))
    pipeline.cache.flush()
    assert len(list(pipeline.cache.store.metas())) == 2
    pipeline.cache.purge(Selection(donors=(answered.record.key,)))
    assert not list(pipeline.cache.store.metas())


def test_an_answer_is_nobodys_similar_question(served: Any) -> None:
    """Levels that compare texts see prompts alone."""
    pipeline = served(replace(KEEP, reuse="adopt", similarity_threshold=0.0, lexical_guard=False))
    answered = pipeline.answer(request(wordings()[0]))
    pipeline.cache.flush()
    adopted = pipeline.answer(request(wordings()[1]))
    assert adopted.record.donor == answered.record.key


def test_generated_text_takes_two_values() -> None:
    with pytest.raises(ConfigError, match="generated_text"):
        replace(EXACT, generated_text="some")


BLEND = replace(KEEP, reuse="blend", semantic_text=False)


def test_a_turn_behind_a_blend_computes_no_more_than_with_prefix_caching(docs_engine: Any, served: Any) -> None:
    """Idle time computes the blended prompt and the answer that was given to it, as one prompt."""
    chat, prefix_cache = served(BLEND), served(KEEP)
    chat.promotes = True
    first, edited = request(wordings()[0]), request(wordings()[0], f"{OTHER.text} {DOCUMENT.text}")
    following, methods = edited, []
    for turn in (first, edited, None, None):
        asked = turn or following
        answered = chat.answer(asked)
        assert answered.record.computed_tokens <= prefix_cache.answer(asked).record.computed_tokens
        methods.append(answered.record.method)
        following = _next(asked, answered.text)
        while chat.settle_one():
            pass
    assert methods[1] == "blend"

    exact = chat.answer(replace(following, reuse="exact"))
    assert exact.record.computed_tokens <= _new_tokens(chat, answered, following)
    assert exact.token_ids == uncached(docs_engine, following).token_ids


def test_a_blended_turn_without_idle_time_leaves_no_exact_state(docs_engine: Any, served: Any) -> None:
    chat = served(BLEND)
    chat.promotes = True
    chat.answer(request(wordings()[0]))
    edited = request(wordings()[0], f"{OTHER.text} {DOCUMENT.text}")
    answered = chat.answer(edited)
    following = replace(_next(edited, answered.text), reuse="exact")
    exact = chat.answer(following)
    assert exact.record.computed_tokens > 0.9 * exact.record.prompt_tokens
    assert exact.token_ids == uncached(docs_engine, following).token_ids


def test_low_precision_settles_answers_as_prompts() -> None:
    """Decoding rounds in another way than a prompt's units do: what it computed is not stored."""
    engine = TransformersEngine.from_pretrained("docs-lm", dtype="bf16")
    with closing(build_cache(KEEP, engine, background=False)) as cache:
        chat, unit = Pipeline(engine, cache, promotes=True), engine.prefill_unit
        prompt = f"{OTHER.text[-600:]} {FIRST.prompt}"
        crossing = Request("r", prompt, prompt, sampling=Sampling(24))
        answered = chat.answer(crossing)
        assert answered.record.prompt_tokens < unit < answered.record.prompt_tokens + len(answered.token_ids)
        assert len(list(cache.store.metas())) == 1

        assert chat.settle_one()
        assert not chat.settle_one()
        following = _next(crossing, answered.text)
        exact, tokens = chat.answer(following), len(engine.prepare(following).token_ids)
        assert (exact.record.method, exact.record.computed_tokens) == ("prefix", tokens - unit)
        assert (exact.record.bitwise, exact.token_ids) == (True, uncached(engine, following).token_ids)

        # The same prompt again has nothing to compute in idle time, and nothing failed.
        chat.answer(crossing)
        assert not chat.settle_one()
        assert cache.finder.counts.for_partition(None).unpromoted == 0

        # Without another whole unit there is nothing to gain.
        while chat.settle_one():
            pass
        chat.answer(request(wordings()[0]))
        assert not chat.settle_one()

        cache.purge(Selection(donors=(answered.record.key,)))
        assert not any(meta.prompt.startswith(prompt) for meta in cache.store.metas())


def test_an_answer_that_breaks_off_is_not_stored(served: Any) -> None:
    def leave(_token: int, _text: str) -> None:
        raise RuntimeError("gone")

    pipeline = served(KEEP)
    with pytest.raises(RuntimeError, match="gone"):
        pipeline.answer(FIRST, on_token=leave)
    assert not list(pipeline.cache.store.metas())


def test_a_model_that_changes_while_it_decodes_leaves_no_answer(docs_engine: Any, served: Any) -> None:
    """Also behind an exact hit, whose prompt needs no check."""
    pipeline, first = served(KEEP), replace(FIRST, sampling=Sampling(8, temperature=1.5, seed=1))
    pipeline.answer(first)
    stored = len(list(pipeline.cache.store.metas()))
    weight = docs_engine.model.get_input_embeddings().weight

    def write(_token: int, _text: str) -> None:
        with torch.no_grad():
            weight.mul_(1.0)

    again = pipeline.answer(replace(first, sampling=replace(first.sampling, seed=2)), on_token=write)
    assert again.record.method == "exact"
    assert len(list(pipeline.cache.store.metas())) == stored


@pytest.mark.parametrize(
    ("options", "entries"),
    [
        ({}, 2),
        ({"bad_words_ids": [[5], [6]]}, 2),
        ({"stop_strings": ["e"]}, 2),
        ({"streamer": TextIteratorStreamer}, 2),
        ({"do_sample": True, "num_return_sequences": 2}, 1),
        ({"logits_processor": LogitsProcessorList([MinPLogitsWarper(0.1)])}, 1),
    ],
    ids=["greedy", "grammar", "stop text", "streamed", "n", "processor"],
)
def test_attach_keeps_what_was_computed_or_nothing(options: dict[str, Any], entries: int) -> None:
    model, tokenizer = tiny.text_model("llama"), tiny.tokenizer()
    ids = tokenizer("three green balls, two red cones and one cube", return_tensors="pt")["input_ids"]
    options = {**options, "max_new_tokens": 12, "pad_token_id": 1, "tokenizer": tokenizer}
    if "streamer" in options:
        options["streamer"] = options["streamer"](tokenizer)
    with dejakv.attach(model, tokenizer, KEEP) as cache:
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        cache.flush()
        assert len(list(cache.store.metas())) == entries
        longer = torch.cat([out[:1], ids], dim=1)
        plain = {"attention_mask": torch.ones_like(longer), "max_new_tokens": 6, "pad_token_id": 1}
        cached = model.generate(input_ids=longer, **plain)
    assert torch.equal(cached, model.generate(input_ids=longer, **plain))
