"""Tokens computed over the workloads, by how much of a blended prompt is kept: the plans alone, without running the decoder.

    python -m benchmarks.kept_rows --requests 100 --output runs/kept_rows

Every request takes the whole path (lookup, plan, token map, rows that must be computed, storing), but no row is computed, so 100
requests take seconds. Counted are tokens computed by those of prefix caching over the same requests. `--repeat 2`: the stream comes a
second time. The default quality; a blend computes what it must, and at least the quality's share of the rows.
"""

import argparse
import datetime
import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.workloads.machine import machine, versions
from benchmarks.workloads.streams import chosen_of, stream_of

from dejakv.build import build_cache
from dejakv.cache import HierarchicalCache
from dejakv.datasets.workload import WORKLOADS
from dejakv.engines.base import Completion, ComputedRows, Prepared, Start
from dejakv.engines.transformers import TransformersEngine
from dejakv.errors import DejaKVError
from dejakv.experiments.arms import prefix_cache
from dejakv.find import copies
from dejakv.find.copied.fingerprints import GUARANTEED
from dejakv.pipeline import Pipeline
from dejakv.request import Request
from dejakv.reuse.blend import BlendConfig, BlendReport, find, not_worth
from dejakv.reuse.new_text import new_runs
from dejakv.reuse.sentences import sentence_ends
from dejakv.reuse.token_map import Donors
from dejakv.store.base import Chunk, Tensor
from dejakv.store.memory import MemoryStore
from dejakv.tokens import with_media

OUTPUT = Path("runs/kept_rows")
NAME = "kept_rows"
GENERATIONS = (0, 1, 3, 5, 100)
LEAST = (0.1, 0.4)


class Planned:
    """An engine that plans as the transformers engine does and computes nothing. Its state is empty, of the right length."""

    name = "planned"
    epoch = "planned"
    most_donors = None
    tells_first_token = False

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self._ends = sentence_ends(engine.tokenizer)
        self._layers = engine.model.config.get_text_config(decoder=True).num_hidden_layers
        self.embed_text, self.embed_tokens = engine.embed_text, engine.embed_tokens
        self.embed_image = engine.embed_image
        self.prepare, self.costs, self.loaded = engine.prepare, engine.costs, engine.loaded

    def run(self, prepared: Prepared, *, start: Start | None = None, **_: Any) -> Completion:
        tokens = len(prepared.token_ids)
        held = min(start.tokens, tokens - 1) if start is not None else 0
        return Completion("", (0,), tokens, tokens - held, capture=lambda: _empty(tokens))

    def blend(
        self, prepared: Prepared, donors: Sequence[Chunk], config: BlendConfig, **_: Any
    ) -> Completion | BlendReport:
        tokens, metas = len(prepared.token_ids), [chunk.meta for chunk in donors]
        target = with_media(prepared.token_ids, prepared.spans)
        held = Donors.of(*(meta.token_ids for meta in metas), first=[meta.position for meta in metas])
        exact = [meta.generation == meta.position == 0 for meta in metas]
        found, needed = find(target, held, self.embed_tokens, config, self._ends, exact)
        if reason := not_worth(config, needed, self._layers):
            return BlendReport(tokens, reason=reason)
        last = config.schedule_for(self._layers).rows(self._layers - 1, tokens, needed.exact)
        computed = max(int(needed.forced.sum()), last)
        used = [metas[number] for number in np.unique(held.number[found.source]).tolist()]
        rows = ComputedRows(
            new_runs(target, held, found, needed.forced, GUARANTEED),
            tuple(meta.id for meta in used),
            1 + max(meta.generation for meta in used),
            lambda first, stop: _empty(stop - first),
        )
        report = BlendReport(tokens, rows=(computed,))
        return Completion("", (0,), tokens, computed, rows=rows, details={"blend": report})


def _empty(tokens: int) -> Tensor:
    return Tensor(np.zeros((2, 1, 1, tokens, 1), np.uint8), "U8")


@dataclass
class Tally:
    """What one stream took. `rounds`: tokens computed in each; `kept`: rows of blends kept; `ways`: requests by method."""

    rounds: list[int] = field(default_factory=list[int])
    kept: int = 0
    ways: Counter[str] = field(default_factory=Counter[str])


