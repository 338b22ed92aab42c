"""State of another device, dtype or attention backend is a miss, in one folder."""

from typing import Any

import pytest
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm_harness import running, tokens

A = tokens(300, 401)


class OtherBackend(CPUAttentionBackend):
    """The same kernels under another name."""


def test_state_of_another_device_dtype_or_backend_is_a_miss(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of server finds its own state and that of no other, and says in which arithmetic."""

    def asked(**options: Any) -> tuple[str, str]:
        with running(extra={"store_dir": str(tmp_path)}, enable_prefix_caching=False, **options) as engine:
            (first,) = engine.ask([A])
            engine.settle()
            (again,) = engine.ask([A])
        arithmetic = "bf16" if options.get("dtype") == "bfloat16" else "fp32"
        # Not bit for bit: on a CPU vLLM's kernels have no batch-invariant mode.
        assert [(one.told["arithmetic"], one.told["bitwise"]) for one in (first, again)] == [(arithmetic, False)] * 2
        return first.told["method"], again.told["method"]

    assert asked() == ("none", "exact")
    with monkeypatch.context() as other:
        where = f"{OtherBackend.__module__}.{OtherBackend.__qualname__}"
        other.setattr(type(current_platform), "get_attn_backend_cls", classmethod(lambda *_, **__: where))
        clear_selection()
        assert asked() == ("none", "exact")
    clear_selection()
    with monkeypatch.context() as other:
        other.setattr(type(current_platform), "get_device_name", classmethod(lambda *_: "another"))
        assert asked() == ("none", "exact")
    assert asked(dtype="bfloat16") == ("none", "exact")
    assert asked() == ("exact", "exact")


def clear_selection() -> None:
    """vLLM remembers which backend it selected."""
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()
