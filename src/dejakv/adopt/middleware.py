r"""ASGI middlewares before vLLM's OpenAI server: keys and labels alone, and adopting as well.

    DEJAKV_API_KEYS=key-of-one,key-of-two \
        vllm serve MODEL --middleware dejakv.adopt.ServerMiddleware
    DEJAKV_ADOPT='{"similarity_threshold": 0.9}' \
        vllm serve MODEL --middleware dejakv.adopt.AdoptMiddleware

The key alone names the partition: the body's `cache_salt` is replaced by it. Headers `x-dejakv-*`
say whose prompt ran, and whether the answer is approximate; a stream's last event says it, too.
"""

import asyncio
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dejakv import tracing
from dejakv.adopt.adopter import AdoptRecord, AdoptRequest, InputEmbeddings, PromptAdopter
from dejakv.adopt.labels import STREAMS, label_answers, note_results
from dejakv.adopt.openai_body import (
    adopt_request_of,
    asks_connector,
    connector_options,
    forbid_storing,
    replace_varying_text,
    restrict_to_partition,
    set_connector_options,
)
from dejakv.adopt.routes import ADOPTING, CLIENT, audience
from dejakv.config import SemanticCacheConfig
from dejakv.errors import ConfigError
from dejakv.http.asgi import (
    UNBUFFERED,
    check_lengths,
    headers_of,
    replay_body,
    route_path,
    with_length,
)
from dejakv.http.bodies import BodyLimits, parse_json, read_body
from dejakv.http.errors import Receive, RefusedError, Scope, Send, refuse
from dejakv.http.keys import OPERATOR, SECRET, VARIABLE, ApiKeys, key_of
from dejakv.http.traces import serve_traced
from dejakv.request import asks_no_store

log = logging.getLogger("dejakv.adopt")


