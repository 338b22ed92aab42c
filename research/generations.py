"""What becomes of answers as rows that a blend computed serve the next blend, and so on: KL and top-1 by generation.

    python -m research.generations --cases 40 --output runs/generations

Each case is a prompt of passages of real text (the frontier's) that asks for a summary. Each passage's state comes from another prompt:
in generation 0 from one that was computed in full, in generation g from a blended prompt `[filler, passage, next filler]` in
which only the first filler was reused, with state of generation g - 1. The prompt is then blended from these passages, and compared
with full computation along 16 tokens of its own greedy answer (teacher forcing), beside the same model in bf16. The same
passages are used in every generation, behind fillers of their own. No two passages of a case share text.

Each finished case is a line of `cases.jsonl`; the same command goes on with what is missing. Mind that the passages are the
documentation of this Python version's standard library.
"""

import argparse
import csv
import datetime
import json
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.blend.blend import BlendReport
from dejakv.blend.settings import BlendConfig
from dejakv.cache import described_rows
from dejakv.decide.copied.fingerprints import GUARANTEED
from dejakv.engines.base import Completion, Prepared
from dejakv.engines.transformers import TransformersEngine
from dejakv.engines.transformers.continuation import twin_of
from dejakv.errors import ConfigError, DejaKVError, ModelError
from dejakv.experiments.fidelity import STEPS
from dejakv.identity import exact_key
from dejakv.request import Request, Sampling
from dejakv.store.base import ROWS, Chunk, ChunkMeta, Tensor
from dejakv.trust.differs import divergence
from research.frontier.cases import INSTRUCTIONS, SUMMARIZE, passages_of_manuals, prompt
from research.machine import machine, versions

GENERATIONS = 5
PASSAGES = 4
SHARED = 8
"""Words in a row that no two passages of a case share: well under 32 tokens."""
PARTITION = "generations"
RESAMPLES = 10_000
OUTPUT = Path("runs/generations")
CASES, NAME = "cases.jsonl", "generations"
CONFIG = BlendConfig(max_share=1.0)
"""The default quality. A prompt is blended here whatever it needs, so that every generation has its rows."""


class Chain:
    """One model, and what is computed with it."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine

    def prepared(self, text: str, answer: int = 1) -> Prepared:
        """A prompt whose answer has so many tokens."""
        made = self.engine.prepare(Request(PARTITION, text, text, partition=PARTITION, sampling=Sampling(answer)))
        return replace(made, epoch=self.engine.epoch)

    def exact(self, text: str) -> list[Chunk]:
        """A prompt computed in full, as a donor."""
        given = self.prepared(text)
        state = self.engine.full(given).capture()
        assert state is not None
        return [Chunk(ChunkMeta(_key(given), PARTITION, given.epoch, given.token_ids, text, text), state)]

    def blend(self, given: Prepared, donors: Sequence[Chunk]) -> Completion:
        """A prompt blended from donors. Raises: ModelError where it was not."""
        done = self.engine.blend(given, donors, CONFIG)
        if isinstance(done, BlendReport):
            raise ModelError(f"a prompt could not be blended: {done.reason}")
        return done

    def rows(self, text: str, donors: Sequence[Chunk]) -> list[Chunk]:
        """The new text of a blended prompt, as a cache keeps it."""
        given = self.prepared(text)
        kept = self.blend(given, donors).rows
        assert kept is not None
        states = [(run, kept.capture(*run)) for run in kept.runs]
        return [
            Chunk(described_rows(given, _key(given), kept, *run), state) for run, state in states if state is not None
        ]

    def part_of(self, text: str, passage: str, chunks: Sequence[Chunk]) -> list[Chunk]:
        """What the chunks of a prompt's text hold of one passage."""
        places = self.engine.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
        begin = text.index(passage)
        inside = [i for i, (a, b) in enumerate(places) if a >= begin and b <= begin + len(passage)]
        parts = [_cut(chunk, inside[0], inside[-1] + 1) for chunk in chunks]
        return [part for part in parts if part is not None]


def _key(given: Prepared) -> str:
    return exact_key(PARTITION, given.epoch, given.token_ids, ())


def _cut(chunk: Chunk, first: int, stop: int) -> Chunk | None:
    """The rows of a chunk at the positions first..stop of its prompt; None if it holds too few of them to be found."""
    meta = chunk.meta
    low, high = max(first - meta.position, 0), min(stop - meta.position, meta.num_tokens)
    if high - low < GUARANTEED:
        return None
    part = replace(meta, token_ids=meta.token_ids[low:high], position=meta.position + low, kind=ROWS)
    return Chunk(part, Tensor(chunk.tensor.data[:, :, :, low:high], chunk.tensor.dtype))


def drawn(rng: random.Random, count: int) -> list[str]:
    """So many passages of which no two have `SHARED` words in a row in common: what another prompt holds is not kept again.

    Raises: ConfigError where there are not as many.
    """
    texts = [passage.text for passage in passages_of_manuals()]
    chosen: list[str] = []
    seen: set[tuple[str, ...]] = set()
    for text in rng.sample(texts, len(texts)):
        words = text.split()
        runs = {tuple(words[i : i + SHARED]) for i in range(len(words) - SHARED + 1)}
        if runs.isdisjoint(seen):
            seen |= runs
            chosen.append(text)
        if len(chosen) == count:
            return chosen
    raise ConfigError(
        f"there are {len(chosen)} passages without text in common, {count} are needed: give fewer --passages"
    )


