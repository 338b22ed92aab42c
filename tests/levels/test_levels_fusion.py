"""Fusion states by prompt: through a store, and around a provider that fails."""

from typing import Any

import numpy as np
import pytest

from dejakv.errors import InputError
from dejakv.prototypes.fusion import FusionCache, FusionState
from dejakv.request import Retention, retention_scope
from dejakv.store.open import open_store


class Provider:
    """A fusion module that puts out the request's number."""

    def __init__(self) -> None:
        self.taken: list[FusionState] = []
        self.refuse = False

    def capture(self, *, llm: Any, request_id: str, chunk_id: str) -> FusionState | None:
        if request_id == "text only":
            return None
        if request_id == "broken":
            raise RuntimeError("no such module")
        return FusionState(chunk_id, tensors(float(request_id)), {"request": request_id})

    def inject(self, *, llm: Any, request_id: str, state: FusionState) -> bool:
        if request_id == "broken":
            raise RuntimeError("no such module")
        self.taken.append(state)
        return not self.refuse


def tensors(value: float) -> dict[str, np.ndarray]:
    return {
        "fusion_output": np.full((3, 4), value, np.float32),
        "image_features": np.full((2, 1, 3, 4), value, np.float16),
        "flat": np.arange(5, dtype=np.int64),
        "scalar": np.array(value, np.float32),
    }


def equal(state: FusionState | None, value: float) -> bool:
    assert state is not None
    wanted = tensors(value)
    assert list(state.tensors) == list(wanted)
    return all(
        state.tensors[n].dtype == t.dtype and state.tensors[n].shape == t.shape and (state.tensors[n] == t).all()
        for n, t in wanted.items()
    )


def test_capture_then_inject() -> None:
    provider = Provider()
    cache = FusionCache(provider, open_store(), "model")
    assert cache.capture(llm=None, request_id="7", chunk_id="c")
    assert equal(cache.load("c"), 7)
    assert cache.inject(llm=None, request_id="8", chunk_id="c") == "hit"
    assert provider.taken[0].metadata == {"request": "7"}
    assert cache.inject(llm=None, request_id="8", state=cache.load("c")) == "hit"
    assert cache.inject(llm=None, request_id="8", chunk_id="unknown") == "miss"


def test_a_provider_that_fails_or_refuses_is_a_miss() -> None:
    provider = Provider()
    cache = FusionCache(provider, open_store(), "model")
    assert not cache.capture(llm=None, request_id="text only", chunk_id="c")
    assert not cache.capture(llm=None, request_id="broken", chunk_id="c")
    assert not cache.capture(llm=None, request_id="nan", chunk_id="c")  # NaN is refused
    cache.save(FusionState("c", tensors(1)))
    assert cache.inject(llm=None, request_id="broken", chunk_id="c") == "miss"
    provider.refuse = True
    assert cache.inject(llm=None, request_id="1", chunk_id="c") == "miss"


def test_nothing_is_captured_of_a_request_that_asks_for_it() -> None:
    cache = FusionCache(Provider(), open_store(), "model")
    with retention_scope(Retention(no_store=True)):
        assert not cache.capture(llm=None, request_id="7", chunk_id="c")
    assert cache.load("c") is None


def test_what_is_saved_is_a_copy() -> None:
    cache = FusionCache(Provider(), open_store(), "model")
    mine = tensors(1)
    cache.save(FusionState("c", mine))
    mine["fusion_output"][:] = 9
    assert equal(cache.load("c"), 1)


def test_models_and_partitions_do_not_see_each_other() -> None:
    store = open_store()
    FusionCache(None, store, "model", "a").save(FusionState("c", tensors(1)))
    assert equal(FusionCache(None, store, "model", "a").load("c"), 1)
    assert FusionCache(None, store, "model", "b").load("c") is None
    assert FusionCache(None, store, "another model", "a").load("c") is None


@pytest.mark.parametrize("bad", [np.ones((0, 4)), np.array([np.inf])])
def test_a_state_that_would_spoil_every_later_request_is_refused(bad: np.ndarray) -> None:
    cache = FusionCache(None, open_store(), "model")
    with pytest.raises(InputError, match="'rows'"):
        cache.save(FusionState("c", {"rows": bad}))
    assert cache.load("c") is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool", "float8_e4m3fn", "complex64"])
def test_torch_tensors_come_back_as_they_were_captured(dtype: str) -> None:
    torch = pytest.importorskip("torch")

    class Torch(Provider):
        def capture(self, *, llm: Any, request_id: str, chunk_id: str) -> FusionState:
            output = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
            graph = torch.ones(2, requires_grad=True) * 2
            tensors = {"fusion_output": output.T, "scalar": output[0, 0], "graph": graph, "np": np.ones(2)}
            return FusionState(chunk_id, tensors)

    cache = FusionCache(Torch(), open_store(), "model")
    assert cache.capture(llm=None, request_id="7", chunk_id="c")
    state = cache.load("c")
    assert state is not None
    wanted = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype)).T
    assert state.tensors["fusion_output"].dtype == wanted.dtype
    assert torch.equal(state.tensors["fusion_output"].view(torch.uint8), wanted.contiguous().view(torch.uint8))
    assert state.tensors["scalar"].shape == ()
    assert not state.tensors["graph"].requires_grad
    assert isinstance(state.tensors["np"], np.ndarray)


@pytest.mark.parametrize("bad", [[1.0, 2.0], "features", None, np.array([object()])])
def test_what_is_no_array_is_refused_by_name(bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(Provider):
        def capture(self, *, llm: Any, request_id: str, chunk_id: str) -> FusionState:
            return FusionState(chunk_id, {"features": bad})

    cache = FusionCache(Wrong(), open_store(), "model")
    with pytest.raises(InputError, match=r"'features' is of .*torch tensor"):
        cache.save(FusionState("c", {"features": bad}))
    assert not cache.capture(llm=None, request_id="7", chunk_id="c")
    assert "fusion state not stored: the fusion state's 'features'" in caplog.text


def test_a_torch_state_with_nan_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InputError, match="NaN"):
        FusionCache(None, open_store(), "model").save(FusionState("c", {"rows": torch.tensor([1.0, float("nan")])}))
