"""One client's request under a front's error bound: what it may be given, and the draw for its label."""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any, cast

from dejakv.engines.vllm.front_bound import FrontBound
from dejakv.engines.vllm.label_requests import Both, of_adopted, of_blended, told_in
from dejakv.engines.vllm.limits import Would
from dejakv.engines.vllm.openai_body import wish_of, with_wish
from dejakv.errors import InputError
from dejakv.find.decision import Decision
from dejakv.request import Request
from dejakv.trust.draw import Draw

log = logging.getLogger("dejakv.trust")


class Attempt:
    """Told of the request before it runs, and of its response. `body` is the client's own, already the partition's."""

    def __init__(self, bound: FrontBound, scope: Mapping[str, Any], body: dict[str, Any], partition: str) -> None:
        self._bound = bound
        self._scope = scope
        self._body = body
        self._partition = partition
        self._draw: Draw | None = None
        self._response: bytearray | None = None
        self._status = 0

    def adopting(self, decision: Decision) -> None:
        """The front's own lookup was made; its draw waits from now on, whatever the client does."""
        trial = decision.trial
        if trial is not None and trial.draw is not None:
            self._draw = trial.draw
            tokens, lowest = self._bound.audits.differs.tokens, self._bound.served.priority
            if trial.draw.labelled:
                both = of_adopted(self._scope, self._body, trial.plan.donors[0].prompt, tokens, lowest)
                self._note(trial.draw, both)

    def blending(self) -> str:
        """Has the connector blend within the bound, in the body; or why it cannot, and the request is run exactly."""
        body, wish = self._body, wish_of(self._body)
        why = _not_told(body)
        if why or wish.get("no_store"):
            with_wish(body, {**wish, "mode": "exact"})
            return why or "nothing of this request is kept, so that its answer could not be checked"
        limit = self._bound.limit(str(body.get("model", "")), self._partition)
        with_wish(body, {**wish, "mode": "blend", "limit": vars(limit)})
        self._response = bytearray()
        return ""

    async def heard(self, message: Mapping[str, Any]) -> None:
        """A part of the response, before the client gets it."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        if message["type"] != "http.response.body":
            return
        if self._response is not None and self._status == 200:
            self._response += message.get("body", b"")
        if message.get("more_body", False):
            return
        if self._response is not None and self._status == 200:
            await asyncio.to_thread(self._blended, bytes(self._response))
        elif self._draw is not None and self._status != 200:  # vLLM refused it: nothing was answered
            self._bound.audits.answered(self._draw, None, approximate=not self._draw.served)

    def _blended(self, raw: bytes) -> None:
        """Draws for the blend that the connector made or would have made. The draw knows nothing of the answer."""
        try:
            told = told_in(json.loads(raw))
            would = Would.read(told.get("would"))
        except (ValueError, KeyError, TypeError, AttributeError):
            log.warning("a response could not be read, and its blend is not labelled", exc_info=True)
            return
        if would is None:
            return
        bound, model = self._bound, str(self._body.get("model", ""))
        bound.learn_class(model, would)
        draw = bound.gate.draw(
            partition=self._partition,
            epoch=would.epoch,
            method="blend",
            setting=would.setting,
            features=would.features,
        )
        if draw.labelled:
            tokens, lowest = bound.audits.differs.tokens, bound.served.priority
            self._note(draw, of_blended(self._scope, self._body, would, tokens, lowest))
            bound.audits.answered(draw, None, approximate=bool(told.get("approximate")))

    def _note(self, draw: Draw, both: Both) -> None:
        try:
            request = Request(id="", prompt=_text(both.full), chunk=json.dumps(both.full), partition=self._partition)
        except InputError:  # a text that no request of ours may hold
            request = Request(id="", prompt="", chunk=json.dumps(both.full), partition=self._partition)
        self._bound.audits.note(draw, request, draw.cls.epoch, both)


def _not_told(body: Mapping[str, Any]) -> str:
    """Why the connector could not say in the response what it did; empty if it can."""
    if body.get("stream"):
        return "a stream does not tell what a blend was, so that the error bound could not learn from it"
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not all(type(token) is int for token in cast(list[Any], prompt))
    return "several prompts in one request" if several else ""


def _text(body: Mapping[str, Any]) -> str:
    """The prompt, for a function that says what a wrong answer is: a text, or the last message."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt
    messages = body.get("messages")
    last = cast(list[Any], messages)[-1] if isinstance(messages, list) and messages else prompt
    content = cast(dict[str, Any], last).get("content") if isinstance(last, dict) else last
    return content if isinstance(content, str) else json.dumps(content)
