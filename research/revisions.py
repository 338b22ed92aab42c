"""Two revisions side by side: what the same requests take in each, and whether answers are equal.

    git worktree add ../before REVISION
    python -m research.revisions --before ../before [--parts hits,lookup,repo,rag,ttft,decoding]
    [--rounds 2] [--vllm-python .venv-vllm/bin/python] --output FILE.json

Each part runs in a process of its own from each folder, in turns (before, after, after, before),
with the packages of one environment. `hits`: first tokens of misses and exact hits by
`dejakv.attach`. `lookup`: look-ups among 100,000 entries. `repo`, `rag`: 30 requests of the preset
with blends, first tokens request by request. `ttft`, `decoding`: `research.vllm`'s benchmarks of
first tokens and of tokens beside arriving blends. Ratios are after by before: below 1 is faster.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from research.command import run
from research.machine import measured

HERE = Path(__file__).parents[1]
REQUESTS = 30

HITS = """
import json, sys, sysconfig, time
from pathlib import Path
import dejakv
from dejakv.config import SemanticCacheConfig
from dejakv.models import load

name, prompts, length, times, output = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
model, tokenizer = load(name)
paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
texts = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
long_texts = [text for text in texts if len(text) > 8 * length][: prompts + 1]
times_ms, answers = {"miss": [], "hit": []}, {"miss": [], "hit": []}
with dejakv.attach(model, tokenizer, SemanticCacheConfig(reuse="exact")) as cache:
    for number, text in enumerate(long_texts):
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=length)
        for turn in range(times + 1):
            way = "hit" if turn else "miss"
            start = time.perf_counter()
            answer = model.generate(**inputs, max_new_tokens=1, do_sample=False)
            if number:  # the first prompt warms up
                times_ms[way].append(1e3 * (time.perf_counter() - start))
                answers[way].append(answer[0, -1].item())
            cache.store.flush()
