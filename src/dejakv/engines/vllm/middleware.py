"""Adopt for vLLM's OpenAI server: an ASGI middleware that rewrites a prompt to a similar earlier one before tokenization.

    DEJAKV_ADOPT='{"similarity_threshold": 0.9}' DEJAKV_API_KEYS=key-of-one,key-of-two \\
    python -m vllm.entrypoints.openai.api_server --model ... --middleware dejakv.engines.vllm.middleware.AdoptMiddleware

The partition comes from the key that is authenticated here and from nothing else: the body's `cache_salt` is replaced by it,
and `uuid`s of media are taken out. The client is told in `x-dejakv-*` headers whose prompt was run.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from dejakv.config import SemanticCacheConfig
from dejakv.engines.vllm.adopt import Adopter, Asked, Provenance
from dejakv.engines.vllm.embeddings import InputEmbeddings
from dejakv.engines.vllm.openai_body import asked_of, strip_uuids, with_text
from dejakv.errors import ConfigError
from dejakv.identity import digest_of

log = logging.getLogger("dejakv.vllm")

PATHS = ("/v1/chat/completions", "/v1/completions")
MAX_BODY = 64 * 1024**2


class AdoptMiddleware:
    """Settings come from the environment, since vLLM makes the middleware without arguments.

    DEJAKV_ADOPT      JSON: settings of `SemanticCacheConfig` (similarity_threshold, index_encoder, ...), `max_donors`, `mode`
                      (`adopt`: for requests that ask for nothing, or `off`), and `model`, a folder, for index_encoder `model`
    DEJAKV_API_KEYS   keys separated by commas; a request must bring one as a bearer token. Without it there is one partition
    """

    def __init__(self, app: Any, adopter: Adopter | None = None, api_keys: tuple[str, ...] | None = None) -> None:
        values = json.loads(os.environ.get("DEJAKV_ADOPT") or "{}")
        if not isinstance(values, dict):
            raise ConfigError("DEJAKV_ADOPT is no JSON object: give {} or settings such as similarity_threshold")
        values = cast(dict[str, Any], values)
        self.mode = values.pop("mode", "adopt")
        if self.mode not in ("adopt", "off"):
            raise ConfigError(f"DEJAKV_ADOPT: mode {self.mode!r} is unknown: choose adopt or off")
        donors, model = values.pop("max_donors", 10_000), values.pop("model", None)
        self.app = app
        self.keys = tuple(os.environ.get("DEJAKV_API_KEYS", "").split(",")) if api_keys is None else api_keys
        self.keys = tuple(key for key in self.keys if key)
        if adopter is None:
            config = SemanticCacheConfig.from_dict({"reuse": "adopt", **values})
            adopter = Adopter(config, donors, _embeddings(model))
        self.adopter = adopter

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self.app(scope, receive, send)
            return
        partition = self._partition(scope)
        if partition is None:
            await _refuse(send, 401, "no known API key: send one as 'Authorization: Bearer ...'")
            return
        raw = await _body(receive)
        if raw is None:
            await _refuse(send, 413, f"the body is larger than {MAX_BODY} bytes")
            return
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            await self.app(scope, _replay(raw, receive), send)  # vLLM says what is wrong with it
            return
        body = cast(dict[str, Any], body)
        asked, note = await self._rewrite(body, partition)
        raw = json.dumps(body).encode()
        await self.app(_with_length(scope, len(raw)), _replay(raw, receive), self._noting(send, asked, note))

    async def _rewrite(self, body: dict[str, Any], partition: str) -> tuple[Asked | None, Provenance]:
        """Changes the body in place."""
        body["cache_salt"] = partition
        strip_uuids(body)
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
            asked, threshold=wish.get("threshold"), donor=wish.get("donor"), no_store=bool(wish.get("no_store", False))
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

    def _partition(self, scope: Any) -> str | None:
        """The tenant, None without a known key. Every key is compared, in constant time."""
        if not self.keys:
            return "default"
        sent = dict(scope["headers"]).get(b"authorization", b"")
        token = sent[7:] if sent[:7].lower() == b"bearer " else b""
        known = [key for key in self.keys if hmac.compare_digest(_sha(key.encode()), _sha(token))]
        return digest_of("api-key", known[0])[:32] if known else None


def _sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


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


async def _body(receive: Any) -> bytes | None:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


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
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


async def _refuse(send: Any, status: int, message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
