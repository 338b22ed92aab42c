"""Oversized and nested inputs: refused, and the server goes on as before."""

import contextlib
from dataclasses import dataclass

from dejakv.attack.base import Result, judged
from dejakv.attack.client import GoneError, answer_of
from dejakv.attack.figures import Figure, Share
from dejakv.attack.input_list import Input, inputs
from dejakv.attack.memory import watched
from dejakv.attack.scene import Scene
from dejakv.attack.target import LARGEST_REMOTE, Target

MEMORY = 256 << 20
"""Bytes of growth that are allowed beside four times the largest body."""
LONG = 150_000
"""Words that are longer than any context, and not beyond a body's limit."""
HEALTH_SECONDS = 5.0


@dataclass(frozen=True)
class HostileInputs:
    name: str = "hostile inputs"
    tries: str = (
        "huge, nested and broken bodies, over-long prompts, wrong values, harmful pictures, too many parameters and headers, and "
        "bytes that are no HTTP"
    )
    broken_if: str = (
        "such a request gets anything but a refusal (4xx, or for bytes that are no request a closed connection), the server does "
        "not answer afterwards, answers a prompt otherwise than before, or needs unbounded memory"
    )
    outside: bool = True

    def run(self, scene: Scene) -> Result:
        server, rng = scene.server, scene.rng("inputs")
        largest = scene.effort.largest if server.own else LARGEST_REMOTE
        prompt = scene.material.any_prompt(rng)
        before = answer_of(server.first.complete(prompt))
        findings: list[str] = []
        slowest, tried = 0.0, 0
        with watched() as growth:
            for one in inputs(largest, LONG, server.first.authorization):
                if not server.own and one.name == "the largest body":
                    continue  # a body within the server's limits might be served
                tried += 1
                findings += [f"{one.name}: {fault}" for fault in _sent(server, one)]
                try:
                    health = server.nobody.get("/health")
                except GoneError as error:
                    findings.append(f"{one.name}: afterwards {error}")
                    break
                slowest = max(slowest, health.seconds)
                if health.status != 200 or health.seconds > HEALTH_SECONDS:
                    findings.append(f"{one.name}: afterwards /health gave {health.status} in {health.seconds:.1f} s")
        with contextlib.suppress(GoneError):
            if answer_of(server.first.complete(prompt)) != before:
                findings.append("a prompt is answered otherwise than before")
        figures: dict[str, Figure] = {
            "refused": Share(tried - len(findings), tried),
            "slowest /health, seconds": round(slowest, 3),
        }
        if server.own and growth.most is not None:
            figures["growth of memory, MiB"] = growth.most >> 20
            if growth.most > MEMORY + 4 * largest:
                findings.append(f"memory grew by {growth.most >> 20} MiB")
        return judged(f"{tried} inputs, bodies of up to {largest >> 20} MiB", findings, figures)


def _sent(server: Target, one: Input) -> list[str]:
    """Sends one; what is wrong with the answer."""
    if one.raw:
        status = _raw(server, one.raw)
        return [] if status is None or 400 <= status < 500 else [f"status {status}"]
    headers = {"Content-Type": "application/json", **one.headers}
    try:
        reply = server.first.ask(one.method, one.path, one.body or None, headers)
    except GoneError as error:
        return [str(error)]
    return [] if 400 <= reply.status < 500 else [f"status {reply.status}"]


def _raw(server: Target, sent: bytes) -> int | None:
    """The status of the answer to a connection's bytes; None if it was closed without one."""
    with contextlib.suppress(OSError), server.connect() as connection:
        connection.settimeout(HEALTH_SECONDS)
        connection.sendall(sent)
        answer = connection.recv(4096)
        words = answer.split(b" ", 2)
        if len(words) > 1 and words[1].isdigit():
            return int(words[1])
    return None