class ServerMiddleware:
    """API keys as partitions, and labels of approximate answers.

    Settings come from the environment, since vLLM makes the middleware without arguments:

    `DEJAKV_API_KEYS`, `DEJAKV_API_KEYS_FILE`
        Keys separated by commas, and a file with one a line; a client must bring one. Without them
        there is one partition, and every route is open.
    `DEJAKV_PARTITION_SECRET`
        Secret in the names of partitions, so that they reveal nothing of the keys.
    `DEJAKV_OPERATOR_KEY`
        Key that opens the routes that are not for clients (`routes`), where keys are required.

    Parameters
    ----------
    app : Any
        The server's ASGI application.
    api_keys : Sequence[str], optional
        Keys in place of those of the environment.
    limits : BodyLimits
        Limits of one body.

    Raises
    ------
    ConfigError
        For lists of keys without a key.
    """

    def __init__(
        self, app: Any, api_keys: Sequence[str] | None = None, limits: BodyLimits = BodyLimits()
    ) -> None:
        self.app = app
        tracing.start()
        operator = os.environ.get(OPERATOR)
        if api_keys is not None:
            self.keys = ApiKeys(api_keys, operator=operator)
        else:
            file = os.environ.get(f"{VARIABLE}_FILE")
            self.keys = ApiKeys.load(
                os.environ.get(VARIABLE), file, os.environ.get(SECRET), operator
            )

        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the key, restrict the body to its partition, and pass the request on."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            await asyncio.to_thread(tracing.stop)
            return

        try:
            check_lengths(scope)
            partition = self._partition(scope)
        except RefusedError as error:
            await refuse(scope, send, error)
            return

        if partition is None:
            await self.app(scope, receive, send)
        else:
            # Behind the keys: who has none is not traced.
            await serve_traced(partial(self._serve, partition), scope, receive, send)

    async def _serve(self, partition: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Restrict a client's body to its partition, and pass the request on."""
        try:
            body = parse_json(await read_body(scope, receive, self.limits))
            if not isinstance(body, dict):
                raise RefusedError(400, "the body is no JSON object: send {...}")
            # Before the body is rewritten, which may add choices of ours.
            asks = asks_connector(body)
            no_store = asks_no_store(headers_of(scope, b"cache-control"))
            send = await self._rewrite(body, partition, scope, send, no_store)
            # After the rewrite, which sets the salt that is replaced by a random one here.
            if no_store:
                forbid_storing(body, partition)
            send = self._labelled(body, scope, send, asks)
        except RefusedError as error:
            await refuse(scope, send, error)
            return

        raw = json.dumps(body, ensure_ascii=False).encode()
        await self.app(with_length(scope, len(raw)), replay_body(raw, receive), send)

    async def _rewrite(
        self, body: dict[str, Any], partition: str, scope: Scope, send: Send, no_store: bool
    ) -> Send:
        """Make the body the partition's, in place, and return the `send` of its answer.

        Raises RefusedError.
        """
        restrict_to_partition(body, partition)
        return send

    def _labelled(self, body: dict[str, Any], scope: Scope, send: Send, asks: bool) -> Send:
        """Tell the connector that the label of this answer is shown, and show it."""
        state = getattr(scope.get("app"), "state", None)
        shown = not body.get("stream") or route_path(scope) in STREAMS
        if not shown or not note_results(getattr(state, "engine_client", None)):
            return send
        # The connector says what is wrong, and keeps nothing: it cannot read whether that was asked
        # for.
        if asks and not isinstance(body["kv_transfer_params"]["dejakv"], dict):
            return send

        set_connector_options(
            body, {**connector_options(body), "labelled": True, **({} if asks else {"quiet": True})}
        )
        return label_answers(send, asks)

    def _partition(self, scope: Scope) -> str | None:
        """Return the partition of a client's key; None where the request is not a client's.

        Raises RefusedError for a request that needs a key and brings no known one, before the
        request is looked at any further.
        """
        who = audience(scope)
        if who == "everybody":
            return None
        caller = self.keys.caller(key_of(scope))
        if who == "operator":
            if caller is None or not caller.operator:
                raise RefusedError(
                    403,
                    f"{route_path(scope)} is not for clients where API keys are required: send "
                    "the key that"
                    " DEJAKV_OPERATOR_KEY holds, or use one of " + ", ".join(sorted(CLIENT)),
                )

            return None

        if caller is None or caller.partition is None:
            bearer = {"WWW-Authenticate": "Bearer"}
            raise RefusedError(
                401, "no known API key: send one as 'Authorization: Bearer ...'", bearer
            )

        return caller.partition


class AdoptMiddleware(ServerMiddleware):
    """Server middleware that also rewrites a prompt to a similar earlier one before tokenization.

    The variable `DEJAKV_ADOPT` holds JSON: settings of `SemanticCacheConfig` (similarity_threshold,
    index_encoder, ...), `max_donors`, `mode` (for requests that ask for nothing: `adopt`, `blend`,
    which is the connector's, or `off`), and `model`, a folder, for index_encoder `model`. With
    `blend` or `off` and no other setting nothing is adopted, and no encoder is needed.

    Parameters
    ----------
    app : Any
        The server's ASGI application.
    adopter : PromptAdopter, optional
        Adopter in place of the one that the settings describe.
    api_keys : Sequence[str], optional
        Keys in place of those of the environment.
    limits : BodyLimits
        Limits of one body.

    Raises
    ------
    ConfigError
        For settings that do not fit, and for lists of keys without a key.
    """

    def __init__(
        self,
        app: Any,
        adopter: PromptAdopter | None = None,
        api_keys: Sequence[str] | None = None,
        limits: BodyLimits = BodyLimits(),
    ) -> None:
        try:
            values = json.loads(os.environ.get("DEJAKV_ADOPT") or "{}")
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise ConfigError(
                "DEJAKV_ADOPT is no JSON object: give {} or settings such as similarity_threshold"
            )

        self.mode = values.pop("mode", "adopt")
        if self.mode not in ("adopt", "blend", "off"):
            raise ConfigError(
                f"DEJAKV_ADOPT: mode {self.mode!r} is unknown: choose adopt, blend or off"
            )

        if adopter is None and (self.mode == "adopt" or values):
            donors, model = values.pop("max_donors", 10_000), values.pop("model", None)
            config = SemanticCacheConfig.from_dict({"reuse": "adopt", **values})
            adopter = PromptAdopter(config, donors, _embeddings(model))

        self.adopter = adopter
        super().__init__(app, api_keys, limits)

    async def _rewrite(
        self, body: dict[str, Any], partition: str, scope: Scope, send: Send, no_store: bool
    ) -> Send:
        """Restrict the body to the partition, and adopt a similar prompt where it is asked for."""
        adopt_request, note = await self._adopted(body, partition, scope, no_store)
        tracing.annotate(
            {
                "dejakv.method": note.method,
                "dejakv.level": note.level,
                "dejakv.score": note.score,
                "dejakv.reason": note.reason,
            }
        )
        return self._noting(send, adopt_request, note)

    async def _adopted(
        self, body: dict[str, Any], partition: str, scope: Scope, no_store: bool
    ) -> tuple[AdoptRequest | None, AdoptRecord]:
        """Decide about adoption, and change the body in place. Raises RefusedError."""
        options = connector_options(body)
        # First of all: whatever is decided below, the body is the partition's.
        restrict_to_partition(body, partition)
        if route_path(scope) not in ADOPTING:
            return None, AdoptRecord(reason="adopt is not for this path")
        mode = options.get("mode", self.mode)
        if mode == "blend":
            set_connector_options(body, {"mode": "blend", **options})
        elif options.get("mode") == "adopt":
            # The connector behind us does not know this mode.
            set_connector_options(
                body, {"mode": "exact", "no_store": options.get("no_store") is True}
            )

        if mode != "adopt":
            return None, AdoptRecord(reason=f"mode is {mode}")
        if self.adopter is None:
            return None, AdoptRecord(
                reason=f"this server adopts nothing: DEJAKV_ADOPT has mode {self.mode} and no "
                "settings"
            )

        if body.get("prompt_logprobs") is not None:
            return None, AdoptRecord(reason="prompt_logprobs are of the very prompt that is sent")
        try:
            choice = _AdoptionChoice.model_validate(options)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            return None, AdoptRecord(reason=f"{first['loc'][0]}: {first['msg']}")

        adopt_request = adopt_request_of(body, partition)
        if isinstance(adopt_request, str):
            return None, AdoptRecord(reason=adopt_request)
        no_store = no_store or choice.no_store
        adopt_request = replace(
            adopt_request, threshold=choice.threshold, donor=choice.donor, no_store=no_store
        )
        text, note = await asyncio.to_thread(self.adopter.find, adopt_request)
        if note.method == "adopt":
            replace_varying_text(body, text)
        return adopt_request, note

    def _noting(self, send: Send, adopt_request: AdoptRequest | None, note: AdoptRecord) -> Send:
        """Add the headers to the answer, and make a prompt a donor once its answer is complete."""
        status = 0

        async def noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", []), *_headers(note)]
                if any(
                    name.lower() == b"content-type" and b"event-stream" in value
                    for name, value in headers
                ):
                    headers += [
                        (name.lower().encode(), value.encode())
                        for name, value in UNBUFFERED.items()
                    ]

                message = {**message, "headers": headers}

            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if last and status == 200 and adopt_request is not None:
                # In a thread and not waited for: whoever wraps this application may cancel it once
                # the answer is out.
                asyncio.get_running_loop().run_in_executor(None, self._learn, adopt_request, note)

            await send(message)

        return noting

    def _learn(self, adopt_request: AdoptRequest, note: AdoptRecord) -> None:
        assert self.adopter is not None
        try:
            self.adopter.learn(adopt_request, note)
        except Exception:
            log.exception("a prompt could not be remembered as a donor")


class _AdoptionChoice(BaseModel):
    """Choices of a request in `kv_transfer_params.dejakv`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    mode: Any = None
    threshold: float | None = Field(default=None, ge=-1, le=1)
    no_store: bool = False
    donor: str | None = None


def _headers(note: AdoptRecord) -> list[tuple[bytes, bytes]]:
    values = {
        "method": note.method,
        "level": note.level,
        "donor": note.donor,
        "reason": note.reason,
    }
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