Path(output).write_text(json.dumps({"times": times_ms, "answers": answers}))
"""


@dataclass
class PartRun:
    """What one revision's run of a part gave.

    Attributes
    ----------
    times : dict of str to list of float
        By what was timed: times, in the same order in each revision.
    counts : dict of str to float
        Tokens and shares that do not depend on the machine's load.
    answers : dict of str to list
        By what was asked: answers, in the same order in each revision.
    """

    times: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    counts: dict[str, float] = field(default_factory=dict[str, float])
    answers: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])


@dataclass(frozen=True)
class Part:
    """A part: the command that writes to a path, what is read from there, and whose Python."""

    command: Callable[[str, Path], list[str]]
    read: Callable[[Path], PartRun]
    vllm: bool = False


def _read_hits(path: Path) -> PartRun:
    values = json.loads(path.read_text())
    return PartRun(values["times"], {}, values["answers"])


def _read_lookup(path: Path) -> PartRun:
    rows = json.loads(path.read_text())["rows"]
    return PartRun({row["what"]: [row["p50_us"]] for row in rows})


def _read_preset(path: Path) -> PartRun:
    summary = json.loads((path / "summary.json").read_text())
    lines = (path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    arms = list(summary["arms"])
    times = {arm: [sample["arms"][arm]["ttft_ms"] for sample in samples] for arm in arms}
    answers = {arm: [sample["arms"][arm]["text"] for sample in samples] for arm in arms}
    tokens = {f"{arm}, tokens": summary["arms"][arm]["computed_tokens"] for arm in arms}
    kept = {"first tokens of full computation": summary["agreement_first"]}
    return PartRun(times, tokens | kept, answers)


def _read_ttft(path: Path) -> PartRun:
    (row,) = json.loads(path.read_text())["rows"]
    counts = {"exact answers equal": row["exact_answers_equal"], "blend, rows": row["blend_rows"]}
    return PartRun({way: [row[f"{way}_ms"]] for way in ("full", "exact", "blend")}, counts)


def _read_decoding(path: Path) -> PartRun:
    row = json.loads(path.read_text())
    ways = ("blends", "prefills", "alone")
    times = {f"{way}, {name}": [row[way][name]] for way in ways for name in ("p50_ms", "p99_ms")}
    return PartRun(times, {"rows": row["rows"]})


def _preset_command(preset: str) -> Callable[[str, Path], list[str]]:
    options = f"--max-samples {REQUESTS} --max-new-tokens 8 --arms prefix,cache --brief"
    return lambda model, path: [
        *("-m", "dejakv", "run", "--preset", preset, "--model", model, *options.split()),
        *("--output", str(path)),
    ]


def _vllm_command(benchmark: str, options: str) -> Callable[[str, Path], list[str]]:
    words = ["-m", "research.vllm", benchmark, "--pairs", "1", *options.split(), "--output"]
    return lambda model, path: [*words, str(path)]


PARTS = {
    "hits": Part(lambda model, path: ["-c", HITS, model, "8", "800", "5", str(path)], _read_hits),
    "lookup": Part(
        lambda model, path: [
            *"-m research.lookup --sizes 100000 --gptcache-up-to 0 --latent-up-to 0".split(),
            *("--json", str(path)),
        ],
        _read_lookup,
    ),
    "repo": Part(_preset_command("repo"), _read_preset),
    "rag": Part(_preset_command("rag"), _read_preset),
    "ttft": Part(_vllm_command("ttft", "--only similarity --prompts 6"), _read_ttft, vllm=True),
    "decoding": Part(_vllm_command("decoding", "--prompts 3"), _read_decoding, vllm=True),
}


def turns(rounds: int) -> list[str]:
    """Return which revision runs when: before, after, after, before, and so on."""
    order = ["before", "after"]
    orders = [order if number % 2 == 0 else order[::-1] for number in range(rounds)]
    return [name for names in orders for name in names]


def compare(before: Iterable[PartRun], after: Iterable[PartRun]) -> dict[str, Any]:
    """Return the ratios of times, counts of both, and the shares of answers that are equal.

    Parameters
    ----------
    before, after : iterable of PartRun
        The runs of each revision, round by round.

    Returns
    -------
    dict
        `times`: by name the medians of both, and the median, 10th and 90th percentile of the
        ratios of pairs; `counts`; `answers_equal`.
    """
    pairs = list(zip(before, after, strict=True))
    first, second = pairs[0]
    result: dict[str, Any] = {"times": {}, "counts": {}, "answers_equal": {}}
    for name in first.times.keys() & second.times.keys():
        old = [value for run, _ in pairs for value in run.times[name]]
        new = [value for _, run in pairs for value in run.times[name]]
        ratios = [after / before for before, after in zip(old, new, strict=True)]
        p10, p50, p90 = np.percentile(ratios, (10, 50, 90)).round(3).tolist()
        result["times"][name] = {
            "before": round(statistics.median(old), 3),
            "after": round(statistics.median(new), 3),
            "ratio": {"p10": p10, "p50": p50, "p90": p90},
            "pairs": len(ratios),
        }
    for name in first.counts.keys() & second.counts.keys():
        result["counts"][name] = {"before": first.counts[name], "after": second.counts[name]}
    for name in first.answers.keys() & second.answers.keys():
        equal = [a == b for a, b in zip(first.answers[name], second.answers[name], strict=True)]
        result["answers_equal"][name] = {"equal": sum(equal), "of": len(equal)}
    return result


def _run(part: Part, folder: Path, python: str, model: str, path: Path) -> PartRun:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}",
        "OMP_NUM_THREADS": "1",
    }
    command = [python, "-W", "ignore", *part.command(model, path)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{folder}: {' '.join(command[3:])[:200]}\n{done.stderr[-3000:]}")
    return part.read(path)


def main(
    before: Annotated[Path, typer.Option(help="Folder of the earlier revision.")],
    output: Annotated[Path, typer.Option(help="JSON of the figures.")],
    parts: Annotated[str, typer.Option(help="Parts, by commas.")] = ",".join(PARTS),
    rounds: Annotated[int, typer.Option(min=1, help="How often each revision runs.")] = 2,
    model: Annotated[str, typer.Option(help="Model of the parts without vLLM.")] = "smollm2-135m",
    vllm_python: Annotated[str, typer.Option()] = str(HERE / ".venv-vllm/bin/python"),
) -> None:
    """Compare this checkout with an earlier one, in turns."""
    folders = {"before": before.resolve(), "after": HERE}
    figures: dict[str, Any] = measured("research.revisions") | {"parts": {}}
    for name in parts.split(","):
        part, runs = PARTS[name], dict[str, list[PartRun]](before=[], after=[])
        for number, revision in enumerate(turns(rounds)):
            with tempfile.TemporaryDirectory() as folder:
                python = vllm_python if part.vllm else sys.executable
                path = Path(folder) / "figures"
                runs[revision].append(_run(part, folders[revision], python, model, path))
            print(f"{name}: {revision}, run {number + 1} of {2 * rounds}", file=sys.stderr)
        figures["parts"][name] = compare(runs["before"], runs["after"])
        output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        print(json.dumps({name: figures["parts"][name]}, indent=1))


if __name__ == "__main__":
    run(main)
