"""A cache whose KV entries are stored in 8 bits: they serve blends, and nothing ever takes them for exact."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.asking import DOCUMENT, OTHER, uncached
from tests.test_pipeline_rows import BLEND, SECOND, joined

from dejakv.decide.bound import setting_of
from dejakv.decide.plan import ReuseRequest
from dejakv.engines.open import ModelChoice
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.errors import ConfigError
from dejakv.experiments.vllm_engine import open_vllm
from dejakv.request import Request
from dejakv.store.base import INT8, KV
from dejakv.store.selection import Selection

QUANTIZED = replace(BLEND, kv_quantization="int8")
PROMPT = joined(DOCUMENT.text)


@pytest.fixture
def asked() -> list[Request]:
    """The stored prompt, what begins as it does, and what holds its text, in every mode."""
    texts = [joined(DOCUMENT.text), joined(DOCUMENT.text, SECOND), joined(SECOND, DOCUMENT.text)]
    modes = ("off", "exact", "adopt", "blend")
    return [replace(text, reuse=mode) for text in texts for mode in modes]


def test_every_hit_is_a_blend_whatever_is_asked(docs_engine: Any, served: Any, asked: list[Request]) -> None:
    pipeline = served(QUANTIZED)
    first = pipeline.answer(PROMPT)
    assert (first.record.method, first.record.stored) == ("none", False)
    methods = set[str]()
    for wanted in asked:
        answer = pipeline.answer(replace(wanted, no_store=True))
        methods.add(answer.record.method)
        assert answer.record.approximate == (answer.record.method == "blend")
        assert not answer.record.bitwise or answer.record.method == "none"
        if answer.record.method == "none":
            assert answer.record.computed_tokens == answer.record.prompt_tokens
            assert answer.token_ids == uncached(docs_engine, wanted).token_ids
        else:
            assert wanted.reuse == "blend"
    assert methods == {"none", "blend"}


def test_what_is_kept_of_prompts_and_blends_is_in_8_bits(served: Any) -> None:
    pipeline = served(QUANTIZED)
    pipeline.promotes = True
    pipeline.answer(PROMPT)
    blended = pipeline.answer(joined(SECOND, DOCUMENT.text))
    assert blended.record.method == "blend"
    assert not pipeline.settle_one()  # its exact state would not be kept
    metas = list(pipeline.cache.store.metas())
    assert {meta.kind for meta in metas} == {INT8}
    assert min(meta.generation for meta in metas) == 1
    assert max(meta.generation for meta in metas) == 2
    again = pipeline.answer(joined(SECOND, OTHER.text))
    assert (again.record.method, again.record.level) == ("blend", "copied")
    purged = pipeline.purge(Selection(donors=(blended.record.donor,)))
    assert (purged.prompts, purged.rows > 0) == (1, True)  # with what was computed from it


def test_caches_with_and_without_never_read_each_other(docs_engine: Any, served: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "store")
    longer = joined(DOCUMENT.text, SECOND)
    for config, other in ((BLEND, QUANTIZED), (QUANTIZED, BLEND)):
        place = folder + config.kv_quantization
        filled = served(replace(config, store=place))
        filled.answer(PROMPT)
        (held,) = (meta.id for meta in filled.cache.store.metas())
        pipeline = served(replace(other, store=place))
        named = ReuseRequest("blend", named=(held,))
        prepared = replace(docs_engine.prepare(longer), epoch=docs_engine.epoch)
        assert pipeline.cache.find(prepared, named).plan.donors == ()
        for wanted in (PROMPT, longer):
            answer = pipeline.answer(replace(wanted, no_store=True))
            assert (answer.record.method, answer.record.donor) == ("none", None)
            assert answer.token_ids == uncached(docs_engine, wanted).token_ids
        pipeline.answer(PROMPT)  # each has its own beside the other's
        assert sorted(meta.kind for meta in pipeline.cache.store.metas()) == [INT8, KV]
        assert filled.answer(PROMPT).record.method == ("exact" if config is BLEND else "blend")


def test_evidence_of_the_bound_is_of_one_codec() -> None:
    assert setting_of("blend", QUANTIZED) != setting_of("blend", BLEND)


def test_vllm_refuses_it_at_the_start() -> None:
    for start in (
        lambda: ConnectorSettings.from_extra({"kv_quantization": "int8", "mode": "blend"}),
        lambda: open_vllm(ModelChoice("docs-lm"), QUANTIZED),
    ):
        with pytest.raises(ConfigError, match=r"kv_quantization is of the transformers engine.*Leave it out"):
            start()
