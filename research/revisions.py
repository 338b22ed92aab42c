"""Compare two revisions of DejaKV: time and tokens of the same requests, in turns, in a process each.

    git worktree add /tmp/before before-the-house
    python -m research.revisions --before /tmp/before --after . [--requests 12] [--output revisions.json]

Both processes load SmolLM2 and attach a cache on disk. Each prompt, a page of docstrings of installed packages, is sent to both
in turns: once as a miss, twice as an exact hit, and once with its paragraphs in another order, which is blended. The table has the
median of each, its 10th and 90th percentile, and the ratio after by before, pair by pair. Outputs must be equal for misses and hits.
"""

import argparse
import json
import os
import pydoc
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

MODULES = """
abc argparse ast asyncio base64 bdb bisect calendar cmd codecs configparser contextlib csv ctypes datetime
decimal difflib doctest email.message enum fileinput fractions ftplib functools gzip heapq html.parser
http.client imaplib inspect ipaddress json locale logging mailbox optparse pathlib pdb plistlib poplib profile
queue random selectors shelve shlex smtplib sqlite3 statistics string tarfile tempfile textwrap tokenize
traceback unittest urllib.request uuid wave xml.sax zipfile
"""
STEPS = ("miss", "hit", "hit again", "blend")

WORKER = """
import json, sys, tempfile, time
import torch
import dejakv
from dejakv import SemanticCacheConfig
from dejakv.models import load

torch.set_num_threads(1)
model, tokenizer = load("smollm2-135m")
model = model.float().eval()
with tempfile.TemporaryDirectory() as folder:
    config = SemanticCacheConfig(reuse="blend", semantic_text=False, embedding_layers=(), cache_dir=folder, costs=(0.001, 0.0, 0.0, 0.0))
    records = []
    with dejakv.attach(model, tokenizer, config, on_record=records.append) as cache:
        print("ready", flush=True)
        for line in sys.stdin:
            inputs = tokenizer(json.loads(line), return_tensors="pt")
            begun = time.perf_counter()
            tokens = model.generate(**inputs, max_new_tokens=1, do_sample=False)
            seconds = time.perf_counter() - begun
            cache.flush()
            record = records[-1]
            answer = {"seconds": seconds, "token": int(tokens[0, -1]), "method": record.method, "computed": record.computed_tokens}
            print(json.dumps({**answer, "tokens": record.prompt_tokens, "lookup_ms": record.lookup_ms}), flush=True)
"""


def prompts(count: int, seed: int) -> list[tuple[str, str]]:
    """Pages of four passages, and the same passages in another order."""
    passages = [pydoc.plain(pydoc.render_doc(name))[200:1400] for name in MODULES.split()]
    if 4 * count > len(passages):
        raise SystemExit(f"--requests {count}: at most {len(passages) // 4}, since no passage comes twice")
    random.Random(seed).shuffle(passages)
    made = []
    for number in range(count):
        chosen = passages[4 * number : 4 * number + 4]
        question = f"\n\nQuestion {number}: what is described above?"
        moved = chosen[1:] + chosen[:1]
        made.append(("\n\n".join(chosen) + question, "\n\n".join(moved) + question))
    return made


class Revision:
    """A process with one checkout's DejaKV."""

    def __init__(self, root: Path) -> None:
        sources = [root / "src", *root.glob("packages/*/src")]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, sources)),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", WORKER]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line()

    def ask(self, prompt: str) -> dict[str, Any]:
        """Send a prompt and return its measurements."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompt) + "\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def close(self) -> None:
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of a revision ended with {self._process.wait()}; its error stands above")
        return line


def measure(before: Path, after: Path, requests: int, seed: int) -> dict[str, Any]:
    """Run all prompts through both revisions in turns."""
    both = {"before": Revision(before), "after": Revision(after)}
    rows: list[dict[str, Any]] = []
    for number, (prompt, moved) in enumerate(prompts(requests, seed)):
        for step in STEPS:
            order = ["before", "after"] if number % 2 else ["after", "before"]
            row = {name: both[name].ask(moved if step == "blend" else prompt) for name in order}
            rows.append({"step": step, **row})
    for revision in both.values():
        revision.close()
    return {"rows": rows, "summary": {step: summary([row for row in rows if row["step"] == step]) for step in STEPS}}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians with the 10th and 90th percentile, and the ratio after by before."""

    def spread(values: list[float]) -> list[float]:
        cuts = statistics.quantiles(values, n=10)
        return [statistics.median(values), cuts[0], cuts[-1]]

    return {
        "before_ms": spread([1e3 * row["before"]["seconds"] for row in rows]),
        "after_ms": spread([1e3 * row["after"]["seconds"] for row in rows]),
        "ratio": spread([row["after"]["seconds"] / row["before"]["seconds"] for row in rows]),
        "computed": [sum(row[name]["computed"] for row in rows) for name in ("before", "after")],
        "methods": sorted({(row["before"]["method"], row["after"]["method"]) for row in rows}),
        "tokens_equal": sum(row["before"]["token"] == row["after"]["token"] for row in rows),
        "requests": len(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, default=Path())
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = measure(options.before.resolve(), options.after.resolve(), options.requests, options.seed)
    for step, row in found["summary"].items():
        before, after, ratio = (row[name] for name in ("before_ms", "after_ms", "ratio"))
        print(
            f"{step:10} before {before[0]:8.1f} ms  after {after[0]:8.1f} ms  ratio {ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})"
            f"  tokens computed {row['computed'][0]} {row['computed'][1]}  first tokens equal {row['tokens_equal']} of {row['requests']}"
            f"  {', '.join('/'.join(pair) for pair in row['methods'])}"
        )
    if options.output:
        options.output.write_text(json.dumps(found["summary"], indent=1) + "\n")


if __name__ == "__main__":
    main()
