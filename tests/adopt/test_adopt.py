"""Adopt before vLLM: who may stand in for whom, where the partition comes from, what the client is told."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from dejakv.adopt.adopter import AdoptRequest, PromptAdopter
from dejakv.adopt.middleware import AdoptMiddleware
from dejakv.adopt.openai_body import adopt_request_of
from dejakv.config import SemanticCacheConfig

PAIRS = Path(__file__).parents[2] / "research/guard_pairs.json"


class _Words:
    """A bag of words as an embedding."""

    epoch = "words"

    def embed_text(self, text):
        vector = np.zeros(512, dtype=np.float32)
        for word in text.lower().split():
            vector[sum(map(ord, word)) * 31 % 512] += 1
        return vector / max(float(np.linalg.norm(vector)), 1e-9)


def _adopter(**settings):
    values = {"reuse": "adopt", "index_encoder": "model", "similarity_threshold": 0.8, **settings}
    return PromptAdopter(SemanticCacheConfig.from_dict(values), embeddings=_Words())


FIRST = "please tell me what the capital of the country called france is"
NEAR = "please tell me what the capital of a country called france is"


class _Server:
    """Stands where vLLM's application stands: keeps what it was asked."""

    def __init__(self, status=200):
        self.bodies, self.status = [], status

    async def __call__(self, scope, receive, send):
        message = await receive()
        self.bodies.append(json.loads(message["body"]))
        assert dict(scope["headers"])[b"content-length"] == str(len(message["body"])).encode()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def _post(app, body, key=None, path="/v1/chat/completions"):
    """The status and the x-dejakv headers."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = [(b"content-length", str(len(raw)).encode()), (b"content-type", b"application/json")]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    sent = []

    async def receive():
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message):
        sent.append(message)

    async def serve():
        await app({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)
        await asyncio.get_running_loop().shutdown_default_executor()  # what is learned is learned behind the answer

    asyncio.run(serve())
    told = {name.decode()[9:]: value.decode() for name, value in sent[0]["headers"] if name.startswith(b"x-dejakv-")}
    return sent[0]["status"], told


def _chat(text, **more):
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


@pytest.fixture
def server():
    return _Server()


@pytest.fixture
def app(server):
    return AdoptMiddleware(server, _adopter(), api_keys=("one", "two"))


def test_a_similar_prompt_is_run_instead(app, server):
    assert _post(app, _chat(FIRST), "one") == (200, {"method": "none", "reason": "no%20donor".replace("%20", " ")})
    status, told = _post(app, _chat(NEAR, max_tokens=3, stream=True), "one")
    assert status == 200
    assert told["method"] == "adopt"
    assert told["level"] == "semantic_text"
    assert float(told["score"]) > 0.8
    assert server.bodies[1]["messages"][0]["content"] == FIRST
    assert server.bodies[1]["max_tokens"] == 3
    assert server.bodies[1]["stream"]


def test_a_latent_level_finds_by_the_prompts_vector():
    adopter = _adopter(semantic_text=False, embedding_layers=["prompt:512:0.8"], embedding_hook="prompt")
    app = AdoptMiddleware(_Server(), adopter, api_keys=("one",))
    assert _post(app, _chat(FIRST), "one")[1]["method"] == "none"
    told = _post(app, _chat(NEAR), "one")[1]
    assert (told["method"], told["level"]) == ("adopt", "embedding:prompt")


def test_a_prompt_whose_answer_failed_is_no_donor():
    app = AdoptMiddleware(_Server(500), _adopter(), api_keys=("one",))
    for text in (FIRST, NEAR):
        assert _post(app, _chat(text), "one")[1]["method"] == "none"


def test_completions_too(app, server):
    for text, method in ((FIRST, "none"), (NEAR, "adopt")):
        body = {"model": "m", "prompt": text}
        assert _post(app, body, "one", path="/v1/completions")[1]["method"] == method
    assert server.bodies[1]["prompt"] == FIRST


def test_a_prompt_that_was_adopted_is_adopted_again(app, server):
    """There is no idle promotion here; who wants it exact asks for that."""
    _post(app, _chat(FIRST), "one")
    for _ in range(2):
        assert _post(app, _chat(NEAR), "one")[1]["method"] == "adopt"
    assert [body["messages"][0]["content"] for body in server.bodies[1:]] == [FIRST, FIRST]


def test_partition_is_the_key(app, server):
    """Never the body: another key finds nothing, and a cache_salt in the body is replaced."""
    _post(app, _chat(FIRST, cache_salt="x"), "one")
    assert _post(app, _chat(NEAR, cache_salt="x"), "two")[1]["method"] == "none"
    salts = [body["cache_salt"] for body in server.bodies]
    assert "x" not in salts
    assert salts[0] != salts[1]
    assert _post(app, _chat(FIRST), "three")[0] == 401
    assert _post(app, _chat(FIRST))[0] == 401
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_chat(FIRST), _chat(NEAR, tools=[{"type": "function"}])),
        (_chat(FIRST), {**_chat(NEAR), "model": "n"}),
        (
            _chat(FIRST),
            {"model": "m", "messages": [{"role": "system", "content": "be brief"}, *_chat(NEAR)["messages"]]},
        ),
        (_chat(FIRST), _chat([{"type": "image_url", "image_url": {"url": "data:a"}}, {"type": "text", "text": NEAR}])),
        (
            _chat([{"type": "image_url", "image_url": {"url": "data:b"}}, {"type": "text", "text": FIRST}]),
            _chat([{"type": "image_url", "image_url": {"url": "data:a"}}, {"type": "text", "text": NEAR}]),
        ),
    ],
)
def test_other_contexts_never_meet(app, one, other):
    _post(app, one, "one")
    assert _post(app, other, "one")[1]["method"] == "none"


def test_same_picture_meets_and_uuids_are_taken_out(app, server):
    def ask(text):
        picture = {"type": "image_url", "image_url": {"url": "data:a"}, "uuid": "mine"}
        return _chat([picture, {"type": "text", "text": text}])

    _post(app, ask(FIRST), "one")
    assert _post(app, ask(NEAR), "one")[1]["method"] == "adopt"
    assert server.bodies[1]["messages"][0]["content"][1]["text"] == FIRST
    assert all("uuid" not in body["messages"][0]["content"][0] for body in server.bodies)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"kv_transfer_params": {"dejakv": {"mode": "off"}}}, "mode is off"),
        ({"kv_transfer_params": {"dejakv": {"mode": "adopt", "threshold": 3}}}, "threshold: "),
        (
            {"kv_transfer_params": {"dejakv": {"mode": "adopt", "donor": "0" * 40}}},
            "named: a donor that the request names",
        ),
        ({"kv_transfer_params": {"dejakv": {"mode": "adopt", "tenant": "x"}}}, "tenant: "),
        ({"kv_transfer_params": {"dejakv": {"mode": "adopt", "threshold": 0.999}}}, "threshold: score"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_a_request_may_choose(app, server, more, reason):
    _post(app, _chat(FIRST), "one")
    status, told = _post(app, _chat(NEAR, **more), "one")
    assert status == 200
    assert told["method"] == "none"
    assert told["reason"].startswith(reason)
    assert server.bodies[1]["messages"][0]["content"] == NEAR
    assert server.bodies[1].get("kv_transfer_params", {}).get("dejakv", {}).get("mode") != "adopt"


def test_named_donor(app):
    _post(app, _chat(FIRST), "one")
    donor = _post(app, _chat(NEAR), "one")[1]["donor"]
    wish = {"kv_transfer_params": {"dejakv": {"mode": "adopt", "donor": donor}}}
    assert _post(app, _chat("something else entirely", **wish), "one")[1]["level"] == "named"
    assert _post(app, _chat("something else entirely", **wish), "two")[1]["method"] == "none"


def test_bodies_without_one_varying_text():
    assert adopt_request_of({"messages": []}, "p") == "neither one text prompt nor messages"
    assert adopt_request_of({"prompt": ["a", "b"]}, "p") == "neither one text prompt nor messages"
    assert (
        adopt_request_of(_chat("hi") | {"messages": [{"role": "assistant", "content": "x"}]}, "p")
        == "the last message is not the user's"
    )
    remote = _chat([{"type": "image_url", "image_url": {"url": "https://x/y.png"}}, {"type": "text", "text": "hi"}])
    assert "https addresses are not known by content" in adopt_request_of(remote, "p")
    assert isinstance(adopt_request_of({"prompt": "hi"}, "p"), AdoptRequest)


def test_donors_are_bounded():
    adopter = PromptAdopter(
        SemanticCacheConfig.from_dict({"reuse": "adopt", "index_encoder": "model"}), max_donors=3, embeddings=_Words()
    )
    for number in range(9):
        asked = AdoptRequest("p", f"question number {number} about nothing", str(number))
        adopter.learn(asked, adopter.find(asked)[1])
    assert len(adopter) == 3


@pytest.mark.parametrize(
    ("donor", "asked"),
    [
        ("is the light in zanzibar of the old house not on", "is the light in the cellar of the old house on"),
        ("are 778899 lights in zanzibar of the old house on", "are 12 lights in the cellar of the old house on"),
        ("is the light in zanzibar of the old house on", "is the light in the cellar of the old house on"),
    ],
)
def test_a_client_is_told_nothing_of_anothers_text(donor, asked):
    adopter = _adopter(similarity_threshold=0.2)
    first = AdoptRequest("p", donor, "")
    adopter.learn(first, adopter.find(first)[1])
    _, note = adopter.find(AdoptRequest("p", asked, ""))
    said = repr(note).lower()
    assert note.reason.startswith("lexical")
    assert len(note.reason) <= 200
    assert "zanzibar" not in said
    assert "778899" not in said


def test_a_lookup_that_fails_tells_no_text(monkeypatch):
    adopter = _adopter()

    def failing(*_, **__):
        raise ValueError("zanzibar")

    monkeypatch.setattr(adopter._cache, "find", failing)
    _, note = adopter.find(AdoptRequest("p", "hi", ""))
    assert note.reason == "the lookup failed: ValueError"


class _Alike:
    """An embedding that takes all texts for one."""

    epoch = "alike"

    def embed_text(self, text):
        return np.array([1.0, 0.0], dtype=np.float32)


def _ran(config, first, second, **asked):
    """The text that runs for the second prompt, after the first."""
    adopter = PromptAdopter(SemanticCacheConfig(reuse="adopt", index_encoder="model", **config), embeddings=_Alike())
    request = AdoptRequest("p", first, "c", **asked)
    adopter.learn(request, adopter.find(request)[1])
    return adopter.find(AdoptRequest("p", second, "c", **asked))[0]


def test_no_question_of_another_meaning_is_adopted():
    kinds = json.loads(PAIRS.read_text("utf-8"))
    assert len(kinds) == 20
    served = {(a, b) for pairs in kinds.values() for a, b in pairs if _ran({}, a, b) != b or _ran({}, b, a) != a}
    assert served == {("Does a Polish shine?", "Does a polish shine?")}  # names may be written small


@pytest.mark.parametrize("semantic", [True, False])
def test_a_threshold_of_1_means_equal_text(semantic):
    first, second = "What color is the car?", "what color  is the car?"
    settings = {"semantic_text": semantic, "lexical_guard": False}
    assert _ran(settings, first, second) == first
    assert _ran({**settings, "similarity_threshold": 1.0}, first, second) == second
    assert _ran(settings, first, second, threshold=1.0) == second
    assert _ran(settings, first, second, threshold=0.999) == first
