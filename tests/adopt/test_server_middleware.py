"""`ServerMiddleware` before an application that hands out results as vLLM's does: keys, labels, and no encoder."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from dejakv.adopt import AdoptMiddleware, ServerMiddleware
from dejakv.errors import ConfigError

DONE = b"data: [DONE]\n\n"


class Application:
    """Answers with what its engine client's results say, whole or as a stream, and keeps the body that it was given."""

    def __init__(self, *labels: dict[str, Any]) -> None:
        async def generate() -> AsyncIterator[Any]:
            for label in labels:
                yield SimpleNamespace(kv_transfer_params={"dejakv": label})

        self.state = SimpleNamespace(engine_client=SimpleNamespace(generate=generate))
        self.body: dict[str, Any] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.body = json.loads((await receive())["body"])
        start = {"type": "http.response.start", "status": 200, "headers": []}
        if self.body.get("stream"):
            await send(start)
            await send({"type": "http.response.body", "body": b'data: {"id": "cmpl-1"}\n\n', "more_body": True})
            async for _ in self.state.engine_client.generate():
                pass
            await send({"type": "http.response.body", "body": DONE})
        else:
            async for _ in self.state.engine_client.generate():
                pass
            await send(start)
            await send({"type": "http.response.body", "body": b"{}"})


def answered(application: Application, body: dict[str, Any], key: str = "", kind: Any = ServerMiddleware) -> Any:
    """Status, the label's header and the body of one call of /v1/completions."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "app": application}
    asyncio.run(kind(application)(scope, receive, send))
    header = dict(sent[0]["headers"]).get(b"x-dejakv-approximate")
    return sent[0]["status"], header, b"".join(message.get("body", b"") for message in sent[1:])


def test_the_label_of_any_result_is_the_answers() -> None:
    application = Application({"approximate": True, "method": "blend"}, {"approximate": False})
    assert answered(application, {"prompt": "x"})[1] == b"true"
    assert application.body["kv_transfer_params"]["dejakv"] == {"labelled": True, "quiet": True}
    assert answered(Application({"approximate": False}), {"prompt": "x"})[1] == b"false"
    assert answered(Application(), {"prompt": "x"})[1] is None


def test_a_stream_ends_with_its_label() -> None:
    _, header, body = answered(Application({"approximate": True}), {"prompt": "x", "stream": True})
    assert header is None
    assert body.endswith(DONE)
    label = json.loads(body.removesuffix(DONE).strip().rsplit(b"data: ", 1)[1])
    assert label == {"id": "cmpl-1", "choices": [], "kv_transfer_params": {"dejakv": {"approximate": True}}}


@pytest.mark.parametrize("asks", [False, True])
def test_a_stream_says_of_an_exact_answer_what_was_asked(asks: bool) -> None:
    asked = {"kv_transfer_params": {"dejakv": {}}} if asks else {}
    _, _, body = answered(Application({"approximate": False}), {"prompt": "x", "stream": True, **asked})
    assert (b"kv_transfer_params" in body) is asks


@pytest.mark.parametrize("junk", ["no object", 7, None, [], True])
def test_choices_that_nobody_can_read_reach_the_connector_as_they_are(junk: Any) -> None:
    """It refuses them and keeps nothing, since that may have been asked for."""
    application = Application({"approximate": False})
    answered(application, {"prompt": "x", "kv_transfer_params": {"dejakv": junk}})
    assert application.body["kv_transfer_params"] == {"dejakv": junk}


@pytest.mark.parametrize("kind", [ServerMiddleware, AdoptMiddleware])
@pytest.mark.parametrize("mode", ["off", "blend"])
def test_keys_alone_need_no_encoder(monkeypatch: pytest.MonkeyPatch, kind: Any, mode: str) -> None:
    monkeypatch.setattr("dejakv.adopt.middleware.PromptAdopter", None)  # none can be made
    monkeypatch.setenv("DEJAKV_API_KEYS", "one,two")
    monkeypatch.setenv("DEJAKV_ADOPT", json.dumps({"mode": mode}))
    application = Application({"approximate": False})
    assert answered(application, {"prompt": "x"}, kind=kind)[0] == 401
    assert answered(application, {"prompt": "x"}, "one", kind)[0] == 200
    salt = application.body["cache_salt"]
    assert answered(application, {"prompt": "x", "cache_salt": salt}, "two", kind)[0] == 200
    assert application.body["cache_salt"] not in ("", salt)


@pytest.mark.parametrize("value", ["{", "{'mode': 'off'}", "[1]", "0.9"])
def test_settings_that_are_no_json_object_are_a_mistake_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("DEJAKV_ADOPT", value)
    with pytest.raises(ConfigError, match="DEJAKV_ADOPT is no JSON object: give"):
        AdoptMiddleware(None)


def test_mistakes_are_found_where_the_middleware_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEJAKV_API_KEYS", ",")
    with pytest.raises(ConfigError):
        ServerMiddleware(Application())
    monkeypatch.delenv("DEJAKV_API_KEYS")
    monkeypatch.setenv("DEJAKV_ADOPT", '{"mode": "sometimes"}')
    with pytest.raises(ConfigError, match="choose adopt, blend or off"):
        AdoptMiddleware(Application())
