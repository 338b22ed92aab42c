"""Client of an OpenAI-compatible server for `verify`: accepted request fields, answers, errors."""

import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from dejakv.errors import ConfigError, InputError

Body = dict[str, Any]

TOP_TOKENS = 5
"""Log probabilities at each token of an answer: the most that OpenAI's completions allow."""
MAX_WAIT_S = 60.0
"""Longest wait of a request, in all, for a server that limits the rate."""
_ATTEMPTS = 4
_ROUTES = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


class RequestRefusedError(InputError):
    """Refusal of a request by the server, in the server's words."""


@dataclass(frozen=True)
class ServerAnswer:
    """An answer to a probe.

    Attributes
    ----------
    text : str
        The text, with reasoning before it and tool calls (JSON) behind it.
    tokens : tuple[str, ...]
        Tokens; empty without log probabilities.
    likely : tuple[dict[str, float], ...]
        Log probabilities (nats) of the likeliest tokens at each token of the answer.
    prompt_tokens, cached_tokens : int, optional
        Tokens of the prompt, and those that a cache had, as `usage` says.
    seconds : float
        Time of the request.
    """

    text: str
    tokens: tuple[str, ...] = ()
    likely: tuple[dict[str, float], ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class ClientSettings:
    """How a server is reached.

    Attributes
    ----------
    url : str
        Address, with or without `/v1`.
    model : str, optional
        Name of the model; None: the first that the server lists.
    api_key : str, optional
        Sent as a bearer token.
    ca_file : str, optional
        PEM file of the authority that signed the server's certificate.
    timeout_s : float
        Longest time of a request, seconds.
    answer_tokens : int
        Tokens of each answer.
    """

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    timeout_s: float = 120.0
    answer_tokens: int = 8


class ServerClient:
    """A client of one server, for use by several threads.

    Parameters
    ----------
    settings : ClientSettings
        How the server is reached.
    transport : httpx.BaseTransport, optional
        Where requests go in place of the network.

    Attributes
    ----------
    model : str
        Name of the model that probes ask.
    listed : list[dict]
        The server's list of models.
    events : Counter[str]
        Requests, retries and errors by name.
    routes : dict[str, dict]
        By `prompt` (completions) and `messages` (chat): the fields that each request gets. A
        route that the server lacks is missing.

    Raises
    ------
    ConfigError
        For a URL that is no address, and a file of the authority that cannot be read.
    """

    def __init__(
        self, settings: ClientSettings, transport: httpx.BaseTransport | None = None
    ) -> None:
        url = settings.url.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no address: give one such as http://127.0.0.1:8000")

        self.url, self.settings = url, settings
        headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self._http = httpx.Client(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(settings.timeout_s, connect=10),
            verify=_tls(settings.ca_file),
            limits=httpx.Limits(max_connections=64),
            transport=transport,
        )

        self.events: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.model = settings.model or ""
        self.listed: list[Body] = []
        self.routes: dict[str, Body] = {}

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def connect(self) -> None:
        """Read the server's models, and find out which fields its routes take.

        Raises
        ------
        InputError
            For a server that cannot be reached, wants another key, or answers no probe.
        """
        try:
            self.listed = list(self._json("GET", "/v1/models").get("data") or [])
        except RequestRefusedError as refusal:
            if not self.model:
                raise InputError(
                    f"{self.url}/v1/models lists no model ({refusal}): name one with --model"
                ) from refusal
        if not self.model and not self.listed:
            raise InputError(f"{self.url}/v1/models lists no model: name one with --model")
        self.model = self.model or str(self.listed[0].get("id"))

        refusals: list[str] = []
        for kind, content in (
            ("prompt", {"prompt": "One two three four"}),
            ("messages", {"messages": [{"role": "user", "content": "One two three four"}]}),
        ):
            try:
                self.routes[kind] = self._fields_taken(kind, content)
            except RequestRefusedError as refusal:
                refusals.append(str(refusal))
        if not self.routes:
            raise InputError(f"{self.url} answers no probe: {refusals[-1]}")

    @property
    def has_logprobs(self) -> bool:
        """Whether the answers of any route have log probabilities."""
        return any("logprobs" in fields for fields in self.routes.values())

    def _fields_taken(self, kind: str, content: Body) -> Body:
        """Try fewer fields, until the server answers."""
        logprobs = (
            {"logprobs": TOP_TOKENS}
            if kind == "prompt"
            else {"logprobs": True, "top_logprobs": TOP_TOKENS}
        )
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        greedy = {"temperature": 0, "max_tokens": self.settings.answer_tokens}
        newer = {"temperature": 0, "max_completion_tokens": self.settings.answer_tokens}
        unset = {"max_tokens": self.settings.answer_tokens}
        refusal = RequestRefusedError("no answer")
        for fields in (
            {**greedy, **logprobs},
            {**greedy, **logprobs, **streamed},
            greedy,
            {**greedy, **streamed},
            {**greedy, "stream": True},
            *(({**newer, **logprobs}, newer) if kind == "messages" else ()),
            {**unset, **logprobs},
            unset,
            {**unset, "stream": True},
        ):
            try:
                answer = self._answer({**fields, **content})
            except RequestRefusedError as error:
                refusal = error
                continue
            # A server may take the field and give none.
            return (
                fields
                if answer.likely
                else {
                    name: value
                    for name, value in fields.items()
                    if name not in ("logprobs", "top_logprobs")
                }
            )
        raise refusal

    def full_body(self, content: Body) -> Body:
        """Return the body of a request for a probe, as it is sent."""
        kind = "prompt" if "prompt" in content else "messages"
        return {"model": self.model, **self.routes.get(kind, {}), **content}

    def ask(self, content: Body) -> ServerAnswer:
        """Send a probe and return the answer.

        Raises
        ------
        RequestRefusedError
            If the server refuses the request.
        InputError
            If there is no answer after several attempts.
        """
        return self._answer(self.full_body(content))

    def abort(self, content: Body, seconds: float | None) -> bool:
        """Send a probe and close the connection before its answer is complete.

        Parameters
        ----------
        content : dict
            The probe.
        seconds : float, optional
            Time to wait for the answer's begin; None: until its first piece.

        Returns
        -------
        bool
            Whether the answer was incomplete: it had fewer pieces than tokens were asked for, or
            the connection failed.

        Raises
        ------
        RequestRefusedError
            If the server refuses the request, so that nothing was broken off.
        """
        body = {**self.full_body(content), "stream": True}
        # Nobody reads them here, and a server may refuse them in a stream.
        for name in ("logprobs", "top_logprobs"):
            body.pop(name, None)
        wait = httpx.Timeout(seconds or self.settings.timeout_s, connect=10)
        try:
            with self._http.stream("POST", _route(body), json=body, timeout=wait) as response:
                if response.status_code >= 400:
                    response.read()
                    raise RequestRefusedError(_message_of(response))
                pieces = 0
                for line in response.iter_lines():
                    pieces += line.startswith("data:")
                    if seconds is None and pieces:
                        break
                return pieces < self.settings.answer_tokens
        except httpx.HTTPError:
            return True

    def _answer(self, body: Body) -> ServerAnswer:
        body = {"model": self.model, **body}
        started = time.perf_counter()
        payload = self._json("POST", _route(body), body)
        return read_answer(payload, time.perf_counter() - started)

    def _json(self, method: str, path: str, body: Body | None = None) -> Body:
        """Send a request, with patience for limits and passing errors."""
        self._count("requests")
        reason, waited = "", 0.0
        attempt = 0
        while attempt < _ATTEMPTS:
            try:
                response = self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                reason = self._unreachable(error)
                self._count("connection errors")
                attempt += 1
                time.sleep(min(0.25 * 2**attempt, 2))
                continue

            status = response.status_code
            if status < 300:
                return self._read(response)
            reason = _message_of(response)

            # A limit is no failure: the wait has a bound of its own.
            if status == 429 or (status == 503 and "retry-after" in response.headers):
                pause = _retry_after(response.headers, waited)
                waited += pause
                self._count("rate limits")
                if waited > MAX_WAIT_S:
                    raise InputError(
                        f"{self.url} limits the rate of requests, and more than {MAX_WAIT_S:.0f} s"
                        f" of waiting did not help ({reason}): raise the limit of the key, or give"
                        " fewer --workers"
                    )
                time.sleep(pause)
                continue

            if status in (401, 403):
                raise InputError(
                    f"{self.url} refuses the API key ({reason}): give another with --api-key, or in"
                    " DEJAKV_API_KEY"
                )
            if status < 500:
                raise RequestRefusedError(reason)
            self._count("server errors")
            attempt += 1
            time.sleep(min(0.25 * 2**attempt, 2))
        raise InputError(f"{self.url} did not answer, {_ATTEMPTS} times: {reason}")

    def _read(self, response: httpx.Response) -> Body:
        try:
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                return _joined(_events(response.text))
            payload = response.json()
        except ValueError:
            payload = None
        if not isinstance(payload, dict):
            raise InputError(
                f"{self.url} does not answer in JSON: give the address of an OpenAI-compatible"
                " server"
            )
        return payload

    def _unreachable(self, error: httpx.TransportError) -> str:
        """Return what is wrong with a connection; TLS does not mend with another attempt."""
        text = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in text:
            raise InputError(
                f"the certificate of {self.url} is not signed by a known authority: give the"
                f" authority's PEM file with --ca-file ({text})"
            ) from error
        if isinstance(error, httpx.ConnectError) and not self.routes:
            raise InputError(f"{self.url} cannot be reached: {text}") from error
        return text

    def _count(self, event: str) -> None:
        with self._lock:
            self.events[event] += 1


def _tls(ca_file: str | None) -> ssl.SSLContext | bool:
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ca-file {ca_file!r} cannot be read ({error}): give a PEM file with the certificate"
            " of the authority"
        ) from error


