import pytest

from dejakv.datasets.base import Sample
from dejakv.errors import ConfigError, InputError
from dejakv.experiments.samples import SamplePrompter, chunk_of
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
    request = SamplePrompter().request(SAMPLE)
    assert request.prompt == "Question: What is it?\nAnswer:"
    assert SamplePrompter(template="Q {question} C {context}").prompt(SAMPLE) == "Q What is it? C "


class Chat:
    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, object]], **_: object) -> str:
        return repr(messages)


def test_chat_template_gets_pictures_and_context() -> None:
    sample = Sample("1", "What?", media=(Media(b"x"),), context="A text.")
    prompt = SamplePrompter(Chat()).prompt(sample)
    assert "{'role': 'system', 'content': 'A text.'}" in prompt
    assert "[{'type': 'image'}, {'type': 'text', 'text': 'What?'}]" in prompt


def test_empty_question_and_bad_template() -> None:
    with pytest.raises(InputError, match="empty question"):
        SamplePrompter().request(Sample("7", "  "))
    with pytest.raises(ConfigError, match="question"):
        SamplePrompter(template="{nope}")


def test_a_conversation_is_rendered_message_by_message() -> None:
    from transformers import AutoTokenizer

    from dejakv.models import tokenizer_folder

    talk = Sample("1", "b", messages=(("system", "s"), ("user", "a"), ("assistant", "x"), ("user", "b")))
    assert SamplePrompter().prompt(talk) == "system: s\nuser: a\nassistant: x\nuser: b\nassistant:"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder("smollm2-135m"))
    text = SamplePrompter(tokenizer).prompt(talk)
    assert text.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nx")
    assert text.endswith("<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="sample 1: the model's chat template refuses"):
        SamplePrompter(tokenizer).prompt(talk)


def test_a_record_may_name_its_partition() -> None:
    sample = Sample("1", "q", fields={"partition": "tenant"})
    assert SamplePrompter().request(sample).partition == "tenant"
    assert SamplePrompter().request(Sample("2", "q")).partition == "default"
