"""finished_text: which responses may be kept."""

from typing import Any

import pytest

from dejakv.answers import finished_text

TEXT = {"role": "assistant", "content": "On the mat."}


def response(message: Any = TEXT, reason: Any = "stop", **fields: Any) -> dict[str, Any]:
    return {"choices": [{"message": message, "finish_reason": reason}], **fields}


@pytest.mark.parametrize("reason", ["stop", "STOP", "end_turn", "COMPLETE"])
def test_a_normal_end_is_kept(reason: str) -> None:
    assert finished_text(response(reason=reason)) == "On the mat."


@pytest.mark.parametrize(
    "reason", ["length", "content_filter", "tool_calls", "function_call", "max_tokens", "SAFETY", "", None, 7]
)
def test_another_end_is_not(reason: Any) -> None:
    assert finished_text(response(reason=reason)) is None


@pytest.mark.parametrize(
    "message",
    [
        {**TEXT, "tool_calls": [{"id": "1"}]},
        {**TEXT, "function_call": {"name": "f"}},
        {**TEXT, "refusal": "I cannot help with that."},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": " \n"},
        {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
        None,
    ],
)
def test_calls_refusals_and_answers_without_text_are_not(message: Any) -> None:
    assert finished_text(response(message)) is None


@pytest.mark.parametrize("body", [None, "text", {}, {"choices": []}, {"choices": ["x"]}, response(error={"code": 500})])
def test_errors_are_not(body: Any) -> None:
    assert finished_text(body) is None


def test_every_choice_must_be_finished() -> None:
    body = response()
    body["choices"].append({"message": TEXT, "finish_reason": "length"})
    assert finished_text(body) is None


def test_completions_and_objects_of_openai() -> None:
    from openai.types.chat import ChatCompletion

    assert finished_text({"choices": [{"text": "On the mat.", "finish_reason": "stop"}]}) == "On the mat."
    head = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
    choice = {"index": 0, "message": TEXT, "finish_reason": "stop", "logprobs": None}
    assert finished_text(ChatCompletion.model_validate({**head, "choices": [choice]})) == "On the mat."
