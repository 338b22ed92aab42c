"""vLLM's own scheduler with both sides of the connector, through random sequences of what may happen to a server.

Whatever happens, an answer is that of full computation, no request hangs, no block is lost, and nobody is served from what he may not
see. `toy_engine` has the model.
"""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import soak_rounds, soak_seed
from toy_engine import BLOCK, ROW, Asked, ToyEngine, answer
from vllm_harness import segments, spoil, tokens

from dejakv.store.store import Store

BASES = [tokens(length, 900 + length) for length in (40, 77, 128, 150)]
LONGEST, STEPS, SERVERS = 190, 200, 16
SLOW_S, LIMIT_S = 0.8, 0.4
WISHES: tuple[dict[str, Any], ...] = ({}, {}, {}, {"mode": "exact"}, {"no_store": True}, {"mode": "off"}, {"mode": "?"})
EVENTS = {
    "arrive": 12, "come_again": 12, "step": 12, "abort": 3, "settle": 4, "preempt": 2, "reset": 1, "update_weights": 1,
    "spoil_store": 2, "mend_store": 4, "damage": 1, "restart": 1,
}  # fmt: skip
"""How often each is drawn."""


def shared(one: Asked, other: Asked, *, answers: bool) -> int:
    """Tokens of a prompt whose state it may have from another one: of the same partition and weights, and allowed to be kept.

    `answers` are kept with their prompts.
    """
    modes = one.wish.get("mode"), other.wish.get("mode")
    if modes[0] == "off" or "?" in modes or other.wish.get("no_store"):
        return 0
    if (one.salt, one.weight) != (other.salt, other.weight):
        return 0
    stored = [*other.prompt, *(other.tokens if answers else [])]
    pairs = zip(one.prompt, stored, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one.prompt), len(stored)))


