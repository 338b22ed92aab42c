"""The vLLM engine passes the suite that outsiders' engines are held to."""

import pytest

from dejakv.config import SemanticCacheConfig
from dejakv.engines.base import Engine
from dejakv.engines.open import ModelChoice
from dejakv.errors import ConfigError
from dejakv.experiments.vllm_engine import VLLMEngine, open_vllm
from dejakv.request import Request
from dejakv.testing.engines import EngineTests


class TestVLLM(EngineTests):
    def make(self) -> Engine:
        return VLLMEngine.from_pretrained("docs-lm")


class Leaves(Exception):
    """A client who leaves."""


def test_an_answer_that_is_stopped_leaves_nothing_running() -> None:
    def leaves(_token: int, _text: str) -> None:
        raise Leaves

    engine = VLLMEngine.from_pretrained("docs-lm")
    try:
        plain = engine.for_arm("prefix")
        prepared = plain.prepare(Request("r", "<s> Ann lives in Paris . <q> Where does Ann live ? <a>", ""))
        with pytest.raises(Leaves):
            plain.run(prepared, on_token=leaves)
        assert not engine._llm.llm_engine.has_unfinished_requests()
        assert plain.run(prepared).token_ids == engine.for_arm("none").run(prepared).token_ids
    finally:
        engine.close()


def test_an_error_bound_over_blends_is_refused() -> None:
    """vLLM holds a prompt's exact state by the time its blend would be compared with it."""
    with pytest.raises(ConfigError, match="--engine transformers, or --reuse adopt"):
        open_vllm(ModelChoice("docs-lm", engine="vllm"), SemanticCacheConfig(reuse="blend", error_bound=0.1))
