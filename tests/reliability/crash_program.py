"""Processes that share one store and are killed. Run as a program: it imports once and forks, so a round costs no start.

In each round, four processes put, get, delete, flush, close and reopen; some are killed with SIGKILL at a random moment, the
others are asked to end. Each writes down what it is about to do and what came of it, in a file of its own, which survives it.
Each puts only stored states of its own numbers, so the latest entry of its file says what the store must hold.

Prints one JSON object: kills, puts that returned True, entries read, and the faults found.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dejakv.identity import exact_key
from dejakv.store.base import RawTensor, StateInfo, StoredState
from dejakv.store.open import open_store

WORKERS = 4
NUMBERS = 12
PUTS_BEFORE_KILLS, PUTS_IN_PEACE = 2, 20
"""Of each process: how many must have returned True before the kills of every second round, and after which it ends unkilled."""
LONGEST_S = 60.0
"""Within which a process ends that nobody ends."""
SIZES = (200, 5_000, 40_000, 300_000)


def id_of(worker: int, number: int) -> str:
    return exact_key(f"p{number % 3}", "e", (worker, number), ())


def content(worker: int, number: int, generation: int) -> NDArray[np.float32]:
    ramp = np.arange(SIZES[number % len(SIZES)], dtype=np.float32) % 251
    return ramp + np.float32(1000 * worker + 10 * number + generation % 7)


def state_of(worker: int, number: int, generation: int) -> StoredState:
    meta = StateInfo(
        id=id_of(worker, number),
        partition=f"p{number % 3}",
        epoch="e",
        token_ids=(worker, number),
        prompt=str(generation),
        chunk="",
    )
    return StoredState(meta, RawTensor(content(worker, number, generation), "F32"))


def is_whole(stored_state: StoredState) -> bool:
    worker, number = stored_state.meta.token_ids
    return np.array_equal(stored_state.tensor.data, content(worker, number, int(stored_state.meta.prompt)))


def work(
    folder: Path, journal: int, worker: int, seed: int, first: int, budget: dict[str, int], most_puts: int | None
) -> None:
    """One process's part; returns after its puts, when it is asked to, or never."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    rnd = random.Random(seed)

    def note(*words: object) -> None:
        os.write(journal, (" ".join(map(str, words)) + "\n").encode())

    store = open_store(folder, **budget)
    generation, stored = first, 0
    end = time.monotonic() + LONGEST_S
    while not asked and stored != most_puts and time.monotonic() < end:
        number, choice = rnd.randrange(NUMBERS), rnd.random()
        if choice < 0.5:
            generation += 1
            note("put", number, generation)
            done = store.put(state_of(worker, number, generation))
            stored += done
            note("put-done", number, generation, int(done))
        elif choice < 0.8:
            found = store.get(id_of(rnd.randrange(WORKERS), number))
            if found is not None and not is_whole(found):
                note("torn")
        elif choice < 0.88:
            note("delete", number)
            note("delete-done", number, int(store.delete(id_of(worker, number))))
        elif choice < 0.94:
            store.flush()
        else:
            note("refused", json.dumps(store.stats().refused))
            note("corrupt", store.stats().corrupt)
            store.close()
            store = open_store(folder, **budget)
    note("refused", json.dumps(store.stats().refused))
    note("corrupt", store.stats().corrupt)
    store.close()


