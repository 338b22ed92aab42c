r"""ASGI middleware that stabilizes requests before any server of OpenAI's or Anthropic's protocol.

    DEJAKV_STABILIZE='{"rules": ["keys", "tools", "volatile"]}' \
        vllm serve MODEL --middleware dejakv.stabilize.StabilizeMiddleware

Headers `x-dejakv-stabilized`, `x-dejakv-prefix` and `x-dejakv-unstabilized` of an answer say what
was changed, what it gained, and why nothing was changed.
"""

import asyncio
import hashlib
import json
import logging
from collections import Counter
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dejakv.config import switched_off
from dejakv.errors import MissingExtraError
from dejakv.http.asgi import headers_of, replay, replay_body, route_path, with_length
from dejakv.http.errors import Receive, RefusedError, Scope, Send, refuse
from dejakv.models.loading import load_tokenizer
from dejakv.request import asks_no_store
from dejakv.stabilize.answers import answer_of
from dejakv.stabilize.chat_body import read_chat_body
from dejakv.stabilize.prefixes import PrefixGain, PrefixMeter
from dejakv.stabilize.rules import PrefixStabilizer, Rewritten
from dejakv.stabilize.settings import StabilizeSettings

log = logging.getLogger("dejakv.stabilize")

PATHS = ("/chat/completions", "/v1/messages")
"""Ends of the paths whose requests are stabilized."""

METRICS_PATH = "/stabilize/metrics"

_SIGNED = (b"content-encoding", b"content-digest", b"digest", b"content-md5", b"signature",
           b"x-amz-content-sha256")  # fmt: skip
"""Headers of a body that is compressed, or whose bytes are signed."""

_IDENTITY = (b"authorization", b"x-api-key", b"api-key", b"cookie")
"""Headers that tell clients apart."""

_MAX_ANSWER_BYTES = 16 * 1024**2


@dataclass
class StabilizeCounts:
    """Counts of a middleware since its start.

    Attributes
    ----------
    requests : Counter[str]
        Requests: `changed`, `unchanged` or `unknown`.
    rules : Counter[str]
        Requests that a rule changed.
    checks : Counter[str]
        Changed requests of `check`: answers `equal`, `different`, or `not_compared`.
    prompt, prefix_given, prefix_sent : Counter[str]
        Lengths of `PrefixGain`, by unit.
    """

    requests: Counter[str] = field(default_factory=Counter[str])
    rules: Counter[str] = field(default_factory=Counter[str])
    checks: Counter[str] = field(default_factory=Counter[str])
    prompt: Counter[str] = field(default_factory=Counter[str])
    prefix_given: Counter[str] = field(default_factory=Counter[str])
    prefix_sent: Counter[str] = field(default_factory=Counter[str])