class Server:
    """What happens to one, drawn from `rng`. `judged` are requests that are over."""

    def __init__(
        self, rng: random.Random, start: Callable[..., ToyEngine], folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.rng, self.start, self.folder = rng, start, folder
        self.disk = rng.random() < 0.6
        self.size = {
            "budget": rng.choice([24, 64, 512]),
            "blocks": rng.choice([20, 30, 80]),
            "drafts": rng.choice([0, 3]),
        }
        self.extra: dict[str, Any] = {"load_timeout_s": LIMIT_S, "memory_bytes": 0}
        self.extra |= {"store_dir": str(folder)} if self.disk else {}
        self.extra |= {"max_pending_bytes": 4 * BLOCK * ROW} if rng.random() < 0.5 else {}  # increments of two blocks
        self.extra |= {"max_bytes": 400 * ROW} if rng.random() < 0.3 else {}
        self.answers = rng.random() < 0.5
        self.extra |= {"generated_text": "keep"} if self.answers else {}
        self.store = "works"
        for name in ("put", "get_parts"):
            monkeypatch.setattr(Store, name, self._spoiled(getattr(Store, name)))
        self.engine = self.start(self.extra, **self.size)
        self.judged: set[str] = set()
        self.seen: Counter[str] = Counter()

    def _spoiled(self, real: Any) -> Any:
        def called(store: Any, *given: Any) -> Any:
            if self.store == "fails":
                raise OSError("the disk is gone")
            if self.store == "is slow" and real.__name__ == "get_parts":
                time.sleep(SLOW_S)
            return None if self.store == "has nothing" else real(store, *given)

        return called

    def live(self) -> list[str]:
        return [name for name, asked in self.engine.asked.items() if not asked.over]

    def happen(self) -> None:
        """One event, and what must hold after it."""
        (event,) = self.rng.choices(list(EVENTS), list(EVENTS.values()))
        getattr(self, event)()
        self.seen[event] += 1
        self.judge()

    def arrive(self) -> None:
        base, rng = self.rng.choice(BASES), self.rng
        prompt = base[: len(base) - rng.choice([0, 16, 33])] + tokens(rng.choice([0, 0, 5, 40]), rng.randrange(2))
        self._ask(prompt, rng.choice([None, "one", "two"]), **rng.choice(WISHES))

    def come_again(self) -> None:
        """Somebody asks what was asked before, or goes on from there, while it is being stored or afterwards."""
        if not self.engine.asked:
            return
        if self.rng.random() < 0.5:
            self.settle()
        before = self.rng.choice(list(self.engine.asked.values()))
        answered = before.tokens if self.rng.random() < 0.5 else []
        self._ask([*before.prompt, *answered, *tokens(self.rng.choice([0, 0, 20]), 7)][:LONGEST], before.salt)

    def _ask(self, prompt: list[int], salt: str | None, **wish: Any) -> None:
        self.engine.add(prompt, count=self.rng.choice([1, 2, 20]), salt=salt, **wish)

    def step(self) -> None:
        for _ in range(self.rng.randrange(1, 7)):
            self.engine.step()

    def abort(self) -> None:
        if names := self.live():
            self.engine.abort(self.rng.choice(names))

    def settle(self) -> None:
        """vLLM's own prefix cache is emptied: what is reused from here on comes from the store."""
        self.engine.settle()
        assert not self.live()
        assert self.engine.reset(connector=self.rng.random() < 0.2)

    def preempt(self) -> None:
        if not self.engine.loading:
            self.engine.reset(running=True)

    def reset(self) -> None:
        """As for an update of the weights, which did not come. vLLM cannot reset its own cache while blocks are in use."""
        clean = self.engine.reset(connector=True)
        self.engine.drain()
        assert clean or self.engine.reset(connector=True)

    def update_weights(self) -> None:
        self.engine.drain()
        self.engine.model.weight.data[0] = 3.0 - self.engine.model.weight.data[0]
        assert self.engine.reset(connector=True)

    def spoil_store(self) -> None:
        self.store = self.rng.choice(["fails", "has nothing", "is slow"])

    def mend_store(self) -> None:
        self.store = "works"

    def damage(self) -> None:
        for path in segments(self.folder)[:3]:
            if self.rng.random() < 0.3:
                path.unlink(missing_ok=True)
                continue
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                spoil(path, self.rng.random())

    def restart(self) -> None:
        """A new process on the folder; weights that are not those of the checkpoint are brought in again."""
        self.engine.drain()
        weights, asked = self.engine.model.weight.data.clone(), self.engine.asked
        self.engine = self.start(self.extra, **self.size)
        self.engine.asked = asked
        if bool((weights != self.engine.model.weight.data).any()):
            self.engine.model.weight.data.copy_(weights)
            assert self.engine.reset(connector=True)

    def judge(self) -> None:
        asked = self.engine.asked
        for name in asked.keys() - self.judged:
            one = asked[name]
            wanted = answer(one.prompt, one.count, one.weight)
            assert one.tokens == wanted[: len(one.tokens)], f"request {name}: {one}"
            if one.told:
                assert one.tokens == wanted
                most = max(shared(one, other, answers=self.answers) for other in asked.values())
                assert one.told["tokens_reused"] <= most, one
                assert not one.told["approximate"]
                self.seen["reused"] += one.told["tokens_reused"] > 0
            if one.over:
                self.judged.add(name)

    def end(self) -> None:
        self.store = "works"
        self.engine.drain()
        self.judge()
        assert not self.live()
        for _ in range(20):  # a busy machine may be late with a load
            self.engine.forget()
            if self.engine.ask(BASES[0], salt="the end").told["tokens_reused"]:
                return
        raise AssertionError("after all that nothing is reused any more")


@pytest.mark.parametrize("number", range(SERVERS))
def test_whatever_happens_answers_are_exact_and_nothing_hangs(
    number: int, toy: Callable[..., ToyEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for turn in range(soak_rounds()):
        with monkeypatch.context() as patch:
            server = Server(random.Random(f"{soak_seed()}-{turn}-{number}"), toy, tmp_path / str(turn), patch)
            for _ in range(STEPS):
                server.happen()
            server.end()
        print(server.size, server.extra, dict(server.seen))
