"""Shapes of caches: sliding windows, beside full attention in groups of their own or alone, latent rows (MLA), and fp8. A hit is exact, since
pages come back byte for byte."""

from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model
from vllm_harness import DOCS, EXTENSION, running, tokens

from dejakv.errors import ConfigError

HYBRID = ("gemma2", "gemma3", "gpt-oss")
PROMPTS = [tokens(600 + 13 * number, 50 + number) for number in range(6)]


PART = PROMPTS[0][:300] + tokens(20, 9)


@pytest.mark.shows("exact")
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss", "mistral_window", "deepseek", "fp8"])
def test_hits_are_exact(name: str, tmp_path: Path) -> None:
    """Prompts of ten windows, computed in several steps where vLLM can. While they are, blocks outside of windows are used for others."""
    folder = DOCS if name == "fp8" else tiny_model(name, tmp_path)
    options: dict[str, Any] = {"kv_cache_dtype": "fp8"} if name == "fp8" else {}
    options |= {} if name == "deepseek" else {"max_num_batched_tokens": 160}
    with running(folder, connector=False, **options) as engine:
        *plain, part = (engine.ask([prompt], max_tokens=16)[0].tokens for prompt in [*PROMPTS, PART])
    with running(folder, **options) as engine:
        assert len(engine.core.scheduler.kv_cache_config.kv_cache_groups) == (2 if name in HYBRID else 1)
        engine.ask(PROMPTS, max_tokens=16)
        engine.settle()
        engine.llm.reset_prefix_cache()  # False where vLLM has none: it does so for MLA on a CPU
        again = [engine.ask([prompt], max_tokens=16)[0] for prompt in PROMPTS]
        assert engine.metrics()["vllm:dejakv_loads"] == len(PROMPTS)
        engine.llm.reset_prefix_cache()
        (parted,) = engine.ask([PART], max_tokens=16)
        whole = engine.connector.scheduler_side.whole
    assert [(output.told["method"], output.computed) for output in again] == [("exact", 1)] * len(PROMPTS)
    assert [output.tokens for output in again] == plain
    assert parted.tokens == part
    assert not whole or name == "deepseek"
    if whole:  # a processor without AMX
        assert "computes a single token behind stored ones" in parted.told["reason"]
    else:
        assert parted.told["tokens_reused"] == 300


@pytest.mark.shows("blend", model="gemma2", told="refused")
def test_blends_of_windows_are_refused(tmp_path: Path) -> None:
    """They were not shown."""
    blend = {"modes": ["exact", "blend"]}
    with (
        pytest.raises(ConfigError, match="mode blend with sliding windows"),
        running(tiny_model("gemma2", tmp_path / "g"), blend, worker_extension_cls=EXTENSION),
    ):
        pass
