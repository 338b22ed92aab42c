"""Adopt for vLLM's OpenAI server: an ASGI middleware that rewrites a prompt to a similar earlier one before tokenization.

    DEJAKV_ADOPT='{"similarity_threshold": 0.9}' DEJAKV_API_KEYS=key-of-one,key-of-two \\
    python -m vllm.entrypoints.openai.api_server --model ... --middleware dejakv.engines.vllm.middleware.AdoptMiddleware

The partition comes from the key that is authenticated here and from nothing else: the body's `cache_salt` is replaced by it,
and `uuid`s of media are taken out. The client is told in `x-dejakv-*` headers whose prompt was run. Of a request with the header `Cache-Control: no-store` nothing is kept.
"""

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from dejakv.api_keys import SECRET, VARIABLE, ApiKeys, bearer_key
from dejakv.config import SemanticCacheConfig
from dejakv.engines.vllm.adopt import Adopter, Asked, Provenance
from dejakv.engines.vllm.asgi import answer, refuse, replay, with_length
from dejakv.engines.vllm.bodies import Limits, Refused, header, headers, read_object, written
from dejakv.engines.vllm.embeddings import InputEmbeddings
from dejakv.engines.vllm.front_attempt import Attempt
from dejakv.engines.vllm.front_bound import FrontBound
from dejakv.engines.vllm.front_facts import served_by
from dejakv.engines.vllm.openai_body import asked_of, own, unkept, wish_of, with_text, with_wish
from dejakv.engines.vllm.routes import ADOPTING, CLIENT, Audience, audience, route_path
from dejakv.errors import ConfigError
from dejakv.retention import asks_no_store

log = logging.getLogger("dejakv.vllm")

TRUST = ("GET", "/dejakv/trust")
"""The operator's route that tells what is known of the error bound."""


