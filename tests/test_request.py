"""A request holds what its annotations say, or an InputError says what is wrong: never a UnicodeEncodeError later on."""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.errors import InputError
from dejakv.request import Media, Request, Sampling

JUNK = st.sampled_from([None, 1, True, b"x", 1.5, [], {}, object(), "\ud800", float("nan"), float("inf"), -1, 10**5000])
TEXTS = ("id", "prompt", "chunk", "partition")


@pytest.mark.parametrize("field", TEXTS)
@settings(deadline=None)
@given(value=JUNK | st.text(st.characters(categories=["Cs"]), min_size=1))
def test_text_fields_take_text_alone(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        Request(**{"id": "r", "prompt": "p", "chunk": "c", field: value})


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_that_has_an_encoding_is_taken(text: str) -> None:
    assert Request(text, text, text, partition=text).partition == text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("media", [b"x"]),
        ("media", (b"x",)),
        ("media", Media(b"x")),
        ("sampling", {"max_new_tokens": 4}),
        ("reuse", "everything"),
        ("reuse", 1),
        ("threshold", 1.5),
        ("threshold", "0.5"),
        ("threshold", float("nan")),
        ("metadata", [("a", 1)]),
    ],
)
def test_other_fields(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        Request("r", "p", "c", **{field: value})


@pytest.mark.parametrize("data", ["text", None, bytearray(b"x"), memoryview(b"x"), 5])
def test_a_medium_is_bytes_that_nobody_changes(data: Any) -> None:
    with pytest.raises(InputError, match="data"):
        Media(data)


@pytest.mark.parametrize(
    "given",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 2},
        {"seed": 1.5},
        {"num_beams": 0},
    ],
)
def test_sampling(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(given))):
        Sampling(**given)


def test_a_stored_request_is_one_that_was_checked() -> None:
    stored, checked = Request.from_store("a prompt", "a chunk", "p"), Request("", "a prompt", "a chunk", partition="p")
    assert stored == checked
    assert {item.name: getattr(stored, item.name) for item in fields(Request)} == {
        item.name: getattr(checked, item.name) for item in fields(Request)
    }
