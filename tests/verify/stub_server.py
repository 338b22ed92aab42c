"""An OpenAI-compatible server with a small model of words, a real cache of blocks, and faults to plant in it.

The model is deterministic: a token's state has two layers, the second depends on all tokens before it, and an answer on the state of
every token. Rounding is noise that depends on the shapes of a computation: on what was cached, and on the requests at once."""

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import numpy as np

BLOCK, WIDTH = 16, 12
ANSWERS = [f" {a}{b}" for a in ("ka", "lo", "mi", "nu", "re", "so") for b in ("", "da", "fi", "pu", "te", "vo", "zi")]
FAULTS = ("salt", "lora", "picture", "off_by_one", "half_written", "stale", "tail", "truncated", "scales", "layers")
ADAPTERS = ("base", "tuned")


def seeded(*parts: object) -> np.random.Generator:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


@cache
def embedding(token: str, model: str, weights: int) -> np.ndarray:
    drawn = seeded(token).normal(size=WIDTH)
    moved = 0.5 * seeded(token, model, weights).normal(size=WIDTH)
    return (drawn + moved) * np.exp(0.5 * seeded(token, "loudness").normal())


MIX = seeded("mix").normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
HEAD = seeded("head").normal(size=(2 * WIDTH, len(ANSWERS)))