class AdoptMiddleware:
    """Settings come from the environment, since vLLM makes the middleware without arguments.

    DEJAKV_ADOPT      JSON: settings of `SemanticCacheConfig` (similarity_threshold, index_encoder, ...), `max_donors`, `mode`
                      (for requests that ask for nothing: `adopt`, `blend`, which is the connector's, or `off`), and `model`, a folder,
                      for index_encoder `model`. With `error_bound` the front bounds its own adopting and the connector's blends
    DEJAKV_API_KEYS, DEJAKV_API_KEYS_FILE
                      keys separated by commas, and a file with one a line; a client must bring one. Without them there is one
                      partition, and every route is open
    DEJAKV_OPERATOR_KEY
                      opens the routes that are not for clients (`routes`), where keys are required

    Raises ConfigError for settings that do not fit, and for lists of keys without a key.
    """

    def __init__(
        self,
        app: Any,
        adopter: Adopter | None = None,
        api_keys: Sequence[str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        values = json.loads(os.environ.get("DEJAKV_ADOPT") or "{}")
        if not isinstance(values, dict):
            raise ConfigError("DEJAKV_ADOPT is no JSON object: give {} or settings such as similarity_threshold")
        values = cast(dict[str, Any], values)
        self.mode = values.pop("mode", "adopt")
        if self.mode not in ("adopt", "blend", "off"):
            raise ConfigError(f"DEJAKV_ADOPT: mode {self.mode!r} is unknown: choose adopt, blend or off")
        donors, model = values.pop("max_donors", 10_000), values.pop("model", None)
        self.app = app
        file, operator = os.environ.get(f"{VARIABLE}_FILE"), os.environ.get("DEJAKV_OPERATOR_KEY")
        self.keys = (
            ApiKeys.load(os.environ.get(VARIABLE), None if file is None else Path(file), os.environ.get(SECRET))
            if api_keys is None
            else ApiKeys(api_keys)
        )
        self.operator = None if operator is None else ApiKeys([operator])
        self.limits = limits or Limits()
        self.bound: FrontBound | None = None
        if adopter is None:
            config = SemanticCacheConfig.from_dict({"reuse": "adopt", **values})
            self.bound = FrontBound(config) if config.error_bound is not None else None
            judge = self.bound.bounded if self.bound is not None else None
            adopter = Adopter(config, donors, _embeddings(model), bounded=judge)
        self.adopter = adopter

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, _living(self.bound, scope, receive), send)
            return
        try:
            who = audience(scope)
            partition = self._partition(scope, who)
            if self.bound is not None and (scope.get("method"), route_path(scope)) == TRUST:
                await answer(send, 200, await asyncio.to_thread(self.bound.report))
                return
            if who != "client":
                await self.app(scope, receive, send)
                return
            body = await read_object(scope, receive, self.limits)
            no_store = asks_no_store(headers(scope, b"cache-control"))
            asked, note, attempt = await self._rewrite(body, str(partition), scope, no_store)
            if no_store:
                unkept(body, str(partition))
            raw = written(body)
        except Refused as error:
            await refuse(scope, send, error)
            return
        noting = self._noting(send, asked, note, attempt)
        await self._run(with_length(scope, len(raw)), replay(raw, receive), noting)

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:
        if self.bound is None:
            await self.app(scope, receive, send)
            return
        self.bound.begin()
        try:
            await self.app(scope, receive, send)
        finally:
            self.bound.end(self.app)

    async def _rewrite(
        self, body: dict[str, Any], partition: str, scope: Any, no_store: bool
    ) -> tuple[Asked | None, Provenance, Attempt | None]:
        """Changes the body in place. Raises Refused."""
        wished, adopting = wish_of(body), route_path(scope) in ADOPTING
        problem = own(body, partition, exact=self.bound is not None)
        if problem:
            raise Refused(400, problem)
        if not adopting:
            return None, Provenance(reason="adopt is not for this path"), None
        attempt = Attempt(self.bound, scope, body, partition) if self.bound is not None else None
        mode = wished.get("mode", self.mode)
        if mode == "blend":
            return None, Provenance(reason=self._blend(body, attempt, no_store) or "mode is blend"), attempt
        asked, note = await self._adopt(body, partition, mode, no_store)
        if attempt is not None and note.decision is not None and not no_store:
            attempt.adopting(note.decision)
        if note.method == "adopt":
            with_text(body, note.prompt)
        return asked, note, attempt

    @staticmethod
    def _blend(body: dict[str, Any], attempt: Attempt | None, no_store: bool) -> str:
        """Asks the connector for a blend. Returns why it is not, empty if it is."""
        if attempt is None:
            with_wish(body, {"mode": "blend", **wish_of(body)})
            return ""
        if no_store:
            with_wish(body, {**wish_of(body), "no_store": True})
        return attempt.blending()

    async def _adopt(
        self, body: dict[str, Any], partition: str, mode: Any, no_store: bool
    ) -> tuple[Asked | None, Provenance]:
        """Looks for a prompt to run in this one's place."""
        wish = wish_of(body)
        if wish.get("mode") == "adopt":  # the connector behind us knows nothing of it
            with_wish(body, _without_adopt(wish))
        if mode != "adopt":
            return None, Provenance(reason=f"mode is {mode}")
        problem = _problem(wish)
        if problem:
            return None, Provenance(reason=problem)
        if body.get("prompt_logprobs") is not None:
            return None, Provenance(reason="prompt_logprobs are of the very prompt that is sent")
        asked = asked_of(body, partition)
        if isinstance(asked, str):
            return None, Provenance(reason=asked)
        asked = replace(
            asked,
            threshold=wish.get("threshold"),
            donor=wish.get("donor"),
            no_store=no_store or bool(wish.get("no_store", False)),
        )
        _, note = await asyncio.to_thread(self.adopter.find, asked)
        return asked, note

    def _noting(self, send: Any, asked: Asked | None, note: Provenance, attempt: Attempt | None) -> Any:
        """Adds the headers; a prompt whose answer was complete becomes a donor."""
        status = 0

        async def noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", []), *_headers(note)]}
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if last and status == 200 and asked is not None:
                # In a thread and not waited for: whoever wraps this application may cancel it once the answer is out.
                asyncio.get_running_loop().run_in_executor(None, self._learn, asked, note)
            if attempt is not None:
                await attempt.heard(message)
            await send(message)

        return noting

    def _learn(self, asked: Asked, note: Provenance) -> None:
        try:
            self.adopter.learn(asked, note)
        except Exception:
            log.exception("a prompt could not be remembered as a donor")

    def _partition(self, scope: Any, who: Audience) -> str | None:
        """The partition of a client's key. Raises Refused for a request that needs a key and brings no known one; what it asks
        for is not looked at before."""
        if who == "everybody":
            return None
        if who == "client":
            partition = self.keys.partition_of(_key(scope))
            if partition is None:
                raise Refused(401, "no known API key: send one as 'Authorization: Bearer ...'")
            return partition
        if self.keys.required and not self._is_operator(scope):
            raise Refused(
                403,
                f"{route_path(scope)} is not for clients where API keys are required: send the key that"
                " DEJAKV_OPERATOR_KEY holds, or use one of " + ", ".join(sorted(CLIENT)),
            )
        return None

    def _is_operator(self, scope: Any) -> bool:
        return self.operator is not None and self.operator.partition_of(_key(scope)) is not None


def _key(scope: Any) -> str | None:
    """The key of an `Authorization: Bearer` or, as Anthropic's clients send it, an `x-api-key` header; with both, none."""
    bearer, plain = header(scope, b"authorization"), header(scope, b"x-api-key")
    return None if bearer is not None and plain is not None else bearer_key(bearer) or plain


def _problem(wish: Mapping[str, Any]) -> str:
    """What is wrong with a request's own choice, empty if nothing is."""
    unknown = sorted(str(name) for name in set(wish) - {"mode", "threshold", "no_store", "donor"})
    if unknown:
        return f"unknown field {unknown[0]!r}: a request chooses mode, threshold, no_store and donor"
    threshold = wish.get("threshold")
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if threshold is not None and not (number and -1.0 <= threshold <= 1.0):
        return f"threshold {threshold!r} is no cosine: give a number from -1 to 1"
    if not isinstance(wish.get("no_store", False), bool):
        return "no_store is neither true nor false"
    return "" if isinstance(wish.get("donor"), str | None) else "donor is no string"


def _without_adopt(wish: Mapping[str, Any]) -> dict[str, Any]:
    left = {name: value for name, value in wish.items() if name == "no_store" and isinstance(value, bool)}
    return {"mode": "exact", **left}


def _headers(note: Provenance) -> list[tuple[bytes, bytes]]:
    values = {"method": note.method, "level": note.level, "donor": note.donor, "reason": note.reason}
    if note.score is not None:
        values["score"] = f"{note.score:.4f}"
    return [
        (f"x-dejakv-{name}".encode(), quote(value, safe=" :;,.'()%/=").encode())
        for name, value in values.items()
        if value
    ]


def _embeddings(model: str | None) -> InputEmbeddings | None:
    if model is None:
        return None
    from transformers import AutoTokenizer

    return InputEmbeddings(Path(model), AutoTokenizer.from_pretrained(model), f"input:{model}")


def _living(bound: FrontBound | None, scope: Any, receive: Any) -> Any:
    """Reads what is served before the application starts, and ends the labels as it shuts down."""
    if bound is None:
        return receive

    async def living() -> Any:
        message = await receive()
        if message["type"] == "lifespan.startup" and "app" in scope:
            bound.served = await asyncio.to_thread(served_by, scope["app"])
        elif message["type"] == "lifespan.shutdown":
            await bound.close()
        return message

    return living
