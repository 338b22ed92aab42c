"""The openai client, unchanged, against a real server."""

import random
import threading
from typing import Any

import openai
import pytest
from tests.serving import stored

from dejakv_models.docs import make_document, prompt_of

DOCUMENT = make_document(random.Random(11), facts=20)
FACTS = DOCUMENT.facts


def question(number: int) -> str:
    from dejakv_models.docs import ask

    return ask(FACTS[number % len(FACTS)], random.Random(number))


def messages(text: str) -> list[Any]:
    return [{"role": "system", "content": DOCUMENT.text}, {"role": "user", "content": text}]


def test_chat_equals_completion_and_reports_usage(server: Any) -> None:
    client: openai.OpenAI = server.openai
    chat = client.chat.completions.create(model="docs-lm", messages=messages(question(0)), temperature=0, max_tokens=4)
    plain = client.completions.create(
        model="docs-lm", prompt=prompt_of(DOCUMENT.text, question(0)), temperature=0, max_tokens=4
    )
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage is not None
    assert plain.usage is not None
    assert plain.usage.prompt_tokens == chat.usage.prompt_tokens
    assert [m.id for m in client.models.list()] == ["docs-lm"]


def test_streaming_gives_the_same_text(server: Any) -> None:
    client: openai.OpenAI = server.openai
    ask: dict[str, Any] = {"model": "docs-lm", "messages": messages(question(1)), "temperature": 0, "max_tokens": 4}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    stored(server)
    pieces, usage = [], None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == whole
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_an_answer_that_the_limit_ends_says_length(server: Any) -> None:
    answer = server.openai.chat.completions.create(
        model="docs-lm", messages=messages(question(0)), temperature=0, max_tokens=1
    )
    assert answer.choices[0].finish_reason == "length"


def test_sixty_four_clients_get_the_serial_answers(server: Any) -> None:

    def ask(number: int) -> str:
        return server.openai.chat.completions.create(
            model="docs-lm", messages=messages(question(number % 16)), temperature=0, max_tokens=4,
            extra_body={"dejakv": {"reuse": "exact"}},
        ).choices[0].message.content or ""  # fmt: skip

    serial = [ask(number) for number in range(16)]
    answers: dict[int, str] = {}
    threads = [threading.Thread(target=lambda n=n: answers.__setitem__(n, ask(n))) for n in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[n] for n in range(64)] == [serial[n % 16] for n in range(64)]


def test_parts_of_free_order_are_arranged(server: Any) -> None:
    client: openai.OpenAI = server.openai
    sentences = tuple(" ".join(DOCUMENT.text.split(". ")[start : start + 8]) for start in (0, 8))

    def answered(texts: tuple[str, ...], **options: Any) -> Any:
        chat: list[Any] = [{"role": "system", "content": "\n".join(texts)}, {"role": "user", "content": question(3)}]
        body = {"dejakv": {"order": "free", "parts": texts, **options}}
        made = client.chat.completions.create(
            model="docs-lm", messages=chat, temperature=0, max_tokens=4, extra_body=body
        )
        stored(server)
        assert made.model_extra is not None
        return made.choices[0].message.content, made.model_extra["dejakv"]

    first, told = answered(sentences)
    assert told["order"] == []
    again, told = answered(sentences[::-1])
    assert (again, told["order"], told["reuse"], told["approximate"]) == (first, [1, 0], "exact", False)
    with pytest.raises(openai.BadRequestError, match="word for word"):
        answered((*sentences, "what does not stand there"), parts=[*sentences, "is not there"])
    with pytest.raises(openai.BadRequestError, match="needs the parts"):
        answered(sentences, parts=[])
