"""Finding copied text: recall against brute force, time of a look-up and of an addition, memory.

    OMP_NUM_THREADS=1 python -m research.copied [--sizes 1000000,10000000] [--queries 100] [--json FILE] [--markdown FILE]

Two kinds of stored prompts, of 4,000 tokens each:

    distinct  the standard library and this repository's pages in SmolLM2's tokens, once; then tokens drawn as often as they
              come in that text
    passages  prompts put together of passages of that text (100 to 800 tokens), popular ones again and again, as retrieval
              does it: most fingerprints have more holders than are kept

A prompt that is looked up has 4,000 tokens, of which none, half or all stand in stored prompts, in pieces of 250 tokens or
in passages (less, where a passage was not stored yet). The truth is a sorted array of the hashes of all 32-token runs,
asked in the same run: it says which tokens are copied, not where they stand. Recall below the cap: the same over runs whose
fingerprints have at most 16 holders, which is what is guaranteed. Token ids of stored prompts are mapped from a file. Times
are of one thread: by the clock, and of the processor, which other work on the machine disturbs less.
"""

import argparse
import json
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dejakv.decide.copied.fingerprints import GUARANTEED, K, fingerprints
from dejakv.decide.copied.index import MAX_HOLDERS, CopiedIndex
from dejakv.decide.copied.search import Cover, cover
from dejakv.decide.copied.tokens import Ids, run_hashes
from dejakv.models import tokenizer_folder
from research.machine import machine

GOALS = {"look_up_ms": 5.0, "add_us": 2.0, "bytes": 4.0, "recall_below_cap": 1.0}
KINDS = ("none", "half", "all")
Row = dict[str, Any]


PROMPT, PIECE = 4_000, 250


def text_tokens() -> Ids:
    """The standard library without its tests, and the pages of this repository, one after the other."""
    tokenizer = Tokenizer.from_file(str(Path(tokenizer_folder("smollm2-135m")) / "tokenizer.json"))
    library = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(library.rglob("*.py"))
        if not {"site-packages", "test", "tests", "idle_test"} & set(path.relative_to(library).parts)
    ]
    files += sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    texts = [path.read_text(errors="replace") for path in files]
    return np.concatenate([np.array(tokenizer.encode(text).ids, np.int64) for text in texts])


