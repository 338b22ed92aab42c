"""Hit rate of several machines' evictions in one store, with and without knowing each other's uses, and with one that evicts alone:
`python -m research.many_machines.evictions`. Deterministic; objects in memory, so that it runs without services."""

import random

from dejakv.store import Store
from dejakv.store.budgets import Budget
from dejakv.store.objects import Memory
from dejakv.testing.chunks import make_chunk

STEPS, PROMPTS, HELD, SIZE = 2000, 400, 80, 2000


class Shared(Memory):
    shared = True


def hit_rate(machines: int, every: int, how: str) -> float:
    """Of the last two thirds of requests, Zipf-distributed and spread at random.

    every  requests between two looks at what others did
    how    `alone`: each evicts by its own uses; `lease`: of those that look, the first evicts alone; `uses`: all know all uses
    """
    rng, objects, chunks = random.Random(0), Shared(), [make_chunk(n, nbytes=SIZE - 800) for n in range(PROMPTS)]
    weights = [1 / (n + 1) ** 0.9 for n in range(PROMPTS)]
    stores = [Store(objects, budget=Budget(HELD * SIZE), background=False) for _ in range(machines)]
    hits = asked = 0
    for step in range(STEPS):
        chunk, store = chunks[rng.choices(range(PROMPTS), weights)[0]], rng.choice(stores)
        found = store.get(chunk.meta.id) is not None
        if not found:
            store.put(chunk)
        if step > STEPS // 3:
            asked, hits = asked + 1, hits + found
        if step % every == 0:
            told = [one._notes.take_untold() for one in stores]
            for number, one in enumerate(stores):
                budget = one._budget
                if how == "lease" and number:
                    one._budget = Budget()
                one.catch_up()
                one._budget = budget
                if how == "uses":
                    one._share_uses([id for other, ids in enumerate(told) if other != number for id in ids])
    return hits / asked


def main() -> None:
    print(f"one machine: {hit_rate(1, 1, 'alone'):.1%}")
    for every in (1, 20):
        rates = ", ".join(f"{how} {hit_rate(4, every, how):.1%}" for how in ("alone", "lease", "uses"))
        print(f"four machines that look every {every} requests: {rates}")


if __name__ == "__main__":
    main()
