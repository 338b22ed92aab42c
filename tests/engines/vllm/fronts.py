"""A front with an error bound over an application that stands where vLLM's does."""

import asyncio
import json
from itertools import count
from typing import Any

from test_vllm_adopt import FIRST, _Words

from dejakv.config import SemanticCacheConfig
from dejakv.engines.vllm.adopt import Adopter
from dejakv.engines.vllm.front_bound import FrontBound
from dejakv.engines.vllm.middleware import AdoptMiddleware
from dejakv.find.bound import setting_of
from dejakv.identity import digest_of
from dejakv.trust.grid import PILOT

KEY = "one"
WOULD = {"donors": ["d" * 40], "epoch": "e", "setting": "s", "features": {"share_rows": 0.2}}


class Behind:
    """vLLM's application as the front sees it: answers with its number, and says that it blended where it was asked to."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.scopes: list[Any] = []
        self.status = 200
        self.would: dict[str, Any] | None = None
        self.hold: asyncio.Event | None = None
        self.reached = asyncio.Event()
        self._numbers = count()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                pass
            return
        body = json.loads((await receive())["body"])
        self.bodies.append(body)
        self.scopes.append(scope)
        self.reached.set()
        if self.hold is not None and "return_token_ids" in body:
            await self.hold.wait()
        wish = (body.get("kv_transfer_params") or {}).get("dejakv", {})
        told: dict[str, Any] = {"approximate": wish.get("mode") == "blend" and self._served(wish)}
        if self.would is not None and "limit" in wish:
            told["would"] = self.would
        number = next(self._numbers)
        answer = {
            "choices": [{"text": f"answer {number}", "token_ids": [number]}],
            "kv_transfer_params": {"dejakv": told},
        }
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    def _served(self, wish: dict[str, Any]) -> bool:
        return "limit" not in wish or wish["limit"]["risk"] >= 0.5


def config(**more: Any) -> SemanticCacheConfig:
    values = {"reuse": "adopt", "index_encoder": "model", "similarity_threshold": 0.8, "error_bound": 0.9}
    return SemanticCacheConfig.from_dict({**values, "confidence": 0.5, "audit_share": 1.0, **more})


class Front:
    """A middleware with a bound over `Behind`, in an event loop of its own."""

    def __init__(self, mode: str = "adopt", **more: Any) -> None:
        self.behind = Behind()
        self.bound = FrontBound(config(**more))
        adopter = Adopter(config(**more), embeddings=_Words(), bounded=self.bound.bounded)
        self.app = AdoptMiddleware(self.behind, adopter, api_keys=(KEY,))
        self.app.bound, self.app.mode = self.bound, mode

    async def post(self, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, str]:
        raw = json.dumps({"model": "m", **body}).encode()
        headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"x-request-id", b"1")]
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": raw, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)
        return {name.decode(): value.decode() for name, value in sent[0]["headers"]}

    async def labelled(self) -> None:
        if self.bound._labelling is not None:
            await self.bound._labelling

    def pilot(self, method: str, **cls: Any) -> None:
        for number in range(PILOT):
            features = {"score": number / PILOT} if method == "adopt" else WOULD["features"]
            self.bound.gate.draw(method=method, features=features, **cls)

    @property
    def partition(self) -> str:
        return str(self.app.keys.partition_of(KEY))

    def of_adopt(self) -> dict[str, str]:
        epoch = digest_of("front", self.bound.served.epoch, "m")[:32]
        setting = setting_of("adopt", self.app.adopter._cache.config)
        return {"partition": self.partition, "epoch": epoch, "setting": setting}


async def taught(front: Front) -> None:
    await front.post({"prompt": FIRST})
    await asyncio.sleep(0.05)
    while not len(front.app.adopter):
        await asyncio.sleep(0.01)
