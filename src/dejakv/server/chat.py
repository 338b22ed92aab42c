"""From chat messages to a prompt, its pictures and the text that the levels compare."""

from dataclasses import dataclass
from typing import Any

from dejakv.errors import InputError
from dejakv.server.schemas import Message


@dataclass(frozen=True)
class Conversation:
    """Messages in the form of chat templates, the text of each part, and the URLs of their pictures in order."""

    messages: list[dict[str, Any]]
    texts: list[str]
    pictures: list[str]


def conversation(messages: list[Message]) -> Conversation:
    """Raises InputError for messages without text, or a part without its picture."""
    plain: list[dict[str, Any]] = []
    texts: list[str] = []
    pictures: list[str] = []
    for message in messages:
        if isinstance(message.content, str):
            plain.append({"role": message.role, "content": message.content})
            texts.append(f"{message.role}: {message.content}")
            continue
        parts: list[dict[str, Any]] = []
        for part in message.content:
            if part.type == "text":
                parts.append({"type": "text", "text": part.text or ""})
                texts.append(f"{message.role}: {part.text or ''}")
            elif part.image_url is None:
                raise InputError("a part of type image_url has no url: give {'image_url': {'url': ...}}")
            else:
                pictures.append(part.image_url.url)
                parts.append({"type": "image"})
        if all(part["type"] == "text" for part in parts):
            plain.append({"role": message.role, "content": " ".join(part["text"] for part in parts)})
        else:
            plain.append({"role": message.role, "content": parts})
    if not any(text.partition(": ")[2].strip() for text in texts):
        raise InputError("the messages have no text: send a text")
    return Conversation(plain, texts, pictures)


def render(asked: Conversation, templates: Any) -> tuple[str, str]:
    """`(prompt, chunk)`. The chunk is the whole conversation: the same last question in another conversation is another
    request.

    Raises: InputError for a model without a chat template, or messages it cannot render.
    """
    if not getattr(templates, "chat_template", None):
        raise InputError("this model has no chat template: use /v1/completions")
    try:
        prompt = templates.apply_chat_template(asked.messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything for unknown roles
        raise InputError(
            f"the model's chat template cannot render these messages ({error}): change their roles or order, or use /v1/completions"
        ) from error
    return str(prompt), "\n".join(asked.texts)
