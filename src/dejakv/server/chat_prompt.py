"""Conversion of chat messages into a prompt, its pictures and the text that the levels compare.

Pictures are data URLs only, so that a request cannot make the server fetch anything.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest

from dejakv.errors import InputError
from dejakv.http.errors import ClientGoneError
from dejakv.pictures import check_picture
from dejakv.request import Media
from dejakv.server.schemas import ChatMessage, ContentPart
from dejakv.server.settings import ServerSettings


@dataclass(frozen=True)
class ChatConversation:
    """Chat messages, taken apart.

    Attributes
    ----------
    messages : list[dict[str, Any]]
        The messages in the form of chat templates.
    texts : list[str]
        The text of each part, behind its speaker.
    pictures : list[str]
        URLs of the pictures, in order.
    """

    messages: list[dict[str, Any]]
    texts: list[str]
    pictures: list[str]


def conversation(messages: list[ChatMessage]) -> ChatConversation:
    """Convert the messages of a request.

    Raises
    ------
    InputError
        For messages without text, or a part without its picture.
    """
    chat = ChatConversation([], [], [])
    for message in messages:
        content = message.content
        parts: list[dict[str, Any]] = []
        # Some templates show it.
        name = {"name": message.name} if message.name else {}
        speaker = f"{message.role} {message.name}" if message.name else message.role

        for part in (
            [ContentPart(type="text", text=content)] if isinstance(content, str) else content
        ):
            if part.type == "text":
                parts.append({"type": "text", "text": part.text or ""})
                chat.texts.append(f"{speaker}: {part.text or ''}")
            elif part.image_url is None:
                raise InputError(
                    "a part of type image_url has no url: give {'image_url': {'url': ...}}"
                )
            else:
                parts.append({"type": "image"})
                chat.pictures.append(part.image_url.url)

        # Templates of text models take a text, and no list of parts.
        only_text = all(part["type"] == "text" for part in parts)
        plain = " ".join(part["text"] for part in parts) if only_text else parts
        chat.messages.append({"role": message.role, **name, "content": plain})

    # Behind the speaker's name, which is there for an empty message too.
    if not any(text.partition(": ")[2].strip() for text in chat.texts):
        raise InputError("the messages have no text: send a text")

    return chat


def render(chat: ChatConversation, templates: Any) -> tuple[str, str]:
    """Render a conversation by the model's chat template.

    Returns
    -------
    prompt : str
        The rendered prompt.
    chunk : str
        The text that levels compare: the whole conversation, because the same last question in
        another conversation is another request.

    Raises
    ------
    InputError
        For a model without a chat template, or messages that it cannot render.
    """
    if not getattr(templates, "chat_template", None):
        raise InputError("this model has no chat template: use /v1/completions")
    try:
        prompt = templates.apply_chat_template(
            chat.messages, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:
        # A template may raise anything for unknown roles.
        raise InputError(
            f"the model's chat template cannot render these messages ({error}): change their "
            "roles or order, or use /v1/completions"
        ) from error

    return str(prompt), "\n".join(chat.texts)


async def pictures_of(
    http: HttpRequest, urls: Sequence[str], settings: ServerSettings
) -> tuple[Media, ...]:
    """Decode the pictures of a request, one after another off the event loop.

    Raises
    ------
    InputError
        For too many pictures or pixels, or an invalid picture.
    ClientGoneError
        If the client disconnects.
    """
    if len(urls) > settings.max_pictures:
        raise InputError(
            f"{len(urls)} pictures in one request: this server accepts {settings.max_pictures} "
            "(DEJAKV_MAX_PICTURES): send fewer"
        )

    pictures: list[Media] = []
    total = 0
    for url in urls:
        # Decoding is the costly step, and nobody may be waiting any more.
        if await http.is_disconnected():
            raise ClientGoneError
        media, pixels = await run_in_threadpool(picture_of, url)
        total += pixels
        if total > settings.max_request_pixels:
            raise InputError(
                f"the pictures of one request have more than {settings.max_request_pixels:,} "
                "pixels together "
                "(DEJAKV_MAX_REQUEST_PIXELS): send fewer or smaller ones"
            )

        pictures.append(media)

    return tuple(pictures)


def picture_of(url: str) -> tuple[Media, int]:
    """Decode a picture from a `data:image/...;base64,` URL; return it and its number of pixels.

    Raises
    ------
    InputError
        For any other URL or file.
    """
    head, comma, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise InputError(
            "the server fetches no images: send them as data URLs (data:image/png;base64,...)"
        )

    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(
            f"the image's base64 is damaged ({error}): encode the file again"
        ) from error

    return check_picture(raw, "the image of the message")
