"""Probing: one key looks for whatever another key has left in a server."""

from dataclasses import dataclass
from typing import Any

from dejakv.attack.base import Result, judged, not_applicable
from dejakv.attack.client import Client, Reply, origin_of
from dejakv.attack.figures import Figure
from dejakv.attack.local_server import ITEMS
from dejakv.attack.scene import Scene
from dejakv.attack.target import Target

MODES = ("exact", "adopt", "blend")
_NAMING = ("partition", "cache_salt", "tenant", "user", "x-api-key", "x-partition")
"""Fields, headers and query parameters by which a caller might name another partition."""


@dataclass(frozen=True)
class Probing:
    name: str = "probing over HTTP"
    tries: str = (
        "one key asks for what another key has sent (equal prompts, near duplicates, its names), names the other in fields, "
        "headers and queries, reads figures and metrics, fills and clears its own part"
    )
    broken_if: str = "state, a name, an id, a score, a figure or an eviction of one key shows in an answer to the other"
    outside: bool = True

    def run(self, scene: Scene) -> Result:
        server = scene.server
        if server.second is None:
            return not_applicable(server.alone)
        probes = _Probes(scene, server, server.first, server.second)
        for number in range(scene.effort.probes):
            probes.look(number)
        probes.figures()
        probes.metrics()
        if server.own:
            probes.fill()
            probes.clear()
        figures: dict[str, Figure] = {"requests of the prober": probes.asked}
        if not server.own:
            figures["evictions, clearing"] = "not tried: they would remove entries of a server that is in use"
        tried = f"{scene.effort.probes} documents of one key, {probes.asked} requests of the other"
        return judged(tried, probes.findings, figures)


class _Probes:
    def __init__(self, scene: Scene, server: Target, owner: Client, prober: Client) -> None:
        self.scene, self.server, self.owner, self.prober = scene, server, owner, prober
        self.rng = scene.rng("probing")
        self.findings: list[str] = []
        self.asked = 0

    def look(self, number: int) -> None:
        """A document of the owner's, asked for by the prober in every way."""
        pair = self.scene.material.near_duplicate(self.rng)
        name = f"secret-name-{number}"
        left = self._generate(self.owner, pair.prompt, name)
        self.owner.complete(pair.prompt, keep=False)
        marks = [mark for mark in (left.json.get("store_key"), left.json.get("ref_key")) if mark]
        for mode in MODES:
            for what, prompt in (("an equal prompt", pair.prompt), ("a near duplicate", pair.duplicate)):
                self._used(self._complete(prompt, mode), f"{what} under {mode}", marks)
        for field in _NAMING:
            given = {field: name} if number % 2 else {field: "default"}
            reply = self._complete(
                pair.prompt, "exact", path=f"/v1/completions?{field}={name}", fields=given, headers=given
            )
            self._used(reply, f"the other partition named by {field}", marks)
        reply = self._generate(self.prober, pair.duplicate, None, approximate=True)
        self.asked += 1
        found = reply.json
        if found.get("cache_hit") or found.get("ref_key") or found.get("retrieved_sim") is not None:
            self.findings.append("/v1/generate gave the prober a hit, a name or a score of another partition")
        self._used(reply, "/v1/generate", marks)
        own = self._generate(self.prober, pair.prompt, None).json
        self.asked += 1
        if left.json.get("store_key") == name and own.get("store_key") == name:
            self.findings.append("the prober's entry bears the owner's name")
        if left.json.get("store_key") and not own.get("store_key"):
            self.findings.append("a prompt is not stored because another partition has stored it")
        default = self._generate(self.owner, pair.prompt, None).json.get("store_key")
        if default is not None and default == own.get("store_key"):
            self.findings.append("two partitions have the same id for the same prompt, so that an id tells the content")

    def figures(self) -> None:
        """The prober's figures before and after the owner's requests."""
        before = self._seen()
        for _ in range(3):
            self.owner.complete(self.scene.material.any_prompt(self.rng), keep=True)
        after = self._seen()
        if before != after:
            self.findings.append("the figures of a key change with the requests of another one")
        shown = self.prober.get("/v1/cache/stats").json
        if any(shown.get(name) is not None for name in ("entries", "bytes")):
            self.findings.append("/v1/cache/stats tells one of several tenants the present content")

    def metrics(self) -> None:
        """What is the operator's."""
        for client, who in ((self.prober, "a tenant's key"), (self.server.nobody, "no key")):
            self.asked += 1
            if client.get("/metrics").status == 200:
                self.findings.append(f"/metrics is open to {who}")

    def fill(self) -> None:
        """The prober fills its part of the budget; the owner's latest entry must stay, and the other way round."""
        for filler, other, who in ((self.prober, self.owner, "the owner's"), (self.owner, self.prober, "the prober's")):
            kept = self.scene.material.any_prompt(self.rng)
            other.complete(kept, keep=True)
            for _ in range(2 * ITEMS):
                self.asked += filler is self.prober
                filler.complete(self.scene.material.any_prompt(self.rng), keep=True, tokens=1)
            if origin_of(other.complete(kept)).get("reuse") != "exact":
                self.findings.append(f"filling one partition evicted an entry of {who}")

    def clear(self) -> None:
        """The prober clears; the owner's entry must stay, and the number of removed entries is not told."""
        kept = self.scene.material.any_prompt(self.rng)
        self.owner.complete(kept, keep=True)
        told = self.prober.post("/v1/cache/clear", {}).json
        self.asked += 1
        if told.get("cleared") is not None:
            self.findings.append("clearing tells a tenant how much there was")
        if origin_of(self.owner.complete(kept)).get("reuse") != "exact":
            self.findings.append("clearing one partition removed an entry of another")

    def _seen(self) -> tuple[Any, str]:
        self.asked += 2
        return self.prober.get("/v1/cache/stats").json, self.prober.get("/").text

    def _complete(
        self, prompt: str, mode: str, *, path: str = "/v1/completions", fields: Any = None, headers: Any = None
    ) -> Reply:
        self.asked += 1
        options = {"reuse": mode, "no_store": True}
        value = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "dejakv": options, **(fields or {})}
        return self.prober.post(path, value, **(headers or {}))

    def _generate(self, client: Client, prompt: str, name: str | None, *, approximate: bool = False) -> Reply:
        value = {
            "prompt": prompt,
            "max_new_tokens": 4,
            "temperature": 0,
            "use_semshare": approximate,
            "store_key": name,
        }
        return client.post("/v1/generate", value)

    def _used(self, reply: Reply, how: str, marks: list[str]) -> None:
        found = {**reply.json, **origin_of(reply)}
        if found.get("tokens_reused") or found.get("score") is not None:
            self.findings.append(f"state of another partition was used for {how}")
        if any(mark in reply.text for mark in marks):
            self.findings.append(f"an answer for {how} holds a name or an id of another partition")