def case(chain: Chain, twin: TransformersEngine, number: int, seed: int, passages: int) -> dict[str, Any]:
    """The line of one case: by generation the KL of the first token, `kl_mean` and `top1` along the answer, and the shares of
    the prompt's tokens that the donors held and that were computed; `noise`: the same model in bf16. `rows` is empty for a case
    in which a passage was kept in pieces too short to be found: it has no next generation."""
    rng = random.Random(f"generations/{seed}/{number}")
    chosen = drawn(rng, passages * (GENERATIONS + 3))
    targets, fillers = chosen[:passages], iter(chosen[passages:])
    question, begins = SUMMARIZE
    given = chain.prepared(prompt(INSTRUCTIONS[0], targets, question, begins), STEPS)
    full = chain.engine.full(given)
    wanted = full.continued(full.token_ids)
    assert wanted is not None
    noise = twin.full(replace(given, epoch="")).continued(full.token_ids)
    rows: dict[str, Any] = {"noise": _row(wanted, noise, 1.0, 1.0)}
    behind = [next(fillers) for _ in targets]
    held: list[list[Chunk]] = [[] for _ in targets]
    for generation in range(GENERATIONS + 1):
        donors: list[Chunk] = []
        for place, target in enumerate(targets):
            new = next(fillers)
            text = prompt(INSTRUCTIONS[0], [behind[place], target, new], question, begins)
            chunks = chain.rows(text, held[place]) if generation else chain.exact(text)
            donors += chain.part_of(text, target, chunks)
            held[place], behind[place] = chain.part_of(text, new, chunks), new
            if not held[place]:
                return {"number": number, "tokens": len(given.token_ids), "rows": {}}
        assert all(chunk.meta.generation == generation for chunk in donors)
        done = chain.blend(given, donors)
        share = sum(chunk.meta.num_tokens for chunk in donors) / len(given.token_ids)
        rows[str(generation)] = _row(wanted, done.continued(full.token_ids), share, done.details["blend"].share)
    return {"number": number, "tokens": len(given.token_ids), "rows": rows}


def _row(wanted: NDArray[np.float32], got: NDArray[np.float32] | None, held: float, computed: float) -> dict[str, Any]:
    assert got is not None
    distances = divergence(wanted, got)
    return {
        "kl": round(float(distances[0]), 6),
        "kl_mean": round(float(distances.mean()), 6),
        "top1": round(float((wanted.argmax(-1) == got.argmax(-1)).mean()), 4),
        "held": round(held, 4),
        "computed": round(computed, 4),
    }


def figures(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the cases by generation, with 95% bootstrap intervals of `kl_mean` and `top1`; cases without rows are left out.

    Raises: ConfigError where all are.
    """
    made: list[dict[str, Any]] = []
    lines = [line for line in lines if line["rows"]]
    if not lines:
        raise ConfigError("no case has all its generations: measure more --cases")
    for name in ("noise", *(str(generation) for generation in range(GENERATIONS + 1))):
        rows = [line["rows"][name] for line in lines]
        row: dict[str, Any] = {"generation": name, "cases": len(rows)}
        for field in ("kl", "kl_mean", "top1", "held", "computed"):
            row[field] = round(float(np.mean([given[field] for given in rows])), 5)
        for field in ("kl_mean", "top1"):
            row[f"{field}_low"], row[f"{field}_high"] = _interval([given[field] for given in rows])
        made.append(row)
    return made


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """95% percentile interval of the mean over resampled cases."""
    given = np.asarray(values)
    picks = np.random.default_rng(0).integers(0, len(given), (RESAMPLES, len(given)))
    low, high = np.percentile(given[picks].mean(axis=1), [2.5, 97.5])
    return round(float(low), 5), round(float(high), 5)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures as Markdown."""
    lines = [
        "| state of the passages | KL along the answer | KL of its first token | same likeliest token | held | rows computed |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        name = "the model in bf16" if row["generation"] == "noise" else f"generation {row['generation']}"
        kl = f"{row['kl_mean']:.4f} ({row['kl_mean_low']:.4f} to {row['kl_mean_high']:.4f})"
        top1 = f"{row['top1']:.1%} ({row['top1_low']:.1%} to {row['top1_high']:.1%})"
        lines.append(f"| {name} | {kl} | {row['kl']:.4f} | {top1} | {row['held']:.0%} | {row['computed']:.0%} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 2 for a mistake, 130 after an interrupt."""
    parser = argparse.ArgumentParser(
        prog="python -m research.generations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--passages", type=int, default=PASSAGES, help=f"in a prompt, default {PASSAGES}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch, default 1")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default {OUTPUT}")
    given = parser.parse_args(arguments)
    try:
        return _measure(given)
    except DejaKVError as error:
        print(f"research.generations: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _measure(given: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(given.threads)
    settings = {"model": given.model, "passages": given.passages, "seed": given.seed, "steps": STEPS}
    given.output.mkdir(parents=True, exist_ok=True)
    path = given.output / CASES
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if any(line["settings"] != settings for line in lines):
        raise ConfigError(f"--output {given.output} holds cases of other settings: give another folder")
    engine = TransformersEngine.from_pretrained(given.model, dtype="fp32")
    chain, twin = Chain(engine), twin_of(engine)
    with path.open("a") as file:
        for number in range(len(lines), given.cases):
            lines.append({"settings": settings, **case(chain, twin, number, given.seed, given.passages)})
            file.write(json.dumps(lines[-1]) + "\n")
            file.flush()
            print(f"{number + 1} of {given.cases}", file=sys.stderr)
    rows = figures(lines[: given.cases])
    with (given.output / f"{NAME}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    told = {
        **settings,
        "command": shlex.join(["python", "-m", "research.generations", *sys.argv[1:]]),
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
    }
    (given.output / f"{NAME}.json").write_text(json.dumps({**told, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    if left_out := given.cases - rows[0]["cases"]:
        print(f"\n{left_out} of {given.cases} cases are left out: new text was kept in pieces too short to be found.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