@dataclass
class Stub:
    """A server. `fault` is one of FAULTS, `rounding` the noise of a logit, `tier` whether faults show below the first cache alone."""

    fault: str = ""
    rounding: float = 0.02
    batch_noise: bool = True
    capacity: int = 700
    tier: bool = False
    late: int = 0
    """Requests after which the state of one can be found."""
    salt: bool = True
    logprobs: bool = True
    counts: bool = True
    stream_only: bool = False
    sampled: bool = False
    completions: bool = True
    pictures: bool = True
    tools: bool = True
    key: str = ""
    tokens_a_word: int = 1
    stale_after: int = 200
    errors: int = 0
    """Every so many requests one fails."""
    limit: int = 0
    """Every so many requests one is limited."""
    token_s: float = 0.0
    context: int = 4096
    seen: int = 0
    running: int = 0
    scale: float = 1.0
    """Of the block that was stored last."""
    blocks: OrderedDict[str, np.ndarray] = field(default_factory=OrderedDict)
    below: dict[str, np.ndarray] = field(default_factory=dict)
    waiting: list[Any] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    # The model.

    def states(self, tokens: list[str], model: str, known: np.ndarray) -> np.ndarray:
        """The state of all tokens, `[tokens, 2, WIDTH]`, of which the first are known."""
        weights = int(self.fault == "stale" and self.seen > self.stale_after)
        places = np.arange(len(known), len(tokens))[:, None]
        first = np.stack([embedding(token, model, weights) for token in tokens[len(known) :]])
        first = first * (1 + 0.3 * np.sin(places))
        mean = (known[:, 0].sum(axis=0) + np.cumsum(first, axis=0)) / np.sqrt(places + 1)
        return np.concatenate([known, np.stack([first, 2 * np.tanh(mean @ MIX + first)], axis=1)])

    def logits(self, state: np.ndarray, noise: np.random.Generator) -> np.ndarray:
        weights = 1 + np.cos(np.arange(len(state)) * 0.7)[:, None]
        mean = (weights * state.reshape(len(state), -1)).sum(axis=0) / np.sqrt(len(state))
        return mean @ HEAD / WIDTH**0.5 + noise.normal(size=len(ANSWERS)) * self.rounding

    # The cache.

    def keys(self, tokens: list[str], model: str, salt: str, picture: str) -> list[str]:
        start = [] if self.fault == "salt" else [salt]
        start += [] if self.fault == "lora" else [model]
        start += [] if self.fault == "picture" else [picture]
        chain, keys = repr(start), []
        for place in range(0, len(tokens) - BLOCK + 1, BLOCK):
            block = tokens[place : place + BLOCK]
            # A picture is in the key by its digest alone.
            block = ["<picture>" if token.startswith("<picture") else token for token in block]
            block = block[: BLOCK // 2] if self.fault == "tail" else block
            chain = hashlib.blake2b(repr((chain, block)).encode(), digest_size=16).hexdigest()
            keys.append(chain)
        return keys

    def load(self, keys: list[str]) -> np.ndarray:
        loaded: list[np.ndarray] = []
        for place, key in enumerate(keys):
            below = key not in self.blocks
            block = self.below.get(key) if below and self.tier else self.blocks.get(key)
            if block is None:
                break
            if not below:
                self.blocks.move_to_end(key)
            if below or not self.tier:
                block = self.damaged(block, place, loaded)
            loaded.append(block)
        return np.concatenate(loaded) if loaded else np.zeros((0, 2, WIDTH))

    def damaged(self, block: np.ndarray, place: int, loaded: list[np.ndarray]) -> np.ndarray:
        if self.fault == "off_by_one":
            return np.roll(block, 1, axis=0)
        if self.fault == "truncated" and place >= 1:
            return np.zeros_like(block)
        if self.fault == "scales":
            return block * (self.scale / np.abs(block).max())
        if self.fault == "layers":
            return block[:, ::-1]
        return block

    def store(self, keys: list[str], state: np.ndarray, broken: bool) -> None:
        for place, key in enumerate(keys):
            if key not in self.blocks:
                block = state[place * BLOCK : (place + 1) * BLOCK].copy()
                if broken and self.fault == "half_written":
                    block[BLOCK // 2 :] = 0
                self.blocks[key], self.scale = block, float(np.abs(block).max())
                if self.tier:
                    self.below.setdefault(key, block)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)

    # HTTP.

    def __call__(self, request: httpx.Request) -> httpx.Response:
        wait = request.extensions.get("timeout", {}).get("read") or 1e9
        body = json.loads(request.content) if request.content else {}
        status, headers, answer = self.respond(request.url.path, dict(request.headers), body, wait)
        if answer is None:
            raise httpx.ReadTimeout("the client's time is over", request=request)
        if isinstance(answer, dict):
            return httpx.Response(status, headers=headers, json=answer)
        return httpx.Response(status, headers=headers, stream=_Stream(answer))

    def respond(
        self, path: str, headers: dict[str, str], body: dict[str, Any], wait: float = 1e9
    ) -> tuple[int, dict[str, str], dict[str, Any] | Iterator[bytes] | None]:
        """Status, headers, and the body: an object, a stream, or None where the client left before."""
        with self.lock:
            self.seen += 1
            turn = self.seen
            self.bodies.append(body)
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            return _error(401, "no such key")
        if self.limit and turn % self.limit == 0:
            status, _, answer = _error(429, "too many requests")
            return status, {"Retry-After": "0.01"}, answer
        if self.errors and turn % self.errors == 0:
            return _error(500, "something broke")
        if path == "/v1/models":
            models = [
                {"id": each, "parent": None if each == "base" else "base", "max_model_len": self.context}
                for each in ADAPTERS
            ]
            return 200, {}, {"object": "list", "data": models}
        chat = path == "/v1/chat/completions"
        if not chat and (path != "/v1/completions" or not self.completions):
            return _error(404, "no such route")
        if refusal := self.refusal(body):
            return _error(400, refusal)
        return self.answer(body, chat, wait)

    def refusal(self, body: dict[str, Any]) -> str:
        if body.get("logprobs") and not self.logprobs:
            return "logprobs: not supported"
        if self.stream_only and not body.get("stream"):
            return "stream must be true"
        if self.salt and "cache_salt" in body and not isinstance(body["cache_salt"], str):
            return "cache_salt must be a text"
        if body.get("tools") and not self.tools:
            return "tools: not supported"
        if '"image_url"' in json.dumps(body.get("messages", "")) and not self.pictures:
            return "this is no multimodal model"
        return ""

    def answer(self, body: dict[str, Any], chat: bool, wait: float) -> Any:
        tokens, picture = _tokens_of(body, chat)
        tokens = [f"{token}{part or ''}" for token in tokens for part in range(self.tokens_a_word)]
        salt = str(body.get("cache_salt", "")) if self.salt else ""
        model = body.get("model", "base")
        with self.lock:
            self.running += 1
        try:
            keys = self.keys(tokens, model, salt, picture)
            with self.lock:
                known = self.load(keys[: (len(tokens) - 1) // BLOCK])
            state = self.states(tokens, model, known)
            time.sleep(self.token_s * (len(tokens) - len(known)))
            broken = wait < 1.0
            with self.lock:
                self.waiting.append((keys, state, broken))
                while len(self.waiting) > self.late:
                    self.store(*self.waiting.pop(0))
            if broken:
                return 200, {}, None
            batch = self.running if self.batch_noise else 1
            noise = seeded(tokens, model, len(known), batch, self.rounding)
            count = body.get("max_tokens") or body.get("max_completion_tokens") or 8
            places = self.decode(tokens, state, model, count, noise)
        finally:
            with self.lock:
                self.running -= 1
        usage: dict[str, Any] = {"prompt_tokens": len(tokens), "completion_tokens": count}
        if self.counts:
            usage["prompt_tokens_details"] = {"cached_tokens": len(known)}
        top = body.get("top_logprobs") if chat else body.get("logprobs")
        if not body.get("stream"):
            return 200, {}, _payload(places, usage, chat, top)
        return 200, {"content-type": "text/event-stream"}, self.stream(places, usage, chat, top, keys)

    def decode(
        self, tokens: list[str], state: np.ndarray, model: str, count: int, noise: Any
    ) -> list[tuple[str, dict[str, float]]]:
        tokens, places = list(tokens), []
        for _ in range(count):
            logits = self.logits(state, noise)
            values = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            # Hot enough that two answers of 8 tokens are hardly ever equal by chance.
            drawn = np.exp(values / 3) / np.exp(values / 3).sum()
            chosen = np.random.default_rng().choice(len(ANSWERS), p=drawn) if self.sampled else int(values.argmax())
            likely = np.argsort(-values)[:5]
            places.append(
                (ANSWERS[chosen], {ANSWERS[each]: float(values[each]) for each in {*likely.tolist(), int(chosen)}})
            )
            tokens.append(ANSWERS[chosen].strip())
            state = self.states(tokens, model, state)
        return places

    def stream(self, places: Any, usage: Any, chat: bool, top: Any, keys: list[str]) -> Iterator[bytes]:
        try:
            for place in places:
                piece = _payload([place], None, chat, top)
                choice = piece["choices"][0]
                if chat:
                    choice["delta"] = choice.pop("message")
                yield f"data: {json.dumps(piece)}\n\n".encode()
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()
        except GeneratorExit:
            # The client left: what was being written is half there.
            with self.lock:
                if self.fault == "half_written" and keys and keys[-1] in self.blocks:
                    self.blocks[keys[-1]][BLOCK // 2 :] = 0
            raise


class _Stream(httpx.SyncByteStream):
    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces

    def close(self) -> None:
        self.pieces.close()  # type: ignore[attr-defined]


def _error(status: int, message: str) -> tuple[int, dict[str, str], dict[str, Any]]:
    return status, {}, {"error": {"message": message, "code": status}}


def _tokens_of(body: dict[str, Any], chat: bool) -> tuple[list[str], str]:
    """The words of a request in the order of a chat template, and a digest of its picture."""
    if not chat:
        return str(body["prompt"]).split(), ""
    words, picture = ["<chat>"], ""
    words += json.dumps(body["tools"]).split() if body.get("tools") else []
    for message in body["messages"]:
        words.append(f"<{message['role']}>")
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text":
                words += part["text"].split()
            else:
                digest = hashlib.blake2b(part["image_url"]["url"].encode(), digest_size=8).hexdigest()
                picture += digest
                words += [f"<picture {digest} {place}>" for place in range(20)]
    return [*words, "<answer>"], picture


def _payload(places: list[tuple[str, dict[str, float]]], usage: Any, chat: bool, top: Any) -> dict[str, Any]:
    text = "".join(token for token, _ in places)
    listed = [
        {
            "token": token,
            "logprob": tops[token],
            "top_logprobs": [{"token": name, "logprob": value} for name, value in tops.items()],
        }
        for token, tops in places
    ]
    if chat:
        choice: dict[str, Any] = {
            "message": {"role": "assistant", "content": text},
            "logprobs": {"content": listed} if top else None,
        }
    else:
        old = {
            "tokens": [token for token, _ in places],
            "token_logprobs": [tops[token] for token, tops in places],
            "top_logprobs": [tops for _, tops in places],
        }
        choice = {"text": text, "logprobs": old if top else None}
    return {"choices": [{"index": 0, **choice}], "usage": usage}


def serve(stub: Stub, context: Any = None) -> ThreadingHTTPServer:
    """The stub on a port of this machine, with TLS if there is a context; the caller shuts it down."""

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, more, answer = stub.respond(self.path, headers, body)
            pieces = iter([json.dumps(answer).encode()]) if isinstance(answer, dict) else answer
            self.send_response(status)
            for name, value in {"content-type": "application/json", **more}.items():
                self.send_header(name, value)
            self.end_headers()
            assert pieces is not None
            try:
                for piece in pieces:
                    self.wfile.write(piece)
                    self.wfile.flush()
            except OSError:
                pieces.close()  # type: ignore[attr-defined]

        do_GET = do_POST = _handle

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
