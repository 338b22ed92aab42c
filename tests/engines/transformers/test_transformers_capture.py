"""State that the caller holds and state that is stored never share memory, whatever the caller does with its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_models import image_model, text_model, tokenizer
from transformers import LogitsProcessor, LogitsProcessorList

import dejakv
from dejakv.build import build_cache
from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.engines.transformers.generate_call import GenerateArguments
from dejakv.models.cache_name import CACHE_NAME
from dejakv.records import Record
from dejakv.store.base import StoredState
from dejakv.store.store import Store

PROMPT = "three green balls, two red cones and one cube: what colour is the cube beside the red cone"
OTHER = "is it yes or no, and how many are there left of it? one two three"
EXACT = SemanticCacheConfig(semantic_text=False)
RETURNED = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}


class Held(Store):
    """A store whose writer is busy until `free` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def put(self, stored_state: StoredState) -> bool:
        assert self.free.wait()
        return super().put(stored_state)


@contextmanager
def busy_cache() -> Iterator[tuple[Held, HierarchicalCache]]:
    store = Held()
    cache = build_cache(EXACT, store=store)
    try:
        yield store, cache
    finally:
        store.free.set()
        cache.close()


def inputs(prompt: str = PROMPT) -> dict[str, torch.Tensor]:
    ids = tokenizer()(prompt, return_tensors="pt")["input_ids"]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def alone(model: Any, **options: Any) -> Any:
    return type(model).generate(model, **inputs(), **{**RETURNED, **options})


def cropped_and_continued(model: Any, state: Any) -> None:
    state.crop(5 - state.get_seq_length())
    ids = inputs(OTHER)["input_ids"].expand(state.layers[0].keys.shape[0], -1)
    with torch.no_grad():
        model(input_ids=ids, **{CACHE_NAME: state}, use_cache=True)


def written_to(model: Any, state: Any) -> None:
    for layer in state.layers:
        layer.keys.mul_(-3)
        layer.values.zero_()


def written_to_through_numpy(model: Any, state: Any) -> None:
    for layer in state.layers:
        layer.keys.numpy()[...] = 7
        layer.values.data.fill_(7)


def reordered(model: Any, state: Any) -> None:
    state.batch_repeat_interleave(2)
    written_to(model, state)
    state.reorder_cache(torch.tensor([1, 0]))
    state.batch_select_indices(torch.tensor([1]))


def put_back(model: Any, state: Any) -> None:
    state.reset()
    with torch.no_grad():
        model(input_ids=inputs(OTHER)["input_ids"], **{CACHE_NAME: state}, use_cache=True)


WAYS: list[Callable[[Any, Any], None]] = [
    cropped_and_continued, written_to, written_to_through_numpy, reordered, put_back,
]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_the_caller_does_to_its_cache_does_not_reach_what_is_stored(way: Any, options: dict[str, Any]) -> None:
    model = text_model("llama")
    records: list[Record] = []
    with busy_cache() as (store, cache), dejakv.attach(model, tokenizer(), cache=cache, on_record=records.append):
        model.generate(**inputs(OTHER), **RETURNED)  # keeps the writer busy
        given = model.generate(**inputs(), **{**RETURNED, **options})
        way(model, given[CACHE_NAME])
        store.free.set()
        cache.flush()
        again = model.generate(**inputs(), **RETURNED)
    assert records[-1].method == "exact"
    assert torch.equal(again.sequences, alone(model).sequences)


@pytest.mark.parametrize(
    ("way", "more", "tier"),
    [
        *((way, {}, tier) for way in WAYS for tier in ("memory", "disk")),
        (written_to, {"num_beams": 2}, "disk"),
        (written_to, {"max_time": 0.0}, "disk"),
        (written_to, {"max_new_tokens": 1, "min_new_tokens": 1}, "disk"),
    ],
)
def test_a_hit_does_not_hand_out_the_stores_memory(way: Any, more: dict[str, Any], tier: str, tmp_path: Path) -> None:
    model = text_model("llama")
    config = SemanticCacheConfig(
        semantic_text=False, **({"cache_dir": str(tmp_path / "cache"), "memory_bytes": 0} if tier == "disk" else {})
    )
    records: list[Record] = []
    cache = build_cache(config)
    with dejakv.attach(model, tokenizer(), cache=cache, on_record=records.append):
        model.generate(**inputs(), **RETURNED)
        cache.flush()
        (meta,) = cache.store.metas()
        stored_state = cache.store.get(meta.id)
        assert stored_state is not None
        before = np.array(stored_state.tensor.data)
        given = model.generate(**inputs(), **{**RETURNED, **more})
        assert records[-1].method == "exact"
        way(model, given[CACHE_NAME])
        np.testing.assert_array_equal(np.asarray(stored_state.tensor.data), before)
        again = model.generate(**inputs(), **RETURNED)
        assert records[-1].method == "exact"
        assert torch.equal(again.sequences, alone(model).sequences)
    cache.close()


def test_without_the_cache_in_the_output_state_is_copied_behind_the_answer() -> None:
    model = text_model("llama")
    options = {**RETURNED, "return_dict_in_generate": False}
    with busy_cache() as (store, cache), dejakv.attach(model, tokenizer(), cache=cache):
        model.generate(**inputs(OTHER), **options)
        first = model.generate(**inputs(), **options)
        assert cache.store.stats().entries == 0, "the answer was there before the store took anything"
        store.free.set()
        cache.flush()
        assert torch.equal(model.generate(**inputs(), **options), first)


class Broken(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mine")


def test_a_call_that_fails_stores_nothing() -> None:
    model = text_model("llama")
    with busy_cache() as (store, cache), dejakv.attach(model, tokenizer(), cache=cache):
        store.free.set()
        with pytest.raises(RuntimeError, match="mine"):
            model.generate(**inputs(), **RETURNED, logits_processor=LogitsProcessorList([Broken()]))
        cache.flush()
        assert cache.store.stats().entries == 0
        assert torch.equal(model.generate(**inputs(), **RETURNED).sequences, alone(model).sequences)


def test_pixels_that_the_caller_overwrites_later_are_not_those_that_were_kept() -> None:
    model, processor = image_model("llava")
    image = model.config.image_token_id
    ids = torch.cat([inputs()["input_ids"], torch.full((1, 16), image)], dim=1)
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    engine = TransformersEngine(model, processor.tokenizer, processor)
    (request,) = engine.requests_of(GenerateArguments(given, model), "default", count())
    pixels.zero_()
    engine.prepare(request)
    assert engine.vision is not None
    kept = engine.vision.book_of("default").cached_pixels(request.media[0].digest)
    assert kept is not None
    assert kept["pixel_values"].abs().sum() > 0
