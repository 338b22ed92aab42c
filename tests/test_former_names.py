"""Names of 0.2 that changed work for one release, with a warning that names the new one."""

from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import numpy as np
import pytest

from dejakv.decide.plan import RequestObserver
from dejakv.engines.base import Engine
from dejakv.prototypes import KVChunk
from dejakv.prototypes.token_store import CacheItem
from dejakv.request import Prepared, Request

FORMER = {
    "dejakv.adopt": {"Adopter": "PromptAdopter"},
    "dejakv.decide.guards.base": {"Verdict": "GuardVerdict"},
    "dejakv.decide.levels.base": {"Search": "LevelSearch"},
    "dejakv.decide.plan": {"Ask": "ReuseRequest", "Observer": "RequestObserver"},
    "dejakv.server.schemas": {"Origin": "StateOrigin"},
    "dejakv.store.base": {
        "Chunk": "StoredState", "ChunkMeta": "StateInfo", "CorruptChunk": "CorruptState", "Tensor": "RawTensor"
    },
}  # fmt: skip
CASES = [(module, former, new) for module, names in FORMER.items() for former, new in names.items()]


@pytest.mark.parametrize(("module", "former", "new"), CASES)
def test_a_former_name_is_the_new_one_and_warns(module: str, former: str, new: str) -> None:
    home = import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{former} is now named {new}"):
        assert getattr(home, former) is getattr(home, new)


@pytest.mark.parametrize("module", FORMER)
def test_an_unknown_name_is_an_attribute_error(module: str) -> None:
    with pytest.raises(AttributeError, match="no attribute 'Never'"):
        _ = import_module(module).Never


def test_a_former_field_is_taken_and_read_and_warns() -> None:
    request = Request(id="1", prompt="a", chunk="a")
    with pytest.warns(DeprecationWarning, match=r"Prepared\.piece is now named prefill_unit") as caught:
        prepared = Prepared(request, (1, 2), piece=256)  # pyright: ignore[reportCallIssue]
    assert caught[0].filename == __file__
    assert prepared == Prepared(request, (1, 2), prefill_unit=256)

    with pytest.warns(DeprecationWarning, match=r"Prepared\.piece is now named"):
        assert prepared.piece == 256  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.warns(DeprecationWarning, match=r"Prepared\.piece is now named"):
        assert replace(prepared, piece=16).prefill_unit == 16


def test_an_engine_that_sets_a_former_attribute_is_asked_by_the_new_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"OfClass\.piece is now named prefill_unit") as caught:

        class OfClass(Engine):
            piece = 256

    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"OfProperty\.piece is now named"):

        class OfProperty(Engine):
            @property
            def piece(self) -> int:
                return 256

    class OfInstance(Engine):
        def __init__(self) -> None:
            self.piece = 256

    with pytest.warns(DeprecationWarning, match=r"Engine\.piece is now named"):
        engines = [OfClass(), OfProperty(), OfInstance()]
    assert [engine.prefill_unit for engine in engines] == [256] * 3
    with pytest.warns(DeprecationWarning, match=r"Engine\.piece is now named"):
        assert [engine.piece for engine in engines] == [256] * 3
    assert Engine().prefill_unit == 1


def test_an_observer_with_former_methods_is_called_by_the_new_ones() -> None:
    with pytest.warns(DeprecationWarning, match=r"Own\.(decided|answered) is now"):

        class Own(RequestObserver):
            def decided(self, prepared: Any, decision: Any) -> Any:
                return "reviewed"

            def answered(self, prepared: Any, decision: Any, plan: Any, ran: Any) -> Any:
                return "observed"

    observer = cast(Any, Own())
    assert observer.review_decision(None, None) == "reviewed"
    assert observer.observe_answer(None, None, None, None) == "observed"
    with pytest.warns(DeprecationWarning, match="is now named review_decision"):
        assert observer.decided(None, None) == "reviewed"


def test_stored_states_have_their_name_in_the_prototypes_and_in_tests() -> None:
    with pytest.warns(DeprecationWarning, match="make_chunk is now named make_stored_state"):
        from dejakv.testing import make_chunk  # pyright: ignore[reportAttributeAccessIssue]
    stored_state = make_chunk(1)
    with pytest.warns(DeprecationWarning, match="dejakv.testing.chunks is now dejakv.testing.stored_states"):
        from dejakv.testing.chunks import same_bits  # pyright: ignore[reportAttributeAccessIssue]
    assert same_bits(stored_state.tensor, stored_state.tensor)

    with pytest.warns(DeprecationWarning, match=r"KVChunk\.chunk is now named stored_state"):
        shown = KVChunk(chunk=stored_state)  # pyright: ignore[reportCallIssue]
    assert shown.chunk_id == stored_state.meta.id
    with pytest.warns(DeprecationWarning, match=r"CacheItem\.chunk is now named stored_state"):
        assert CacheItem(stored_state, np.zeros(2, np.float32)).chunk is stored_state  # pyright: ignore[reportAttributeAccessIssue]
