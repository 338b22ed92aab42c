"""The suites for engines and encoders find the faults they are there to find."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dejakv.encoders.base import Vector
from dejakv.encoders.text import ModelTextEncoder
from dejakv.engines.base import Completion, Prepared, Start
from dejakv.engines.transformers import TransformersEngine
from dejakv.errors import ModelChangedError
from dejakv.store.base import Tensor
from dejakv.testing.encoders import TextEncoderTests
from dejakv.testing.engines import EngineTests


class Around:
    """An engine that passes everything on."""

    name = "around"

    def __init__(self, inner: TransformersEngine) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, prepared: Prepared, **more: Any) -> Completion:
        return self.inner.run(prepared, **more)


class IgnoresItsStart(Around):
    def run(self, prepared: Prepared, *, start: Start | None = None, **more: Any) -> Completion:
        return super().run(prepared, **more)


class CapturesZeros(Around):
    def run(self, prepared: Prepared, **more: Any) -> Completion:
        done = super().run(prepared, **more)

        def capture() -> Tensor | None:
            held = done.capture()
            return None if held is None else Tensor(np.zeros_like(held.data), held.dtype)

        return replace(done, capture=capture)


class DropsTheLastToken(Around):
    def run(self, prepared: Prepared, *, on_token: Any = None, **more: Any) -> Completion:
        heard: list[Any] = []
        done = super().run(prepared, on_token=lambda *said: heard.append(said), **more)
        for said in heard[:-1]:
            if on_token is not None:
                on_token(*said)
        return done


class NeverLooksAtTheEpoch(Around):
    def unidentified(self) -> str:
        return ""

    def weights_changed(self) -> None: ...

    def run(self, prepared: Prepared, **more: Any) -> Completion:
        try:
            return super().run(prepared, **more)
        except ModelChangedError:
            return super().run(replace(prepared, epoch=self.inner.epoch), **more)


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


class Unnormalized(ModelTextEncoder):
    def encode(self, text: str) -> Vector:
        return 2 * super().encode(text)


class SortsItsTexts(ModelTextEncoder):
    def encode_many(self, texts: Sequence[str]) -> list[Vector]:
        return super().encode_many(sorted(texts))


def test_a_fault_of_an_encoder_is_found(docs_engine: Any) -> None:
    suite = TextEncoderTests()
    with pytest.raises(AssertionError):
        suite.test_a_text_is_a_unit_vector(Unnormalized(docs_engine.embed_text, "e"), "a red ball")
    with pytest.raises(AssertionError):
        suite.test_many_are_encoded_in_order_as_one_by_one(SortsItsTexts(docs_engine.embed_text, "e"))
    suite.test_many_are_encoded_in_order_as_one_by_one(ModelTextEncoder(docs_engine.embed_text, "e"))
