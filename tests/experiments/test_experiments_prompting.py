import pytest

from dejakv.datasets.base import Sample
from dejakv.errors import ConfigError, InputError
from dejakv.experiments.prompting import Prompter, chunk_of
from dejakv.request import Media

SAMPLE = Sample(
    "1", "What is it?", "dog", fields={"semanticStr": "select: it", "groups": {"global": None, "local": "12-dog"}}
)


@pytest.mark.parametrize(
    ("source", "chunk"),
    [
        ("question", "What is it?"),
        ("semantic", "select: it"),
        ("group", "12-dog"),
        ("combined", "What is it? select: it"),
        ("semanticStr", "select: it"),
        ("prompt", "PROMPT"),
    ],
)
def test_chunk_sources(source: str, chunk: str) -> None:
    assert chunk_of(SAMPLE, source, "PROMPT") == chunk


def test_a_missing_field_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match="groups, semanticStr"):
        chunk_of(SAMPLE, "topic", "")


def test_plain_template_for_models_without_a_chat_template() -> None:
    request = Prompter().request(SAMPLE)
    assert request.prompt == "Question: What is it?\nAnswer:"
    assert Prompter(template="Q {question} C {context}").prompt(SAMPLE) == "Q What is it? C "


class Chat:
    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, object]], **_: object) -> str:
        return repr(messages)


def test_chat_template_gets_pictures_and_context() -> None:
    sample = Sample("1", "What?", media=(Media(b"x"),), context="A text.")
    prompt = Prompter(Chat()).prompt(sample)
    assert "{'role': 'system', 'content': 'A text.'}" in prompt
    assert "[{'type': 'image'}, {'type': 'text', 'text': 'What?'}]" in prompt


def test_empty_question_and_bad_template() -> None:
    with pytest.raises(InputError, match="empty question"):
        Prompter().request(Sample("7", "  "))
    with pytest.raises(ConfigError, match="question"):
        Prompter(template="{nope}")
