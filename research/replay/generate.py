"""A made-up trace in Mooncake's format, from a seed.

Four kinds of traffic are mixed as a chat service sees them.
"""

import heapq
import json
import random
from bisect import bisect
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import typer

from dejakv.experiments.output import make_folder, refuse_existing, replace_file
from research.command import run

BLOCK = 512
KINDS = (("conversation", 0.45), ("documents", 0.25), ("agents", 0.2), ("single", 0.1))
DOCUMENTS = 2000
INSTRUCTIONS = 12
REQUESTS_A_SECOND = 2.5


def generate(requests: int, seed: int = 0) -> list[dict[str, Any]]:
    """The records of a trace, in the order of time."""
    world = World(random.Random(seed))
    records: list[dict[str, Any]] = []
    while len(records) < requests:
        records.append(world.next())
    return records


class World:
    """What goes on: clock, running conversations, documents, instructions and ids so far."""

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self._now = 0.0
        self._ids = 0
        self._turns: list[tuple[float, int, int, tuple[int, ...]]] = []
        self._documents: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._popularity = list(accumulate(1 / (rank + 1) ** 0.9 for rank in range(DOCUMENTS)))
        self._instructions = [
            self._grown((), 0, self._length(3000, 0.5)) for _ in range(INSTRUCTIONS)
        ]

    def next(self) -> dict[str, Any]:
        """The next request: a due turn of a conversation, or something new."""
        self._now += self._random.expovariate(REQUESTS_A_SECOND)
        if self._turns and self._turns[0][0] <= self._now:
            _, _, tokens, blocks = heapq.heappop(self._turns)
            return self._turn(tokens, blocks)
        kind = self._random.choices([name for name, _ in KINDS], [weight for _, weight in KINDS])[0]
        if kind == "conversation":
            return self._turn(0, ())
        if kind == "documents":
            tokens, blocks = self._document()
            return self._record(*self._grown(blocks, tokens, self._length(60, 0.6)), 80)
        if kind == "agents":
            tokens, blocks = self._random.choice(self._instructions)
            return self._record(*self._grown(blocks, tokens, self._length(4000, 1.0)), 200)
        return self._record(*self._grown((), 0, self._length(2500, 1.1)), 250)

    def _turn(self, tokens: int, blocks: tuple[int, ...]) -> dict[str, Any]:
        tokens, blocks = self._grown(blocks, tokens, self._length(500, 1.0))
        record = self._record(tokens, blocks, 250)
        if self._random.random() < 0.8 and tokens < 100_000:
            due = self._now + self._random.lognormvariate(4.2, 1.0)  # a minute or so later
            answered = self._grown(blocks, tokens, int(record["output_length"]))
            heapq.heappush(self._turns, (due, self._ids, *answered))
        return record

    def _document(self) -> tuple[int, tuple[int, ...]]:
        rank = bisect(self._popularity, self._random.random() * self._popularity[-1])
        if rank not in self._documents:
            self._documents[rank] = self._grown((), 0, self._length(9000, 0.8))
        return self._documents[rank]

    def _grown(
        self, blocks: tuple[int, ...], tokens: int, more: int
    ) -> tuple[int, tuple[int, ...]]:
        """A prompt with more tokens behind it: its full blocks stay, all others are new."""
        total = tokens + more
        kept = blocks[: tokens // BLOCK]
        new = range(self._ids, self._ids + -(-total // BLOCK) - len(kept))
        self._ids = new.stop
        return total, (*kept, *new)

    def _length(self, median: int, spread: float) -> int:
        return max(1, min(100_000, round(median * self._random.lognormvariate(0, spread))))

    def _record(self, tokens: int, blocks: tuple[int, ...], answer: int) -> dict[str, Any]:
        return {
            "timestamp": round(1e3 * self._now),
            "input_length": tokens,
            "output_length": self._length(answer, 0.8),
            "hash_ids": list(blocks),
        }


def write_generated(
    file: Annotated[Path, typer.Argument(help="New file to write, .jsonl.")],
    requests: Annotated[int, typer.Option(min=1, help="Requests in the trace.")] = 100_000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same trace.")] = 0,
) -> None:
    """Write a made-up trace in Mooncake's format: conversations, documents, agents and single
    prompts.
    """
    refuse_existing(file, "the trace")
    make_folder(file.parent, "the folder")
    replace_file(
        file, "".join(json.dumps(record) + "\n" for record in generate(requests, seed)), "the trace"
    )
    typer.echo(f"{requests:,} requests written to {file}")


if __name__ == "__main__":
    run(write_generated)
