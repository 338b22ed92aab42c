"""vLLM's middleware in front of an application that keeps whatever reaches it."""

import asyncio
import json

from hypothesis import settings

from dejakv.adopt.adopter import Adopter, AdoptRecord, AdoptRequest
from dejakv.adopt.middleware import AdoptMiddleware
from dejakv.adopt.routes import CLIENT

PATHS = sorted(CLIENT)
CHAT = "/v1/chat/completions"
MANY = settings(max_examples=150, deadline=None)


class Nothing(Adopter):
    """Finds nothing: what is tested is who gets through, and with what."""

    def __init__(self) -> None:
        pass

    def find(self, asked: AdoptRequest) -> tuple[str, AdoptRecord]:
        return asked.text, AdoptRecord()

    def learn(self, asked: AdoptRequest, provenance: AdoptRecord) -> None:
        pass


class Upstream:
    def __init__(self):
        self.reached = []

    async def __call__(self, scope, receive, send):
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        self.reached.append((scope, body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def app_of(keys=("alpha", "beta"), **more):
    upstream = Upstream()
    return AdoptMiddleware(upstream, Nothing(), keys, **more), upstream


def send_to(app, path, *, method="POST", headers=(), root="", chunks=(b"{}",)):
    """Status and answer of one request, and how many parts of its body were read."""
    left, sent = list(chunks), []

    async def receive():
        if not left:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    headers = [*headers]
    if not any(name.lower() == b"content-type" for name, _ in headers):
        headers.append((b"content-type", b"application/json"))
    scope = {"type": "http", "method": method, "path": path, "root_path": root, "headers": headers}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], sent[1]["body"], len(chunks) - len(left)


def bearer(key):
    return [(b"authorization", b"Bearer " + key)]


def posted(body, key="alpha", path=CHAT):
    """What reaches vLLM of a body, None if it is refused."""
    app, upstream = app_of()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, _, _ = send_to(app, path, headers=bearer(key.encode()), chunks=(raw,))
    assert (status == 200) == bool(upstream.reached)
    assert status < 500
    return json.loads(upstream.reached[0][1]) if upstream.reached else None
