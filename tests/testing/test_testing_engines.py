"""The suite of engines finds the faults it is there to find."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dejakv.engines.base import Completion, Engine, Prepared
from dejakv.engines.transformers import TransformersEngine
from dejakv.errors import ModelChangedError
from dejakv.store.base import RawTensor
from dejakv.testing.engines import EngineTests


class Around(Engine):
    """An engine that passes everything on."""

    name = "around"

    def __init__(self, inner: TransformersEngine) -> None:
        self.inner = inner

    def __getattribute__(self, name: str) -> Any:
        own = {"inner", "run", "name", "full", "__class__", "__dict__"}
        return object.__getattribute__(self, name) if name in own else getattr(self.inner, name)

    def weights_changed(self) -> None: ...

    def run(self, *given: Any, **more: Any) -> Any:
        return self.inner.run(*given, **more)


class IgnoresItsStart(Around):
    def run(self, prepared: Prepared, *given: Any, **more: Any) -> Completion:
        return super().run(prepared, **more)


class CapturesZeros(Around):
    def run(self, *given: Any, **more: Any) -> Completion:
        done = super().run(*given, **more)

        def capture() -> RawTensor | None:
            held = done.capture()
            return None if held is None else RawTensor(np.zeros_like(held.data), held.dtype)

        return replace(done, capture=capture)


class DropsTheLastToken(Around):
    def run(self, *given: Any, on_token: Any = None, **more: Any) -> Completion:
        heard: list[Any] = []
        done = super().run(*given, on_token=lambda *said: heard.append(said), **more)
        for said in heard[:-1]:
            if on_token is not None:
                on_token(*said)
        return done


class NeverLooksAtTheEpoch(Around):
    def run(self, prepared: Prepared, *given: Any, **more: Any) -> Completion:
        try:
            return super().run(prepared, *given, **more)
        except ModelChangedError:
            return super().run(replace(prepared, epoch=self.inner.epoch), *given, **more)


ENGINES = [
    (IgnoresItsStart, "test_state_that_was_captured_gives_the_same_answer"),
    (CapturesZeros, "test_another_prompt_goes_on_from_what_both_begin_with"),
    (DropsTheLastToken, "test_every_token_is_streamed_and_the_pieces_make_the_text"),
    (NeverLooksAtTheEpoch, "test_a_changed_model_is_noticed_before_anything_is_computed"),
]


@pytest.mark.parametrize(("kind", "name"), ENGINES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_of_an_engine_is_found(kind: type[Around], name: str, docs_engine: Any) -> None:
    test = getattr(EngineTests(), name)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(kind(docs_engine))
    test(docs_engine)
