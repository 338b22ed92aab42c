"""A small HTTP client: one connection, requests no faster and no more than agreed, answers up to a size."""

import http.client
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult

from dejakv.errors import DejaKVError

LARGEST_ANSWER = 16 << 20
SECONDS = 60.0
"""Longest wait for an answer."""
STORED_SECONDS = 10.0
"""Longest wait until what was answered is stored."""
IMPATIENT_SECONDS = 0.3
"""The same for a server that has not stored a prompt within it before."""


class GoneError(DejaKVError):
    """The server does not answer."""


class SpentError(DejaKVError):
    """All requests that were announced have been sent."""


@dataclass
class Pace:
    """What all clients of a server may send together. `per_second` 0: as fast as it answers; `total` 0: any number."""

    per_second: float = 0.0
    total: int = 0
    sent: int = 0
    _next: float = 0.0

    def wait(self) -> None:
        if self.total and self.sent >= self.total:
            raise SpentError(f"the {self.total} requests that were announced are sent")
        self.sent += 1
        if self.per_second:
            now = time.monotonic()
            time.sleep(max(0.0, self._next - now))
            self._next = max(now, self._next) + 1 / self.per_second


@dataclass(frozen=True)
class Reply:
    """A status, an answer and the seconds to it."""

    status: int
    body: bytes = field(repr=False)
    seconds: float

    @property
    def json(self) -> dict[str, Any]:
        """The answer as a JSON object; empty for anything else."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


class Client:
    """Requests of one key. Not thread-safe."""

    def __init__(self, url: SplitResult, key: str | None, pace: Pace) -> None:
        self._url = url
        self.authorization = f"Bearer {key}" if key else ""
        self._headers = {"Authorization": self.authorization} if key else {}
        self._pace = pace
        self._connection = self._connect()
        self._patience = STORED_SECONDS

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._url.hostname or "", self._url.port
        if self._url.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=SECONDS, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=SECONDS)

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Reply:
        """Raises: GoneError if there is no answer, SpentError."""
        self._pace.wait()
        sent = {
            **self._headers,
            **({"Content-Type": "application/json"} if body is not None else {}),
            **(headers or {}),
        }
        fresh = self._connection.sock is None
        try:
            return self._once(method, path, body, sent)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            if fresh:
                raise GoneError(f"{self._url.geturl()} does not answer ({error or type(error).__name__})") from error
        try:  # the server may close a connection that it kept
            return self._once(method, path, body, sent)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise GoneError(f"{self._url.geturl()} does not answer ({error or type(error).__name__})") from error

    def _once(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Reply:
        if self._connection.sock is None:
            self._connection.connect()
        began = time.perf_counter()
        self._connection.request(method, self._url.path.rstrip("/") + path, body, headers)
        answer = self._connection.getresponse()
        content = answer.read(LARGEST_ANSWER)
        seconds = time.perf_counter() - began
        if answer.will_close or not answer.isclosed():
            self._connection.close()
        return Reply(answer.status, content, seconds)

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, value: dict[str, Any], **headers: str) -> Reply:
        return self.ask("POST", path, json.dumps(value).encode(), headers)

    def complete(self, prompt: str, reuse: str = "exact", *, keep: bool = False, tokens: int = 4) -> Reply:
        """One greedy completion. What is not kept is not stored. Kept: returns when it is stored."""
        before = self.stored() if keep else 0
        options = {"reuse": reuse, "no_store": not keep}
        value = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "dejakv": options}
        reply = self.post("/v1/completions", value)
        ends = time.monotonic() + self._patience
        while keep and reply.status == 200 and origin_of(reply).get("reuse") != "exact" and self.stored() <= before:
            if time.monotonic() > ends:
                self._patience = IMPATIENT_SECONDS
                break
            time.sleep(0.02)
        return reply

    def stored(self) -> int:
        """Prompts of this key that were stored."""
        return int(self.get("/v1/cache/stats").json.get("stored", 0))

    def close(self) -> None:
        self._connection.close()


def answer_of(reply: Reply) -> str:
    """The text of a completion."""
    choices = reply.json.get("choices") or [{}]
    return str(choices[0].get("text", ""))


def origin_of(reply: Reply) -> dict[str, Any]:
    """What a completion says of the state that it came from."""
    return dict(reply.json.get("dejakv") or {})
