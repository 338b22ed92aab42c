# pyright: reportMissingImports=false
"""The answer cache as LangChain's cache of language models. Needs the package `langchain-core`.

It is set once, for all models of the process:

    from langchain_core.globals import set_llm_cache
    set_llm_cache(LangChainCache(AnswerCache("answers/")))
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.caches import BaseCache
from langchain_core.messages import message_to_dict, messages_from_dict
from langchain_core.outputs import ChatGeneration, Generation

from dejakv.answers.cache import AnswerCache, AnswerHit
from dejakv.answers.finished import is_finished, plain_text
from dejakv.identity import DEFAULT_PARTITION, digest_of
from dejakv.store.selection import Selection

log = logging.getLogger("dejakv.answers")

LABEL = "dejakv"
"""Entry of a cached generation's `generation_info`, and of its message's `response_metadata`."""

_REASONS = ("finish_reason", "stop_reason", "done_reason")


class LangChainCache(BaseCache):
    """Answers of LangChain's language and chat models, by prompt and `llm_string`.

    Of a chat, the text of the last message is compared, if a person wrote it; everything before it
    and the model's parameters must be equal. Every other prompt hits only if it is equal. Tool
    calls, answers without text and answers that did not come to a normal end are not stored. A hit
    says where it comes from in `generation_info["dejakv"]`, a chat's also in
    `response_metadata["dejakv"]`.

    Parameters
    ----------
    answers : AnswerCache
        The cache.
    partition : str
        Partition of all that goes through this object.
    """

    def __init__(self, answers: AnswerCache, *, partition: str = DEFAULT_PARTITION) -> None:
        self.answers = answers
        self.partition = partition

    def lookup(self, prompt: str, llm_string: str) -> list[Generation] | None:
        """Return the generations that are stored for a prompt, or for a similar one.

        Parameters
        ----------
        prompt : str
            A prompt, or a chat's messages as LangChain's JSON.
        llm_string : str
            The model and its parameters.

        Returns
        -------
        list[Generation] or None
            None for a miss.
        """
        question, rest, similar = _split(prompt)
        context = digest_of("langchain", llm_string, rest)
        hit = self.answers.get(question, partition=self.partition, context=context, similar=similar)
        return None if hit is None else _generations(hit)

    def update(self, prompt: str, llm_string: str, return_val: Sequence[Generation]) -> None:
        """Store the generations of a prompt, if all of them are finished answers.

        Parameters
        ----------
        prompt : str
            A prompt, or a chat's messages as LangChain's JSON.
        llm_string : str
            The model and its parameters.
        return_val : Sequence[Generation]
            What the model gave.
        """
        question, rest, similar = _split(prompt)
        if not return_val or not all(map(_is_answer, return_val)):
            return
        try:
            text = json.dumps([_plain(generation) for generation in return_val])
        except (TypeError, ValueError):
            log.debug("a generation with values that are no JSON is not stored")
            return
        context = digest_of("langchain", llm_string, rest)
        self.answers.put(question, text, partition=self.partition, context=context, similar=similar)

    def clear(self, **kwargs: Any) -> None:
        """Remove the answers of the partition.

        Parameters
        ----------
        **kwargs : Any
            Ignored.

        Raises
        ------
        StoreError
            If answers remain.
        """
        self.answers.invalidate(Selection(self.partition))


def _split(prompt: str) -> tuple[str, str, bool]:
    """Return the text to compare, all the rest, and whether similar texts may stand in for it."""
    try:
        messages = json.loads(prompt)
    except ValueError:
        # The prompt of a language model, as it is.
        return prompt, "", True

    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or not isinstance(last.get("kwargs"), dict):
        return prompt, "json", False
    content = last["kwargs"].get("content")
    parts: Sequence[Any] = content if isinstance(content, list) else ()
    holder, key = last["kwargs"], "content"
    if len(parts) == 1 and isinstance(parts[0], dict) and parts[0].get("type") == "text":
        holder, key = parts[0], "text"

    text = holder.get(key)
    if last.get("id", [""])[-1] != "HumanMessage" or not isinstance(text, str):
        return prompt, "json", False
    holder[key] = ""
    return text, json.dumps(messages, sort_keys=True), True


def _is_answer(generation: Generation) -> bool:
    """Return whether a generation has text, no tool call, and no sign of another end."""
    reported: list[Mapping[str, Any]] = [generation.generation_info or {}]
    fields: dict[str, Any] = {"content": generation.text}
    if isinstance(generation, ChatGeneration):
        message = generation.message
        reported.append(message.response_metadata)
        fields |= message.additional_kwargs
        for name in ("tool_calls", "invalid_tool_calls"):
            fields[name] = getattr(message, name, None) or fields.get(name)
        if isinstance(message.content, list):
            # A block of another kind (a refusal, a tool's use) is more than text.
            fields["refusal"] = fields.get("refusal") or any(
                isinstance(block, dict) and block.get("type") != "text" for block in message.content
            )

    # Many models report no reason at all.
    reasons = [about[name] for about in reported for name in _REASONS if about.get(name)]
    return bool(plain_text(fields)) and all(map(is_finished, reasons))


def _plain(generation: Generation) -> dict[str, Any]:
    plain: dict[str, Any] = {"text": generation.text, "info": generation.generation_info}
    if isinstance(generation, ChatGeneration):
        plain["message"] = message_to_dict(generation.message)
    return plain


def _generations(hit: AnswerHit) -> list[Generation]:
    generations: list[Generation] = []
    for plain in json.loads(hit.answer):
        info = {**(plain["info"] or {}), LABEL: hit.label}
        if "message" not in plain:
            generations.append(Generation(text=plain["text"], generation_info=info))
            continue
        (message,) = messages_from_dict([plain["message"]])
        message.response_metadata = {**message.response_metadata, LABEL: hit.label}
        generations.append(ChatGeneration(message=message, generation_info=info))
    return generations
