"""Stored answers (`answers=keep`): returned at once for equal prompts and, where asked for, similar ones; labelled, and only where full
computation would have been asked for the same."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.documents import ADOPT, COSTS, EXACT, request, uncached, wordings
from tests.serving import stored

import dejakv
from dejakv.build import build_cache
from dejakv.engines.transformers import TransformersEngine
from dejakv.errors import ConfigError
from dejakv.pipeline import Pipeline
from dejakv.request import Sampling
from dejakv.server.app import create_app
from dejakv.server.settings import ServerSettings
from dejakv.store.selection import Selection

KEEP = replace(EXACT, answers="keep")
SIMILAR = replace(ADOPT, answers="keep", min_gain=16)


def test_an_equal_prompt_gets_the_stored_answer_and_nothing_runs(docs_engine: Any, served: Any) -> None:
    pipeline, wanted = served(KEEP), request(wordings()[0])
    plain, first = uncached(docs_engine, wanted), pipeline.answer(wanted)
    pieces: list[tuple[int, str]] = []
    again = pipeline.answer(wanted, on_token=lambda *piece: pieces.append(piece))
    assert (first.record.answer, again.record.answer) == ("computed", "stored")
    assert (again.text, again.token_ids) == (plain.text, plain.token_ids)
    record = again.record
    assert (record.method, record.approximate, record.bitwise, record.arithmetic) == ("exact", False, True, "fp32")
    assert (record.computed_tokens, record.reused_tokens) == (0, record.prompt_tokens)
    assert "".join(text for _, text in pieces) == plain.text
    assert pipeline.waiting == 0


@pytest.mark.parametrize(
    "other",
    [
        {"sampling": Sampling(3)},
        {"sampling": Sampling(4, stop=("x",))},
        {"sampling": Sampling(4, temperature=0.5, seed=1)},
        {"reuse": "off"},
        {"partition": "another"},
    ],
    ids=str,
)
def test_another_sampling_caller_or_wish_is_computed(served: Any, other: dict[str, Any]) -> None:
    pipeline, wanted = served(KEEP), request(wordings()[0])
    pipeline.answer(wanted)
    assert pipeline.answer(replace(wanted, **other)).record.answer == "computed"
    assert pipeline.answer(wanted).record.answer == "stored"


def test_a_sampled_answer_is_not_stored_and_neither_is_any_unless_asked_for(served: Any) -> None:
    for config, sampling in ((KEEP, Sampling(4, temperature=0.5, seed=1)), (EXACT, Sampling(4))):
        pipeline, wanted = served(config), replace(request(wordings()[0]), sampling=sampling)
        assert [pipeline.answer(wanted).record.answer for _ in range(2)] == ["computed", "computed"]


def test_a_similar_prompt_gets_it_where_adopt_is_asked_for_and_the_label_says_so(served: Any) -> None:
    one, other = wordings()
    pipeline = served(replace(SIMILAR, lexical_guard=False))
    first = pipeline.answer(request(one))
    again = pipeline.answer(request(other))
    assert (again.record.answer, again.record.method, again.record.approximate) == ("stored", "adopt", True)
    assert (again.text, again.record.computed_tokens) == (first.text, 0)
    assert not again.record.stored
    exactly = pipeline.answer(replace(request(other), reuse="exact"))
    assert (exactly.record.answer, exactly.record.approximate) == ("computed", False)


def test_guards_and_threshold_decide_as_for_any_donor(served: Any) -> None:
    one, other = wordings()
    pipeline = served(SIMILAR)
    pipeline.answer(request(one))
    guarded = pipeline.answer(replace(request(other), no_store=True)).record
    assert (guarded.answer, guarded.reason.partition(":")[0]) == ("computed", "lexical")
    trusting = served(replace(SIMILAR, lexical_guard=False))
    trusting.answer(request(one))
    strict = trusting.answer(replace(request(other), threshold=0.9999, no_store=True)).record
    assert (strict.answer, strict.method) == ("computed", "prefix")


def test_answers_outlive_the_process_expire_and_are_purged(docs_engine: Any, tmp_path: Path) -> None:
    wanted, config = request(wordings()[0]), replace(KEEP, store=str(tmp_path / "store"))

    def ask(how: Any = config, purged: bool = False) -> str:
        cache = build_cache(how, docs_engine, background=False)
        try:
            if purged:
                cache.purge(Selection(wanted.partition))
            return Pipeline(docs_engine, cache).answer(wanted).record.answer
        finally:
            cache.close()

    assert [ask(), ask(), ask(replace(config, answers="compute"))] == ["computed", "stored", "computed"]
    assert [ask(purged=True), ask()] == ["computed", "stored"]
    brief = replace(config, store=str(tmp_path / "brief"), ttl=1e-6)
    assert [ask(brief), ask(brief)] == ["computed", "computed"]


def test_a_damaged_note_is_a_miss(served: Any) -> None:
    pipeline, wanted = served(KEEP), request(wordings()[0])
    meta = pipeline.cache.store.meta(pipeline.answer(wanted).record.key)
    for kept in (None, 5, [1, 2], [meta.metadata["kept"][0], ["1"], "fp32", True]):
        pipeline.cache.store.meta = lambda _id, kept=kept: replace(meta, metadata={**meta.metadata, "kept": kept})
        assert pipeline.answer(wanted).record.answer == "computed"


def test_settings_that_do_not_fit_are_refused(docs_engine: Any) -> None:
    with pytest.raises(ConfigError, match="answers=keep"):
        replace(KEEP, prune="snapkv")
    with (
        pytest.raises(ConfigError, match="answers=keep"),
        dejakv.attach(docs_engine.model, docs_engine.tokenizer, KEEP),
    ):
        pass


@pytest.fixture
def client(docs_engine: Any) -> Iterator[TestClient]:
    settings = ServerSettings(answers="keep", costs=COSTS, similarity_threshold=0.0, lexical_guard=False)
    with TestClient(create_app(settings, docs_engine)) as client:
        yield client


def test_the_server_returns_and_labels_stored_answers(client: TestClient) -> None:
    one, other = (request(each).prompt for each in wordings())
    body = {"prompt": one, "temperature": 0, "max_tokens": 4}
    first, again = (client.post("/v1/completions", json=body).json() for _ in range(2))
    assert (first["dejakv"]["answer"], again["dejakv"]["answer"]) == ("computed", "stored")
    assert again["choices"] == first["choices"]
    assert again["usage"]["completion_tokens"] == first["usage"]["completion_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"]
    streamed = client.post("/v1/completions", json={**body, "stream": True}).text
    assert '"answer": "stored"' in streamed
    stored(client)
    for _ in "ab":  # a stored answer has no log probabilities, so it is computed
        scored = client.post("/v1/completions", json={**body, "logprobs": 1}).json()
        assert "".join(scored["choices"][0]["logprobs"]["tokens"]) == first["choices"][0]["text"]
        assert scored["dejakv"]["answer"] == "computed"
        assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert client.post("/v1/completions", json=body).json()["dejakv"]["answer"] == "stored"
    asked = {"prompt": other, "temperature": 0, "max_new_tokens": 4}
    exactly = client.post("/v1/generate", json={**asked, "no_store": True}).json()
    assert (exactly["answer"], exactly["approximate"]) == ("computed", False)
    similar = client.post("/v1/completions", json={**body, "prompt": other, "dejakv": {"reuse": "adopt"}}).json()
    assert (similar["dejakv"]["answer"], similar["dejakv"]["approximate"]) == ("stored", True)
    assert similar["choices"][0]["text"] == first["choices"][0]["text"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 4.0),
        ("suppress_tokens", None),  # the first token of the answer
        ("eos_token_id", None),
        ("forced_bos_token_id", 5),
        ("no_repeat_ngram_size", 1),
        ("min_new_tokens", 3),
        ("bad_words_ids", None),
    ],
)
def test_a_stored_answer_is_of_the_same_generation_configuration(
    tmp_path: Path, docs_engine: Any, name: str, value: Any
) -> None:
    """Also after a restart: what decides a greedy answer and stands in no request is a part of the answer's key."""
    model, tokenizer = docs_engine.model, docs_engine.tokenizer
    wanted, config = request(wordings()[0]), replace(KEEP, store=str(tmp_path))
    before = getattr(model.generation_config, name, None)

    def answer() -> Any:
        engine = TransformersEngine(model, tokenizer)
        with closing(build_cache(config, engine)) as cache:
            return Pipeline(engine, cache).answer(wanted), uncached(engine, wanted)

    first, _ = answer()
    values = {
        "suppress_tokens": [first.token_ids[0]],
        "eos_token_id": first.token_ids[0],
        "bad_words_ids": [[first.token_ids[0]]],
    }
    setattr(model.generation_config, name, values.get(name, value))
    try:
        changed, alone = answer()
        assert changed.record.answer == "computed"
        assert changed.token_ids == alone.token_ids
    finally:
        setattr(model.generation_config, name, before)
    assert answer()[0].token_ids == first.token_ids
