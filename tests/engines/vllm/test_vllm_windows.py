"""Shapes of caches: sliding windows beside full attention, of which vLLM keeps all blocks, latent rows (MLA), and fp8. A hit is exact, since
pages come back byte for byte."""

from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model
from vllm_harness import DOCS, EXTENSION, running, tokens

from dejakv.errors import ConfigError

PROMPTS = [tokens(600 + 13 * number, 50 + number) for number in range(6)]


@pytest.mark.shows("exact")
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss", "deepseek", "fp8"])
def test_hits_are_exact(name: str, tmp_path: Path) -> None:
    """Prompts of ten windows. vLLM turns its hybrid allocator off by itself."""
    folder = DOCS if name == "fp8" else tiny_model(name, tmp_path)
    options: dict[str, Any] = {"kv_cache_dtype": "fp8"} if name == "fp8" else {}
    with running(folder, connector=False, **options) as engine:
        plain = [engine.ask([prompt], max_tokens=16)[0].tokens for prompt in PROMPTS]
    with running(folder, **options) as engine:
        for prompt in PROMPTS:
            engine.ask([prompt], max_tokens=16)
        engine.settle()
        engine.llm.reset_prefix_cache()  # False where vLLM has none: it does so for MLA on a CPU
        again = [engine.ask([prompt], max_tokens=16)[0] for prompt in PROMPTS]
        assert engine.metrics()["vllm:dejakv_loads"] == len(PROMPTS)
        (longer,) = engine.ask([PROMPTS[0] + tokens(20, 9)])
    assert [(output.told["method"], output.computed) for output in again] == [("exact", 1)] * len(PROMPTS)
    assert [output.tokens for output in again] == plain
    if name == "deepseek":  # a processor without AMX
        assert "computes a single token behind stored ones" in longer.told["reason"]


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    """Windows in every layer drop blocks whatever the allocator; blends of windows were not shown."""
    with (
        pytest.raises(ConfigError, match="sliding windows in every layer"),
        running(tiny_model("mistral", tmp_path / "m")),
    ):
        pass
    blend = {"modes": ["exact", "blend"]}
    with (
        pytest.raises(ConfigError, match="mode blend with sliding windows"),
        running(tiny_model("gemma2", tmp_path / "g"), blend, worker_extension_cls=EXTENSION),
    ):
        pass