def serve(
    engine: Planned, cache: HierarchicalCache, requests: Sequence[Request], repeat: int, *, promotes: bool = False
) -> Tally:
    """Every request `repeat` times, round after round; with `promotes` one prompt is computed exactly behind each."""
    pipeline, tally = Pipeline(engine, cache, promotes=promotes), Tally()
    for _ in range(repeat):
        tally.rounds.append(0)
        for request in requests:
            record = pipeline.answer(request).record
            tally.rounds[-1] += record.computed_tokens
            tally.ways[record.method] += 1
            if promotes:
                pipeline.promote_one()
    tally.kept = cache.stats(None).rows_kept
    cache.close()
    return tally


def measure(workload: str, requests: int, repeat: int, engine: Planned) -> list[dict[str, Any]]:
    """A row for each way of keeping; `computed` is by prefix caching's."""
    stream = stream_of(workload, "transformers", requests)
    samples, prompter, _ = chosen_of(stream)
    asked = [prompter.request(sample) for sample in samples]
    config = replace(stream.settings.cache, reuse="blend")
    base = serve(engine, prefix_cache(config), asked, repeat)

    def row(name: str, least: float, promotes: bool = False, **settings: Any) -> dict[str, Any]:
        before, copies.LEAST_COPIED = copies.LEAST_COPIED, least
        try:
            made = build_cache(replace(config, **settings), engine, store=MemoryStore(), background=False)
            tally = serve(engine, made, asked, repeat, promotes=promotes)
        finally:
            copies.LEAST_COPIED = before
        rounds = [own / theirs for own, theirs in zip(tally.rounds, base.rounds, strict=True)]
        return {
            "workload": workload, "kept": name, "computed": round(sum(tally.rounds) / sum(base.rounds), 4),
            "rounds": [round(value, 4) for value in rounds], "rows_kept": tally.kept, "ways": dict(tally.ways),
        }  # fmt: skip

    least = copies.LEAST_COPIED
    if repeat > 1:
        rows = [row("nothing", least, max_generation=0), row("rows", least)]
        return [*rows, row("rows, promotion in idle time", least, promotes=True)]
    rows = [row("nothing, at least 40% copied", 0.4, max_generation=0)]
    rows += [
        row(f"generations up to {bound}" if bound else "nothing", least, max_generation=bound) for bound in GENERATIONS
    ]
    return [*rows, *(row(f"at least {share:.0%} copied", share) for share in LEAST)]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown, a column a workload."""
    names = list(dict.fromkeys(row["workload"] for row in rows))
    lines = ["| kept | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for kept in dict.fromkeys(row["kept"] for row in rows):
        cells = [next(row for row in rows if (row["workload"], row["kept"]) == (name, kept)) for name in names]
        lines.append(f"| {kept} | " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any]) -> str:
    rounds = ", ".join(f"{value:.1%}" for value in row["rounds"])
    return f"{row['computed']:.1%}" + (f" ({rounds})" if len(row["rounds"]) > 1 else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kept_rows", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload", action="append", choices=WORKLOADS, help="may be given more than once; default all"
    )
    parser.add_argument("--requests", type=int, default=100, help="of each workload, default 100")
    parser.add_argument("--repeat", type=int, default=1, help="how often the stream comes, default 1")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default {OUTPUT}")
    given = parser.parse_args(arguments)
    try:
        engine = Planned(TransformersEngine.from_pretrained("smollm2-135m", dtype="fp32", check=False))
        rows: list[dict[str, Any]] = []
        for workload in given.workload or WORKLOADS:
            rows += measure(workload, given.requests, given.repeat, engine)
            print(table(rows), file=sys.stderr)
    except DejaKVError as error:
        print(f"benchmarks.kept_rows: {error}", file=sys.stderr)
        return 2
    told = {
        "command": shlex.join(["python", "-m", "benchmarks.kept_rows", *sys.argv[1:]]),
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(), "versions": versions(), "rows": rows,
    }  # fmt: skip
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / f"{NAME}.json").write_text(json.dumps(told, indent=1) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
