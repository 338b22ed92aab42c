"""`attach`: a model's own `generate`, with and without the cache, gives the same."""

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests import tiny_models as tiny
from tests.documents import COSTS, DOCUMENT
from tests.services import wait_until

import dejakv
from dejakv import SemanticCacheConfig
from dejakv.build import build_cache
from dejakv.errors import ConfigError
from dejakv.models.cache_name import CACHE_NAME
from dejakv.records import Record

LONG = "three green balls, two red cones and one cube: what colour is the cube beside the red cone and how many are left of it"
OTHER = LONG[:90] + " yes or no"
START = "three green balls, two red cones and one cube: how many are"


def text(name: str = "llama") -> tuple[Any, Any]:
    return tiny.text_model(name), tiny.tokenizer()


def ask(tokenizer: Any, *prompts: str) -> dict[str, torch.Tensor]:
    tokenizer.padding_side = "left"
    given = tokenizer(list(prompts), return_tensors="pt", padding=True)
    return {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"]}


def picture_inputs(processor: Any, prompts: list[str], pictures: list[list[Any]]) -> dict[str, torch.Tensor]:
    images = [[Image.open(io.BytesIO(item.data)).convert("RGB") for item in group] for group in pictures]
    processor.tokenizer.padding_side = "left"
    given = processor(text=prompts, images=images, return_tensors="pt", padding=True)
    return {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", ["llama", "mistral_window", "opt", "gemma2"])
def test_equal_and_longer_prompts_start_from_stored_state_and_answer_the_same(name: str) -> None:
    model, tokenizer = text(name)
    records: list[Record] = []
    one, two = ask(tokenizer, LONG), ask(tokenizer, OTHER)
    options = {"max_new_tokens": 7, "pad_token_id": 1}
    expected = [model.generate(**inputs, **options) for inputs in (one, one, two)]
    with dejakv.attach(model, tokenizer, on_record=records.append) as cache:
        got = []
        for inputs in (one, one, two):
            got.append(model.generate(**inputs, **options))
            cache.flush()
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert [record.method for record in records] == ["none", "exact", "prefix"]
    assert records[1].computed_tokens == 1
    assert 1 < records[2].computed_tokens < records[2].prompt_tokens
    assert "generate" not in vars(model)
    assert torch.equal(model.generate(**one, **options), expected[0])


@pytest.mark.parametrize("name", tiny.IMAGES)
def test_calls_of_the_model_itself_between_pictures_lose_no_state(name: str) -> None:
    model, processor = tiny.image_model(name)
    prompt = f"{START} {tiny.PLACEHOLDER[name]} what colour is the cube"
    inputs = picture_inputs(processor, [prompt], [[tiny.picture(1, 24, 16)]])
    words = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    options = {"max_new_tokens": 5, "pad_token_id": 1}
    expected, records = model.generate(**inputs, **options), list[Record]()
    with dejakv.attach(model, processor, on_record=records.append) as cache:
        for call in (
            {},
            {**words},
            {**inputs, "do_sample": True},
            {**inputs, "num_return_sequences": 2, "do_sample": True},
        ):
            if call:
                type(model).generate(model, **call, **options)
            assert torch.equal(model.generate(**inputs, **options), expected)
            cache.flush()
    assert [record.method for record in records] == ["none", "exact", "exact", "exact"]
    assert sum(record.encoder_runs for record in records) == 1


@pytest.mark.parametrize("name", tiny.IMAGES)
def test_pictures_are_part_of_the_identity(name: str) -> None:
    model, processor = tiny.image_model(name)
    mark = tiny.PLACEHOLDER[name]
    one, two = tiny.picture(1, 24, 16), tiny.picture(2, 24, 16)
    asked = [
        picture_inputs(processor, [f"{START} {mark} what colour is the cube"], [[one]]),
        picture_inputs(processor, [f"{START} {mark} what colour is the cube"], [[two]]),
        picture_inputs(processor, [f"{START} {mark} how many balls"], [[one]]),
        picture_inputs(processor, [f"{START} {mark} what colour is the cube"], [[one]]),
        picture_inputs(
            processor, [f"{START} {mark} and {mark} how many", f"{START} {mark} left of it"], [[two, one], [one]]
        ),
    ]
    options = {"max_new_tokens": 5, "pad_token_id": 1}
    expected = [model.generate(**inputs, **options) for inputs in asked]
    records: list[Record] = []
    with dejakv.attach(model, processor, on_record=records.append) as cache:
        for inputs, want in zip(asked, expected, strict=True):
            assert torch.equal(model.generate(**inputs, **options), want)
            cache.flush()
    assert [record.method for record in records[:4]] == ["none", "prefix", "prefix", "exact"]
    before = int((asked[0]["input_ids"][0] == model.config.image_token_id).nonzero()[0])
    assert records[1].reused_tokens == before, "another picture shares what stands before it, and nothing after"
    assert records[2].reused_tokens > before
    assert sum(record.encoder_runs for record in records) == 2
    assert len(records) == 6


BETWEEN: dict[str, Any] = {
    "forward": lambda model, inputs: model(**inputs),
    "without a cache": lambda model, inputs: model.generate(
        **inputs, max_new_tokens=2, use_cache=False, pad_token_id=1
    ),
    "hidden states": lambda model, inputs: model.generate(
        **inputs, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True, pad_token_id=1
    ),
    "tower": lambda model, inputs: tower_of(model).add_(0.25),
    "head": lambda model, inputs: model.lm_head.weight.mul_(0.5),
    "text": lambda model, inputs: model.generate(
        input_ids=inputs["input_ids"][:, :3], attention_mask=inputs["attention_mask"][:, :3], max_new_tokens=2
    ),
    "beams": lambda model, inputs: model.generate(**inputs, max_new_tokens=2, num_beams=2, pad_token_id=1),
    "training": lambda model, inputs: (model.train()(**inputs), model.eval()),
}
"""Calls and changes between two calls of `generate`."""


def tower_of(model: Any) -> torch.Tensor:
    base = model.base_model
    return next((getattr(base, "visual", None) or base.vision_tower).parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.IMAGES)
def test_pictures_are_answered_whatever_happened_between_two_calls(name: str) -> None:
    """The pixels of a call stay its own, also where the model's fingerprint is made anew before it runs."""
    model, processor = tiny.image_model(name)
    mark = tiny.PLACEHOLDER[name]
    one, two = tiny.picture(1, 24, 16), tiny.picture(2, 24, 16)
    first = picture_inputs(processor, [f"{START} {mark} what colour is the cube"], [[one]])
    batch = picture_inputs(
        processor, [f"{START} {mark} and {mark} how many", f"{START} {mark} left of it"], [[two, one], [one]]
    )
    options = {"max_new_tokens": 3, "pad_token_id": 1}
    with dejakv.attach(model, processor):
        attached = vars(model)["generate"]
        for between, happens in BETWEEN.items():
            for inputs in (first, batch):
                with torch.no_grad():
                    happens(model, first)
                got = attached(**inputs, **options)
                del vars(model)["generate"]
                assert torch.equal(got, model.generate(**inputs, **options)), between
                vars(model)["generate"] = attached


def test_encoder_outputs_outlive_an_attachment_where_the_config_names_a_place(tmp_path: Path) -> None:
    name = tiny.IMAGES[0]
    model, processor = tiny.image_model(name)
    inputs = picture_inputs(processor, [f"{START} {tiny.PLACEHOLDER[name]} what colour"], [[tiny.picture(1, 24, 16)]])
    records: list[Record] = []
    for _ in range(2):
        config = SemanticCacheConfig(fusion_cache_dir=str(tmp_path))
        with dejakv.attach(model, processor, config, on_record=records.append):
            model.generate(**inputs, max_new_tokens=2, pad_token_id=1)
    assert [(record.method, record.encoder_runs) for record in records] == [("none", 1), ("none", 0)]


def test_adopt_answers_from_a_similar_prompt_with_the_callers_own_tokens_in_front() -> None:
    model, tokenizer = text()
    config = SemanticCacheConfig(
        reuse="adopt", index_encoder="model", similarity_threshold=0.5, lexical_guard=False, min_gain=1, costs=COSTS
    )
    one, two = ask(tokenizer, LONG), ask(tokenizer, "is it " + LONG)
    records: list[Record] = []
    with dejakv.attach(model, tokenizer, config, on_record=records.append) as cache:
        first = model.generate(**one, max_new_tokens=5, pad_token_id=1)
        cache.flush()
        second = model.generate(**two, max_new_tokens=5, pad_token_id=1)
    assert records[1].method == "adopt", records[1]
    prompt = two["input_ids"]
    assert torch.equal(second[:, : prompt.shape[1]], prompt)
    assert torch.equal(second[:, prompt.shape[1] :], first[:, one["input_ids"].shape[1] :])


def test_what_no_stored_state_can_serve_goes_to_the_model_untouched() -> None:
    model, tokenizer = text()
    inputs = ask(tokenizer, LONG)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    holes = mask.clone()
    holes[0, 3] = 0
    embeds = model.get_input_embeddings()(ids).detach()
    calls: list[dict[str, Any]] = [
        {"inputs_embeds": embeds, "attention_mask": mask},
        {"input_ids": ids, "attention_mask": holes},
        {"input_ids": ids.repeat(2, 1), "attention_mask": mask.repeat(2, 1), "return_dict_in_generate": True},
    ]
    options = {"max_new_tokens": 4, "pad_token_id": 1}
    records: list[Record] = []
    for call in calls:
        expected = model.generate(**call, **options)
        with dejakv.attach(model, tokenizer, on_record=records.append):
            got = model.generate(**call, **options)
        tensors = [value if isinstance(value, torch.Tensor) else value.sequences for value in (got, expected)]
        assert torch.equal(*tensors)
    assert [record.request_id for record in records] == ["untouched"] * len(calls)
    assert all(record.reason for record in records)


def test_leaving_by_an_error_restores_the_model_and_attaching_twice_is_refused() -> None:
    model, tokenizer = text()
    with dejakv.attach(model, tokenizer):
        with pytest.raises(ConfigError, match="attached already"), dejakv.attach(model, tokenizer):
            pass
        assert "generate" in vars(model)
    with pytest.raises(RuntimeError, match="mine"), dejakv.attach(model, tokenizer):
        raise RuntimeError("mine")
    assert "generate" not in vars(model)


def test_a_cache_of_the_callers_stays_open_and_survives_between_attachments(tmp_path: Path) -> None:
    model, tokenizer = text()
    inputs = ask(tokenizer, LONG)
    config = SemanticCacheConfig(semantic_text=False, cache_dir=str(tmp_path / "cache"))
    records: list[Record] = []
    cache = build_cache(config)
    with dejakv.attach(model, tokenizer, cache=cache):
        expected = model.generate(**inputs, max_new_tokens=4, pad_token_id=1)
    cache.flush()
    cache.close()
    with dejakv.attach(model, tokenizer, config, on_record=records.append):
        assert torch.equal(model.generate(**inputs, max_new_tokens=4, pad_token_id=1), expected)
    assert [record.method for record in records] == ["exact"]
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with dejakv.attach(model, tokenizer, config, on_record=records.append):
        model.generate(**inputs, max_new_tokens=4, pad_token_id=1)
    assert records[-1].method == "none", "changed weights must not find the old state"


def test_state_is_copied_before_the_caller_gets_it(docs_engine: Any, served: Any) -> None:
    """Who is handed the cache may change it at once: what is stored was taken before, of a blend too."""
    config = SemanticCacheConfig(reuse="blend", semantic_text=False, costs=COSTS)
    options = {"max_new_tokens": 2, "return_dict_in_generate": True}
    new = " ".join(f"{word} lives in {word[::-1]} ." for word in ("qabc", "wdef", "zghi", "xjkl", "vmno", "bpqr"))
    kept = []
    for spoils in (False, True):
        records: list[Record] = []
        cache = build_cache(config, docs_engine)
        with dejakv.attach(docs_engine.model, docs_engine.tokenizer, cache=cache, on_record=records.append):
            for prompt in (DOCUMENT.text, f"{new} {DOCUMENT.text}"):
                given = docs_engine.tokenizer(prompt, return_tensors="pt")
                out = docs_engine.model.generate(given["input_ids"], **options)
                for layer in out[CACHE_NAME].layers if spoils else ():
                    layer.keys.zero_()
                    layer.values.zero_()
                cache.flush()
        assert [record.method for record in records] == ["none", "blend"]
        kept.append({meta.id: cache.store.get(meta.id).tensor.data for meta in cache.store.metas()})
        cache.close()
    assert len(kept[0]) > 1
    assert all((data == kept[1][id]).all() for id, data in kept[0].items())


BOUNDED = SemanticCacheConfig(reuse="blend", semantic_text=False, costs=COSTS, error_bound=0.05)


@pytest.mark.parametrize("given", ["config", "cache"])
def test_an_error_bound_needs_idle_time(given: str) -> None:
    config = SemanticCacheConfig(semantic_text=False, reuse="blend", error_bound=0.01)
    cache = build_cache(config, None)
    more: dict[str, Any] = {"config": config} if given == "config" else {"cache": cache}
    with pytest.raises(ConfigError, match=r"settle_after, .* settle_one"), dejakv.attach(*text(), **more):
        pass
    cache.close()


@pytest.mark.parametrize("after", [0, -1.0, float("inf"), float("nan")])
def test_a_time_before_settling_that_is_none_is_refused(docs_engine: Any, after: float) -> None:
    model, tokenizer = docs_engine.model, docs_engine.tokenizer
    attached = dejakv.attach(model, tokenizer, BOUNDED, settle_after=after)
    with pytest.raises(ConfigError, match="give seconds above 0"), attached:
        pass


def test_an_error_bound_learns_while_nobody_calls(docs_engine: Any, served: Any) -> None:
    """Labels are of plain greedy calls: others run exactly, and none of them is repeated."""
    new = " ".join(f"{word} lives in {word[::-1]} ." for word in ("qabc", "wdef", "zghi", "xjkl", "vmno", "bpqr"))
    prompts = [DOCUMENT.text, *(f"{new} {name} {DOCUMENT.text}" for name in ("ann", "bob", "cid"))]
    model, tokenizer = docs_engine.model, docs_engine.tokenizer
    inputs = [tokenizer(prompt, return_tensors="pt") for prompt in prompts]
    wanted = [model.generate(**each, max_new_tokens=2, do_sample=False).tolist() for each in inputs]
    records: list[Record] = []
    seen: list[Any] = []
    others = set(threading.enumerate())
    with dejakv.attach(model, tokenizer, BOUNDED, on_record=records.append, settle_after=0.01) as cache:
        got = [model.generate(**each, max_new_tokens=2).tolist() for each in inputs[:2]]
        assert "0 labels" in records[1].reason
        gate = cache.queue.gate
        assert gate is not None
        wait_until(lambda: gate.report().explored == 1, "the label")

        def stops(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            seen.append(ids.shape)
            return torch.zeros(1, dtype=torch.bool)

        got.append(model.generate(**inputs[2], max_new_tokens=2, stopping_criteria=[stops]).tolist())
        assert "label" not in records[2].reason
        got.append(model.generate(**inputs[3], max_new_tokens=2).tolist())
    assert got == wanted
    assert len(seen) == 2
    assert "dejakv-settling" not in {thread.name for thread in set(threading.enumerate()) - others}
