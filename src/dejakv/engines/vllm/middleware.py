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
from dejakv.cache_control import asks_no_store
from dejakv.config import SemanticCacheConfig
from dejakv.engines.vllm.adopt import Adopter, Asked, Provenance
from dejakv.engines.vllm.bodies import Limits, Refused, header, headers, read_object, written
from dejakv.engines.vllm.embeddings import InputEmbeddings
from dejakv.engines.vllm.openai_body import asked_of, own, unkept, with_text
from dejakv.engines.vllm.routes import ADOPTING, CLIENT, Audience, audience, route_path
from dejakv.errors import ConfigError

log = logging.getLogger("dejakv.vllm")


class AdoptMiddleware:
    """Settings come from the environment, since vLLM makes the middleware without arguments.

    DEJAKV_ADOPT      JSON: settings of `SemanticCacheConfig` (similarity_threshold, index_encoder, ...), `max_donors`, `mode`
                      (`adopt`: for requests that ask for nothing, or `off`), and `model`, a folder, for index_encoder `model`
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
        if self.mode not in ("adopt", "off"):
            raise ConfigError(f"DEJAKV_ADOPT: mode {self.mode!r} is unknown: choose adopt or off")
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
        if adopter is None:
            config = SemanticCacheConfig.from_dict({"reuse": "adopt", **values})
            adopter = Adopter(config, donors, _embeddings(model))
        self.adopter = adopter

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            who = audience(scope)
            partition = self._partition(scope, who)
            if who != "client":
                await self.app(scope, receive, send)
                return
            body = await read_object(scope, receive, self.limits)
            no_store = asks_no_store(headers(scope, b"cache-control"))
            asked, note = await self._rewrite(body, str(partition), route_path(scope) in ADOPTING, no_store)
            if no_store:
                unkept(body, str(partition))
            raw = written(body)
        except Refused as error:
            await _refuse(scope, send, error)
            return
        await self.app(_with_length(scope, len(raw)), _replay(raw, receive), self._noting(send, asked, note))

    async def _rewrite(
        self, body: dict[str, Any], partition: str, adopting: bool, no_store: bool
    ) -> tuple[Asked | None, Provenance]:
        """Changes the body in place. Raises Refused."""
        problem = own(body, partition)
        if problem:
            raise Refused(400, problem)
        if not adopting:
            return None, Provenance(reason="adopt is not for this path")
        params = body.get("kv_transfer_params")
        wish = params.get("dejakv") if isinstance(params, dict) else None
        wish = wish if isinstance(wish, dict) else {}
        mode = wish.get("mode", self.mode)
        if wish.get("mode") == "adopt":  # the connector behind us knows nothing of it
            body["kv_transfer_params"] = {**cast(dict[str, Any], params), "dejakv": _without_adopt(wish)}
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
        text, note = await asyncio.to_thread(self.adopter.find, asked)
        if note.method == "adopt":
            with_text(body, text)
        return asked, note

    def _noting(self, send: Any, asked: Asked | None, note: Provenance) -> Any:
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


def _replay(raw: bytes, receive: Any) -> Any:
    sent = False

    async def replay() -> Any:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return replay


def _with_length(scope: Any, length: int) -> Any:
    ours = {b"content-length", b"content-type", b"transfer-encoding"}
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in ours]
    headers += [(b"content-length", str(length).encode()), (b"content-type", b"application/json")]
    return {**scope, "headers": headers}


async def _refuse(scope: Any, send: Any, refused: Refused) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": str(refused)[:120]})
        return
    error = {"message": str(refused), "type": "invalid_request_error", "code": refused.status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"connection", b"close")]  # the rest of a body may still be on its way
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