@dataclass
class Source:
    """Where prompts come from."""

    text: Ids
    rng: np.random.Generator

    def __post_init__(self) -> None:
        cuts = np.cumsum(self.rng.integers(100, 800, len(self.text) // 450))
        self.passages = np.split(self.text, cuts[cuts < len(self.text) - 100])
        self.rng.shuffle(self.passages)

    def fresh(self, tokens: int) -> Ids:
        """Tokens drawn from the text, in no order."""
        return self.text[self.rng.integers(0, len(self.text), tokens)]

    def distinct(self, tokens: int) -> Ids:
        text = self.text[:tokens]
        return np.concatenate([text, self.fresh(tokens - len(text))])

    def of_passages(self, tokens: int) -> Ids:
        """Passages in a row; the one of rank r is drawn as often as 1 / r says."""
        ranks = np.exp(self.rng.random(tokens // 200) * np.log(len(self.passages))).astype(np.int64) - 1
        parts = [self.passages[rank] for rank in ranks.tolist()]
        return np.concatenate(parts)[:tokens]

    def query(self, workload: str, kind: str, stored: Ids) -> Ids:
        if kind == "none":
            return self.fresh(PROMPT)
        pieces = [self.of_passages(PROMPT)] if workload == "passages" else []
        while sum(map(len, pieces)) < PROMPT:
            start = int(self.rng.integers(0, len(stored) - PIECE))
            pieces.append(stored[start : start + PIECE])
        whole = np.concatenate(pieces)[:PROMPT]
        if kind == "half":
            fresh = np.arange(PROMPT) // PIECE % 2 == 1
            whole[fresh] = self.fresh(int(fresh.sum()))
        return whole


class Truth:
    """Every run of 32 tokens of every stored prompt, by its hash."""

    def __init__(self, segments: NDArray[np.int64]) -> None:
        self.runs = np.unique(np.concatenate([run_hashes(segment, GUARANTEED) for segment in segments]))
        keys = np.concatenate([fingerprints(segment).keys for segment in segments])
        self.keys, self.holders = np.unique(keys, return_counts=True)

    def known(self, target: Ids) -> NDArray[np.bool_]:
        """Which runs of the prompt are stored."""
        hashes = run_hashes(target, GUARANTEED)
        place = np.minimum(np.searchsorted(self.runs, hashes), len(self.runs) - 1)
        return self.runs[place] == hashes

    def crowded(self, target: Ids) -> NDArray[np.bool_]:
        """Which runs of the prompt contain a fingerprint with more holders than are kept."""
        found = fingerprints(target)
        place = np.minimum(np.searchsorted(self.keys, found.keys), len(self.keys) - 1)
        many = (self.keys[place] == found.keys) & (self.holders[place] > MAX_HOLDERS)
        marks = np.zeros(len(target) + 1, np.int64)
        marks[1 + found.positions[many]] = 1
        counted = np.cumsum(marks)
        starts = np.arange(len(target) - GUARANTEED + 1)
        return counted[starts + GUARANTEED - K + 1] > counted[starts]


def spread_over(runs: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Tokens that stand in marked runs."""
    edges = np.zeros(len(runs) + GUARANTEED, np.int64)
    edges[: len(runs)] += runs
    edges[GUARANTEED:] -= runs
    return np.cumsum(edges)[: len(runs) + GUARANTEED - 1] > 0


def tokens_in(found: Cover) -> NDArray[np.bool_]:
    marked = np.zeros(found.tokens, np.bool_)
    for run in found.runs:
        marked[run.start : run.start + run.length] = True
    return marked


def check(target: Ids, found: Cover, mapped: NDArray[np.int64]) -> None:
    for run in found.runs:
        there = mapped[int(run.donor)][run.source : run.source + run.length]
        assert np.array_equal(there, target[run.start : run.start + run.length])


def quantiles(values: Sequence[float], scale: float) -> dict[str, float]:
    low, middle, high = np.percentile(np.asarray(values) * scale, [10, 50, 90])
    return {"p10": float(low), "p50": float(middle), "p90": float(high)}


def timed(call: Any) -> tuple[Any, float, float]:
    clock, processor = time.perf_counter(), time.thread_time()
    result = call()
    return result, time.perf_counter() - clock, time.thread_time() - processor


def measure(source: Source, workload: str, size: int, queries: int, folder: Path) -> Iterator[Row]:
    stored = source.distinct(size) if workload == "distinct" else source.of_passages(size)
    path = folder / f"{workload}-{size}"
    stored = stored[: len(stored) // PROMPT * PROMPT]
    stored.reshape(-1, PROMPT).tofile(path)
    mapped = np.memmap(path, np.int64, "r").reshape(-1, PROMPT)
    index = CopiedIndex()
    added: list[tuple[float, float]] = []
    for number, segment in enumerate(mapped):
        _, clock, processor = timed(lambda n=number, s=segment: index.add(str(n), fingerprints(np.asarray(s))))
        added.append((clock, processor))
    clocks, processors = np.array(added).T / PROMPT
    about = {"workload": workload, "tokens": len(stored)}
    yield {
        "what": "add", **about, "us_a_token": float(clocks.mean() * 1e6), "processor_us_a_token": float(processors.mean() * 1e6),
        "clock": quantiles(clocks, 1e6), "processor": quantiles(processors, 1e6), "slowest_prompt_ms": float(clocks.max() * PROMPT * 1e3),
        "bytes_a_token": index.nbytes / len(stored), "places_a_token": index.entries / len(stored),
    }  # fmt: skip
    truth = Truth(mapped)

    def look_up(target: Ids) -> Cover:
        return cover(target, index, lambda name: mapped[int(name)])

    wanted = [(kind, source.query(workload, kind, stored)) for _ in range(queries) for kind in KINDS]
    for _, target in wanted[: len(KINDS)]:
        look_up(target)
        truth.known(target)
    taken: dict[str, list[tuple[float, float, float, float]]] = {kind: [] for kind in KINDS}
    sums = {kind: np.zeros(6, np.int64) for kind in KINDS}
    for kind, target in wanted:
        found, clock, processor = timed(lambda t=target: look_up(t))
        known, clock_truth, processor_truth = timed(lambda t=target: truth.known(t))
        taken[kind].append((clock, processor, clock_truth, processor_truth))
        check(target, found, mapped)
        marked, copied = tokens_in(found), spread_over(known)
        below = spread_over(known & ~truth.crowded(target))
        assert not (marked & ~copied).any()
        sums[kind] += [
            copied.sum(), found.covered, below.sum(), (marked & below).sum(), len(found.donors), found.candidates
        ]  # fmt: skip
    for kind in KINDS:
        clock, processor, clock_truth, processor_truth = np.array(taken[kind]).T
        copied, covered, below, covered_below, donors, compared = (int(x) for x in sums[kind])
        yield {
            "what": kind, **about, "clock": quantiles(clock, 1e3), "processor": quantiles(processor, 1e3),
            "truth_clock": quantiles(clock_truth, 1e3), "truth_processor": quantiles(processor_truth, 1e3),
            "truth_bytes_a_token": truth.runs.nbytes / len(stored),
            "copied": copied / queries, "recall": covered / copied if copied else None,
            "recall_below_cap": covered_below / below if below else None,
            "below_cap": below / copied if copied else None, "donors": donors / queries, "compared": compared / queries,
        }  # fmt: skip
    if workload == "distinct":
        yield from hard(index, mapped, about)


def hard(index: CopiedIndex, mapped: NDArray[np.int64], about: Row) -> Iterator[Row]:
    """Prompts that could be slow: one token repeated, which a stored prompt holds as well, and 100,000 tokens."""
    sevens = np.full(PROMPT, 7)
    index.add("sevens", fingerprints(sevens))
    long = np.asarray(mapped[:25]).reshape(-1)

    def look_up(target: Ids) -> Cover:
        return cover(target, index, lambda name: sevens if name == "sevens" else mapped[int(name)])

    for name, target in {
        "one token": sevens, "one token, 100,000": np.full(100_000, 7), "all, 100,000": long, "empty": sevens[:0]
    }.items():  # fmt: skip
        taken: list[tuple[float, float]] = []
        for _ in range(10):
            found, clock, processor = timed(lambda t=target: look_up(t))
            taken.append((clock, processor))
        clock, processor = np.array(taken).T
        yield {
            "what": name, **about, "clock": quantiles(clock, 1e3), "processor": quantiles(processor, 1e3),
            "covered": found.covered, "compared": found.candidates,
        }  # fmt: skip


def middle(of: Row) -> str:
    return f"{of['p50']:.2f} ({of['p10']:.2f} to {of['p90']:.2f})"


def page(report: Row) -> str:
    rows: list[Row] = report["rows"]
    lines = [
        "# Finding copied text",
        "",
        __doc__.split("\n\n", 2)[2].strip(),
        "",
        "Medians (10th to 90th percentile).",
        "",
    ]
    lines += ["| stored prompts | tokens | add, µs a token | processor | whole stream, mean | slowest prompt, ms | bytes a token | places a token |", "|---|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    lines += [
        f"| {row['workload']} | {row['tokens']:,} | {middle(row['clock'])} | {middle(row['processor'])} | "
        f"{row['us_a_token']:.2f} (processor {row['processor_us_a_token']:.2f}) | {row['slowest_prompt_ms']:.0f} | "
        f"{row['bytes_a_token']:.2f} | {row['places_a_token']:.3f} |"
        for row in rows
        if row["what"] == "add"
    ]
    lines += ["", "| stored prompts | tokens | copied of 4,000 | look-up, ms | processor | every run hashed, ms | its bytes a token | recall | below the cap | share of it | places compared | donors |", "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    lines += [
        f"| {row['workload']} | {row['tokens']:,} | {row['what']}: {row['copied']:.0f} | {middle(row['clock'])} | {middle(row['processor'])} | "
        f"{middle(row['truth_clock'])} | {row['truth_bytes_a_token']:.1f} | {share(row['recall'])} | "
        f"{share(row['recall_below_cap'])} | {share(row['below_cap'])} | {row['compared']:.0f} | {row['donors']:.1f} |"
        for row in rows
        if row["what"] in KINDS
    ]
    lines += ["", "| hard prompts | tokens indexed | look-up, ms | processor | covered | places compared |", "|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    lines += [
        f"| {row['what']} | {row['tokens']:,} | {middle(row['clock'])} | {middle(row['processor'])} | {row['covered']:,} | {row['compared']} |"
        for row in rows
        if "covered" in row
    ]
    lines += ["", *[f"- {line}" for line in goals(rows)], ""]
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in report["machine"].items())
    return "\n".join([*lines, f"Machine: {facts}.", "", f"Command: `{report['command']}`", ""])


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def goals(rows: Sequence[Row]) -> Iterator[str]:
    """The goals of the design, with the worst that was measured."""
    asked = [row for row in rows if row["what"] in KINDS]
    slow = max(asked, key=lambda row: row["processor"]["p50"])
    yield (
        f"slowest look-up of 4,000 tokens ({slow['workload']}, {slow['what']}, {slow['tokens']:,} tokens): "
        f"{slow['processor']['p50']:.2f} ms of the processor, {slow['clock']['p50']:.2f} ms by the clock (goal: {GOALS['look_up_ms']})"
    )
    adds = [row for row in rows if row["what"] == "add"]
    yield (
        f"dearest addition: {max(row['processor_us_a_token'] for row in adds):.2f} µs a token of the processor, "
        f"{max(row['us_a_token'] for row in adds):.2f} by the clock (goal: {GOALS['add_us']})"
    )
    yield f"most memory: {max(row['bytes_a_token'] for row in adds):.2f} bytes a token (goal: {GOALS['bytes']})"
    recalls = [row["recall_below_cap"] for row in asked if row["recall_below_cap"] is not None]
    yield f"least recall below the cap of holders: {min(recalls):.4f} (goal: {GOALS['recall_below_cap']})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="1000000,10000000", help="tokens indexed")
    parser.add_argument("--queries", type=int, default=100, help="look-ups of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    report: Row = {
        "machine": {**machine(), "numpy": np.__version__},
        "command": "OMP_NUM_THREADS=1 python -m research.copied " + " ".join(sys.argv[1:]),
    }
    rows: list[Row] = []
    text = text_tokens()
    report["text_tokens"] = len(text)
    with tempfile.TemporaryDirectory() as folder:
        for size in map(int, given.sizes.split(",")):
            for workload in ("distinct", "passages"):
                source = Source(text, np.random.default_rng(given.seed))
                rows += measure(source, workload, size, given.queries, Path(folder))
                print(f"{workload}, {size:,} tokens done", file=sys.stderr)
    report["machine"]["load_average_at_end"] = machine()["load_average"]
    report["rows"] = rows
    print(page(report))
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    if given.markdown:
        given.markdown.write_text(page(report))


if __name__ == "__main__":
    main()