class StabilizeMiddleware:
    """Stabilize the bodies of chat requests; everything else is passed on as it is.

    Parameters
    ----------
    app : Any
        The server's ASGI application, or a `ForwardingApp`.
    settings : StabilizeSettings, optional
        None: those of `DEJAKV_STABILIZE`.

    Raises
    ------
    ConfigError
        For wrong settings.
    ModelError
        For a model without a tokenizer.
    """

    def __init__(self, app: Any, settings: StabilizeSettings | None = None) -> None:
        self.app = app
        self.settings = settings or StabilizeSettings.from_environment()
        self.counts = StabilizeCounts()
        # DEJAKV_OFF rules all of DejaKV out.
        self._stabilizer = PrefixStabilizer(() if switched_off() else self.settings.rules)
        model = self.settings.model
        self._meter = PrefixMeter(None if model is None else _tokenizer(model))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stabilize a request and pass it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = route_path(scope)
        if scope["method"] == "GET" and path == METRICS_PATH:
            await self._metrics(scope, send)
            return
        if scope["method"] != "POST" or not path.endswith(PATHS):
            await self.app(scope, receive, send)
            return

        messages, whole = await _read(receive, self.settings.max_body_bytes)
        raw = b"".join(message.get("body", b"") for message in messages)
        rewritten, gain = Rewritten(raw, reason="the body is incomplete, or too large"), None
        if whole and (reason := _unreadable(scope)):
            rewritten = Rewritten(raw, reason=reason)
        elif whole:
            # In a thread: tokens of a long prompt take a while.
            rewritten, gain = await asyncio.to_thread(self._rewrite, raw, scope)
        self._count(rewritten, gain)
        noting = self._noting(send, rewritten, gain)

        if not rewritten.changed:
            await self.app(scope, replay(messages, receive), noting)
        elif self.settings.check:
            await self._check(raw, rewritten.body, messages, scope, receive, noting)
        else:
            changed = with_length(scope, len(rewritten.body))
            await self.app(changed, replay_body(rewritten.body, receive), noting)

    def _rewrite(self, raw: bytes, scope: Scope) -> tuple[Rewritten, PrefixGain | None]:
        try:
            # Who has another key has another memory: an order tells of earlier requests.
            keys = [*(headers_of(scope, name) for name in _IDENTITY), _cache_salt(raw)]
            partition = hashlib.sha256(json.dumps(keys).encode()).hexdigest()
            remember = not asks_no_store(headers_of(scope, b"cache-control"))
            rewritten = self._stabilizer.rewrite(raw, partition, remember=remember)
            if rewritten.reason:
                return rewritten, None
            return rewritten, self._meter.measure(rewritten, partition, remember=remember)
        except Exception as error:
            log.exception("a request could not be stabilized")
            return Rewritten(raw, reason=f"an error: {type(error).__name__}"), None

    def _count(self, rewritten: Rewritten, gain: PrefixGain | None) -> None:
        counts, unit = self.counts, self._meter.unit
        outcome = "unknown" if rewritten.reason else "changed" if rewritten.changed else "unchanged"
        counts.requests[outcome] += 1
        counts.rules.update(rewritten.changed)
        if gain is not None:
            counts.prompt[unit] += gain.length
            counts.prefix_given[unit] += gain.given
            counts.prefix_sent[unit] += gain.sent

    def _noting(self, send: Send, rewritten: Rewritten, gain: PrefixGain | None) -> Send:
        """Add headers to the answer that say what was changed."""
        values = {"stabilized": ", ".join(rewritten.changed), "unstabilized": rewritten.reason}
        if gain is not None:
            values["prefix"] = (
                f"{gain.sent} of {gain.length} {self._meter.unit}, {gain.given} as it came"
            )
        if rewritten.changed and self.settings.check:
            values["check"] = "the answer is to the request as it came"
        log.debug("%s", values)
        added = [
            (f"x-dejakv-{name}".encode(), value.encode("ascii", "replace"))
            for name, value in values.items()
            if value
        ]

        async def noting(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        return noting

    async def _check(
        self,
        raw: bytes,
        changed: bytes,
        messages: Sequence[MutableMapping[str, Any]],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Answer a request as it came; then send the other form and compare the answers."""
        # A compressed answer could not be read.
        others = [item for item in scope["headers"] if item[0].lower() != b"accept-encoding"]
        scope = {**scope, "headers": [*others, (b"accept-encoding", b"identity")]}
        own, other = _AnswerBody(send), _AnswerBody(None)
        await self.app(scope, replay(messages, receive), own)

        result = "not_compared"
        # A client that left has no whole answer, and waits for no other.
        if own.complete and own.status == 200 and _is_greedy(raw):
            with suppress(Exception):
                await self.app(
                    with_length(scope, len(changed)), replay_body(changed, _never), other
                )
            first, second = answer_of(bytes(own.body)), answer_of(bytes(other.body))
            if other.complete and first is not None and second is not None:
                result = "equal" if first == second else "different"
        self.counts.checks[result] += 1
        log.info("answers to both forms of a request: %s", result.replace("_", " "))

    async def _metrics(self, scope: Scope, send: Send) -> None:
        try:
            from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

            from dejakv.metrics import CacheCollector
        except (ImportError, MissingExtraError) as error:
            await refuse(scope, send, RefusedError(501, str(error)))
            return
        # Of this middleware alone: nothing is registered globally.
        registry = CollectorRegistry()
        registry.register(CacheCollector(stabilizer=lambda: self.counts))
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": generate_latest(registry)})


class _AnswerBody:
    """The `send` of an answer that is compared: it keeps the body, and may pass it on."""

    def __init__(self, send: Send | None) -> None:
        self._send = send
        self.status = 0
        self.body = bytearray()
        self._ended = False

    @property
    def complete(self) -> bool:
        """Whether the last piece came, and all of them are kept."""
        return self._ended and len(self.body) <= _MAX_ANSWER_BYTES

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif len(self.body) <= _MAX_ANSWER_BYTES:
            self.body += message.get("body", b"")
        if self._send is not None:
            await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._ended = True


async def _read(receive: Receive, max_bytes: int) -> tuple[list[MutableMapping[str, Any]], bool]:
    """Read the messages of a body; and tell whether it is whole."""
    messages, size = list[MutableMapping[str, Any]](), 0
    while True:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if message["type"] != "http.request" or size > max_bytes:
            return messages, False
        if not message.get("more_body", False):
            return messages, True


async def _never() -> MutableMapping[str, Any]:
    """Wait for a client that does not leave, since nobody asked."""
    await asyncio.Event().wait()
    raise AssertionError


def _unreadable(scope: Scope) -> str:
    """Return why a request's headers forbid another body; empty if they do not."""
    names = {name.lower() for name, _ in scope["headers"]}
    if named := sorted(names.intersection(_SIGNED)):
        return f"the header {named[0].decode()} belongs to the bytes of the body"
    kinds = headers_of(scope, b"content-type")
    if [kind.partition(";")[0].strip().lower() for kind in kinds] != ["application/json"]:
        return "the body is not declared as JSON"
    return ""


def _cache_salt(raw: bytes) -> str:
    """Return what keeps a body's prefixes apart in the server; empty where nothing does."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return ""
    return json.dumps(body.get("cache_salt")) if isinstance(body, dict) else ""


def _is_greedy(raw: bytes) -> bool:
    """Tell whether a request asks for the likeliest tokens, so that answers can be compared."""
    body = read_chat_body(raw)
    temperature = body.root.value.get("temperature")
    if temperature is None:
        return False
    with suppress(ValueError):
        return float(body.text[temperature.begin : temperature.end]) == 0
    return False


def _tokenizer(model: str) -> Any:
    """Return the function that makes a text the ids of a model's tokens."""
    tokenizer = load_tokenizer(model)

    def tokenize(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    return tokenize