def _route(body: Mapping[str, Any]) -> str:
    return _ROUTES["prompt" if "prompt" in body else "messages"]


def _retry_after(headers: Mapping[str, str], waited: float) -> float:
    try:
        return min(max(float(headers["retry-after"]), 0.05), MAX_WAIT_S)
    except (KeyError, ValueError):
        return 0.5 + waited  # grows: the header is missing, or a date


def _message_of(response: httpx.Response) -> str:
    """Return the reason that an error's body gives, shortened."""
    try:
        payload: Any = response.json()
    except ValueError:
        payload = response.text
    for name in ("error", "message", "detail"):
        if isinstance(payload, dict) and payload.get(name):
            payload = payload[name]
    return f"{response.status_code} {payload}"[:300]


def _events(text: str) -> Iterator[Body]:
    for line in text.splitlines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _joined(events: Iterator[Body]) -> Body:
    """Put the pieces of a stream together, as one answer."""
    text, usage, positions = "", None, []
    for event in events:
        if event.get("error"):
            raise RequestRefusedError(str(event["error"])[:300])
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            text += _text_of(choice)
            positions += _positions(choice)
    logprobs = {"content": positions} if positions else None
    return {"choices": [{"text": text, "logprobs": logprobs}], "usage": usage}


def _text_of(choice: Mapping[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta") or {}
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
    return (choice.get("text") or "") + thought + (message.get("content") or "") + calls


def _positions(choice: Mapping[str, Any]) -> list[Body]:
    """Return the log probabilities of a choice in the form of chat completions."""
    logprobs = choice.get("logprobs") or {}
    if logprobs.get("content"):
        return list(logprobs["content"])
    tokens, tops = logprobs.get("tokens") or [], logprobs.get("top_logprobs") or []
    values = logprobs.get("token_logprobs") or []
    return [
        {
            "token": token,
            "logprob": value,
            "top_logprobs": [{"token": name, "logprob": lp} for name, lp in (top or {}).items()],
        }
        for token, value, top in zip(tokens, values, tops, strict=False)
    ]


def read_answer(payload: Mapping[str, Any], seconds: float = 0.0) -> ServerAnswer:
    """Read the answer of a completion or chat completion.

    Parameters
    ----------
    payload : mapping
        The response's object.
    seconds : float
        Time of the request.

    Returns
    -------
    ServerAnswer
        The answer.

    Raises
    ------
    RequestRefusedError
        For a response without an answer.
    """
    choices = payload.get("choices")
    if not choices:
        raise RequestRefusedError(f"a response without choices: {str(dict(payload))[:200]}")

    positions = _positions(choices[0])
    likely = []
    for place in positions:
        tops = {str(top["token"]): float(top["logprob"]) for top in place.get("top_logprobs") or []}
        # Some servers leave the chosen token out of the likeliest.
        if place.get("logprob") is not None:
            tops.setdefault(str(place["token"]), float(place["logprob"]))
        likely.append(tops)

    usage = payload.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    if cached is None:
        cached = (payload.get("timings") or {}).get("cache_n")  # llama.cpp's
    return ServerAnswer(
        text=_text_of(choices[0]),
        tokens=tuple(str(place["token"]) for place in positions),
        likely=tuple(likely),
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=cached,
        seconds=seconds,
    )
