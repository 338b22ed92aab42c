"""Where the processor's time goes while an engine answers prompts that reuse nothing, capture on: CPU seconds of each thread.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/vllm_threads.py [--model smollm2-135m] [--prompts 96]

Beside `vllm_misses.py`, whose throughput depends on what else the machine does: CPU seconds hardly do. `dejakv-save` is the saver:
it puts copies in order, sums them and writes them. The main thread is the engine's, with the connector's part of its loop.
"""

import argparse
import json
import os
import random
import tempfile
import threading
from collections import Counter
from pathlib import Path

import vllm_bench
from vllm_bench import Server, tokens

BATCH = 8
NAMED = ("MainThread", "dejakv-save", "dejakv-lookup", "dejakv-index", "dejakv-refresh")


def spent() -> Counter[str]:
    """CPU seconds of this process's threads so far, by name; those that Python does not know are `native`."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        name = names.get(int(task.name), "native")
        name = next((known for known in NAMED if name.startswith(known)), "native")
        found[name] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def measure(prompts: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server, rng = Server({"store_dir": f"{folder}/kv"}), random.Random(0)
        load = [tokens(rng.choice([64, 200, 400, 800]), index) for index in range(BATCH + prompts)]
        server.run(load[:BATCH])
        server.stored()
        before = spent()
        for first in range(BATCH, len(load), BATCH):
            server.run(load[first : first + BATCH])
        server.stored()
        took = spent() - before
    whole = sum(took.values())
    return {
        "model": vllm_bench.MODEL,
        "prompt_tokens": sum(map(len, load[BATCH:])),
        "cpu_seconds": {name: round(seconds, 2) for name, seconds in took.items()},
        "share": {name: f"{seconds / whole:.1%}" for name, seconds in took.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=vllm_bench.NAMES, default=vllm_bench.MODEL)
    parser.add_argument("--prompts", type=int, default=96)
    args = parser.parse_args()
    vllm_bench.MODEL = args.model
    print(json.dumps(measure(args.prompts), indent=2))


if __name__ == "__main__":
    main()
