# pyright: reportMissingImports=false
"""The answer cache as LiteLLM's cache. Needs the package `litellm`.

It is set once, for all calls of the process:

    import litellm
    litellm.cache = LiteLLMCache(AnswerCache("answers/"))
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from litellm.caching.caching import Cache, CacheMode
from pydantic import BaseModel

from dejakv.adopt.openai_body import adopt_request_of, remote_media
from dejakv.answers.cache import AnswerCache
from dejakv.answers.finished import finished_text
from dejakv.errors import DejaKVError
from dejakv.identity import DEFAULT_PARTITION, digest_of

log = logging.getLogger("dejakv.answers")

LABEL = "dejakv"
"""Field of a cached response with the origin of its answer."""

CALLS = ["completion", "acompletion", "text_completion", "atext_completion"]


@dataclass(frozen=True)
class _Place:
    question: str
    partition: str
    context: str
    similar: bool


class LiteLLMCache(Cache):
    """Answers of LiteLLM's completions, by the last message's text and all other parameters.

    Earlier messages, tools, model and sampling must be equal, as LiteLLM's own key has them. Where
    the last message is not a text of the user's, the whole conversation must be. Pictures at
    addresses are not cached, since what is there may change. Errors, tool calls, refusals and
    answers that did not come to a normal end are not stored. A hit says where it comes from in the
    response's field `dejakv`; a streamed answer has none, so that equal questions alone hit there.
    LiteLLM's `cache={"ttl": ..., "s-maxage": ..., "no-cache": ...,
    "no-store": ..., "use-cache": ...}` of a call hold here, too.

    Parameters
    ----------
    answers : AnswerCache
        The cache.
    partition : Callable[[Mapping[str, Any]], str], optional
        Partition of a call by its keyword arguments. None takes the key of LiteLLM's proxy
        (`metadata["user_api_key"]`), else one for all.
    mode : CacheMode
        Whether all calls are cached, or those that ask for it.
    """

    def __init__(
        self,
        answers: AnswerCache,
        *,
        partition: Callable[[Mapping[str, Any]], str] | None = None,
        mode: CacheMode = CacheMode.default_on,
    ) -> None:
        super().__init__(mode=mode, supported_call_types=CALLS)  # pyright: ignore
        self.answers = answers
        self.partition = partition or _key_of_proxy

    def get_cache(self, dynamic_cache_object: Any = None, **kwargs: Any) -> Any:
        """Return the response that is stored for a call, or for a similar one.

        One that is older than the call's `s-maxage` (seconds) is a miss. An error of the cache is
        logged, and is a miss too.

        Parameters
        ----------
        dynamic_cache_object : Any
            Ignored.
        **kwargs : Any
            Arguments of the call, by name.

        Returns
        -------
        dict or None
            The response in OpenAI's form, with the label; None for a miss.
        """
        place = self._place(kwargs)
        if place is None:
            return None
        try:
            hit = self.answers.get(
                place.question,
                partition=place.partition,
                context=place.context,
                similar=place.similar,
            )
        except DejaKVError as error:
            # Like LiteLLM's caches, this one stops no call.
            log.error("%s", error)
            return None

        controls = kwargs.get("cache") or {}
        max_age = controls.get("s-maxage", controls.get("s-max-age"))
        if hit is None or (max_age is not None and hit.age > max_age):
            return None
        return {**json.loads(hit.answer), LABEL: hit.label}

    async def async_get_cache(self, dynamic_cache_object: Any = None, **kwargs: Any) -> Any:
        """Run `get_cache` in a thread.

        Parameters
        ----------
        dynamic_cache_object : Any
            Ignored.
        **kwargs : Any
            Arguments of the call, by name.

        Returns
        -------
        dict or None
            The response in OpenAI's form, with the label; None for a miss.
        """
        return await asyncio.to_thread(self.get_cache, **kwargs)

    def add_cache(self, result: Any, **kwargs: Any) -> None:
        """Store the response of a call, if it is a finished answer.

        An error of the cache is logged, and stops no call.

        Parameters
        ----------
        result : Any
            The response, an object or its JSON.
        **kwargs : Any
            Arguments of the call, by name.
        """
        place = self._place(kwargs)
        if place is None:
            return
        try:
            body = result.model_dump() if isinstance(result, BaseModel) else json.loads(result)
            text = json.dumps(body)
        except (TypeError, ValueError):
            return
        if finished_text(body) is None:
            return

        controls = kwargs.get("cache") or {}
        try:
            self.answers.put(
                place.question,
                text,
                partition=place.partition,
                context=place.context,
                ttl=controls.get("ttl"),
                similar=place.similar,
            )
        except DejaKVError as error:
            log.error("%s", error)

    async def async_add_cache(
        self, result: Any, dynamic_cache_object: Any = None, **kwargs: Any
    ) -> None:
        """Run `add_cache` in a thread.

        Parameters
        ----------
        result : Any
            The response, an object or its JSON.
        dynamic_cache_object : Any
            Ignored.
        **kwargs : Any
            Arguments of the call, by name.
        """
        await asyncio.to_thread(self.add_cache, result, **kwargs)

    def _place(self, kwargs: Mapping[str, Any]) -> _Place | None:
        """Return where a call's answer belongs; None if the call is not cached."""
        if not self.should_use_cache(**kwargs):
            return None
        name = next((name for name in ("messages", "prompt") if kwargs.get(name)), None)
        if name is None:
            return None
        try:
            # A copy: the caller's messages may be objects, and must not change.
            body = json.loads(json.dumps({name: kwargs[name]}, default=_dumped))
        except (TypeError, ValueError):
            return None
        if remote_media(body):
            return None

        # LiteLLM's own key of all other parameters.
        left_out = (name, "cache_key", "litellm_params", "preset_cache_key")
        others = {key: value for key, value in kwargs.items() if key not in left_out}
        key, partition = self.get_cache_key(**others), self.partition(kwargs)

        varying = adopt_request_of(body, partition)
        if isinstance(varying, str):
            # Nothing may stand in for it: the whole must be equal.
            whole = json.dumps(body, sort_keys=True)
            return _Place(whole, partition, digest_of("litellm", key, "whole"), similar=False)
        context = digest_of("litellm", key, varying.context)
        # The pieces of a streamed answer have no field for its origin.
        return _Place(varying.text, partition, context, similar=not kwargs.get("stream"))


def _key_of_proxy(kwargs: Mapping[str, Any]) -> str:
    """Return the proxy's key of a call, from where LiteLLM notes it."""
    params = kwargs.get("litellm_params") or {}
    for source in (kwargs, params):
        for name in ("metadata", "litellm_metadata"):
            if key := (source.get(name) or {}).get("user_api_key"):
                return str(key)
    return DEFAULT_PARTITION


def _dumped(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    raise TypeError(f"{type(value).__name__} is no JSON")