def fork(body: Callable[..., None], *arguments: object) -> int:
    """Runs it in a child that ends with it; the child's id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        body(*arguments)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def expected(lines: list[str], held: dict[int, set[int]]) -> None:
    """Brings up to date what generations of each number may be there: 0 stands for none."""
    for line in lines:
        what, *rest = line.split()
        if what == "put":
            held[int(rest[0])] = held.get(int(rest[0]), {0}) | {int(rest[1])}
        elif what == "put-done" and rest[2] == "1":
            held[int(rest[0])] = {int(rest[1])}
        elif what == "delete":
            held[int(rest[0])] = held.get(int(rest[0]), {0}) | {0}
        elif what == "delete-done":
            held[int(rest[0])] = {0}


def rows_and_files(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    connection = sqlite3.connect(folder / "catalog.sqlite")
    rows = dict(
        connection.execute(
            "SELECT substr(name, 1, 2) || '/' || name || '.safetensors', nbytes FROM segments"
        ).fetchall()
    )
    connection.close()
    stored_states = folder / "segments"
    return rows, {str(path.relative_to(stored_states)): path.stat().st_size for path in stored_states.glob("*/*")}


def check(folder: Path, held: list[dict[int, set[int]]], budget: dict[str, int], report: int) -> None:
    """Compares a folder that nobody uses with what it must hold, and writes down what is wrong."""
    faults: Counter[str] = Counter()
    rows, present = rows_and_files(folder)
    faults["rows that lost their file"] += len(rows.keys() - present.keys())
    store = open_store(folder, **budget)  # removes files that a killed process was removing
    rows, present = rows_and_files(folder)
    faults["rows and files that disagree"] += rows != present
    faults["temporaries left"] += len(list((folder / "temporary").iterdir()))
    read: list[tuple[int, int, int]] = []
    for worker, numbers in enumerate(held):
        for number, generations in numbers.items():
            found = store.get(id_of(worker, number))
            read.append((worker, number, int(found.meta.prompt) if found else 0))
            if found is not None and not is_whole(found):
                faults["torn"] += 1
            elif found is None:
                faults["lost"] += not (budget or 0 in generations)
            else:
                faults["wrong"] += int(found.meta.prompt) not in generations
    stats = store.stats()
    faults["corrupt"] += stats.corrupt
    faults["totals"] += (stats.entries, stats.bytes) != totals(folder)
    if budget:
        faults["over budget"] += stats.entries > budget["max_entries"] or stats.bytes > budget["max_bytes"]
    store.close()
    os.write(report, json.dumps({"read": read, "faults": +faults}).encode())


def totals(folder: Path) -> tuple[int, int]:
    connection = sqlite3.connect(folder / "catalog.sqlite")
    found = connection.execute(
        "SELECT (SELECT count(*) FROM records), (SELECT coalesce(sum(nbytes), 0) FROM segments) + (SELECT coalesce(sum(nbytes), 0) FROM records)"
    ).fetchone()
    connection.close()
    return found


def puts_in(journal: Path) -> int:
    """How many puts returned True."""
    lines = journal.read_text().splitlines()
    return sum(line.startswith("put-done") and line.endswith(" 1") for line in lines)


def run_round(
    folder: Path, seed: int, number: int, budget: dict[str, int], held: list[dict[int, set[int]]], kill: bool
) -> Counter[str]:
    rnd = random.Random(seed)
    found: Counter[str] = Counter()
    first, most_puts = number * 1_000_000, None if kill else PUTS_IN_PEACE
    journals = [folder.parent / f"journal-{worker}" for worker in range(WORKERS)]
    children: list[int] = []
    for worker, path in enumerate(journals):
        journal = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        children.append(fork(work, folder, journal, worker, rnd.randrange(2**32), first, budget, most_puts))
        os.close(journal)
    victims = rnd.sample(children, rnd.randint(1, WORKERS)) if kill else []
    if kill and number % 2:  # in the other rounds some are killed before they store anything, on a busy machine all
        until = time.monotonic() + LONGEST_S
        while min(map(puts_in, journals)) < PUTS_BEFORE_KILLS and time.monotonic() < until:
            time.sleep(0.005)
    for child in victims:
        time.sleep(rnd.uniform(0.0, 0.08))
        os.kill(child, signal.SIGKILL)
    if kill:
        time.sleep(rnd.uniform(0.0, 0.05))
    for child in children:
        if child not in victims:
            if kill:
                os.kill(child, signal.SIGTERM)
            found["processes that failed"] += os.waitpid(child, 0)[1] != 0
        else:
            os.waitpid(child, 0)
            found["kills"] += 1
    for worker, path in enumerate(journals):
        lines = path.read_text().splitlines()
        expected(lines, held[worker])
        found["puts"] += puts_in(path)
        found["torn"] += lines.count("torn")
        found["corrupt"] += sum(line.startswith("corrupt") and line != "corrupt 0" for line in lines)
        found["refused"] += sum(line.startswith("refused") and line != "refused {}" for line in lines)
    reader, writer = os.pipe()
    child = fork(check, folder, held, budget, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    found["checks that failed"] += os.waitpid(child, 0)[1] != 0
    if said:
        answer = json.loads(said)
        found["read"] += sum(generation > 0 for _, _, generation in answer["read"])
        found.update(answer["faults"])
        for worker, number, generation in answer["read"]:
            held[worker][number] = {generation}  # what was uncertain is settled now
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="0: nobody is killed, in --rounds rounds")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--budget", action="store_true", help="under budgets, so that entries are evicted all the while"
    )
    options = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until a child is ready for it
    base = Path(tempfile.mkdtemp(prefix="dejakv-crash-"))
    budget = {"max_bytes": 3_000_000, "max_entries": 20} if options.budget else {}
    held: list[dict[int, set[int]]] = [{} for _ in range(WORKERS)]
    total: Counter[str] = Counter()
    number = 0
    while total["kills"] < options.kills if options.kills else number < options.rounds:
        seed = options.seed * 1_000_003 + number
        total.update(run_round(base / "store", seed, number, budget, held, bool(options.kills)))
        number += 1
    shutil.rmtree(base)
    numbers = {name: total.pop(name, 0) for name in ("kills", "puts", "read")}
    print(json.dumps({**numbers, "rounds": number, "faults": +total}))


if __name__ == "__main__":
    main()
