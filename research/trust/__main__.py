"""The commands."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import research.trust as package
from dejakv.errors import DatasetError, DejaKVError
from dejakv.trust.evidence import Terms
from dejakv.trust.features import LATE_BLEND, risk_of
from research.machine import machine
from research.trust.gates import Table, gate_row, hindsight_row, static_row
from research.trust.labels import LabelledHit, read_labels

BOUNDS = (0.01, 0.02, 0.05)


def table_of(name: str, hits: Sequence[LabelledHit], differs: str, late: bool) -> Table:
    """A table as arrays. `late`: hits are ordered by the first token's margin in the approximate run, not by the plan's risk."""
    if late and any(hit.margin is None for hit in hits):
        raise DatasetError(f"not every hit of {name} has the margin of its first token: replay it without --late")
    risks = [
        risk_of(LATE_BLEND, {"first_margin": hit.margin or 0.0}) if late else risk_of(hit.method, hit.features)
        for hit in hits
    ]
    scores = [hit.score if hit.score is not None else hit.features.get("score", 0.0) for hit in hits]
    computed = [hit.computed for hit in hits]
    wrong = [hit.is_wrong(differs) for hit in hits]
    return Table(name, np.array(risks), np.array(scores), np.array(wrong), np.array(computed), late)


def replay(given: argparse.Namespace) -> dict[str, Any]:
    """All figures of one table."""
    hits = [hit for path in given.table for hit in read_labels(path)]
    table = table_of(", ".join(path.stem for path in given.table), hits, given.differs, given.late)
    found: dict[str, Any] = {
        "table": table.name, "hits": len(table), "wrong": int(table.wrong.sum()), "differs": given.differs,
        "orders": given.orders, "length": given.length or len(table), "ordered_by": "first token's margin" if given.late else "plan's risk",
        "explore_share": given.explore, "audit_share": given.audit, "seed": given.seed, "machine": machine(), "rows": [],
    }  # fmt: skip
    for delta in given.bound:
        terms = Terms(delta, -math.log(1 - given.confidence), given.explore, given.audit)
        how = (given.orders, given.length, given.seed)
        rows = [
            gate_row(table, terms, *how),
            hindsight_row(table, delta),
            *(static_row(table, delta, ordered, *how) for ordered in ("risk", "score")),
        ]
        found["rows"] += [{"delta": delta, **row} for row in rows]
        for row in rows:
            print(line(delta, row), flush=True)
    return found


HEAD = (
    "| delta | rule | orders that broke it | opened | first hit after | hits kept | wrong of served | 95% | labels | computed twice | work |\n"
    "|---|---|---:|---:|---:|---:|---:|---|---:|---:|---:|"
)


def line(delta: float, row: dict[str, Any]) -> str:
    """A row of the table in Markdown."""
    low, high = row["interval"]
    wrong = "-" if row["error"] is None else f"{row['error']:.2%}"
    within = "-" if row["error"] is None else f"{low:.1%} to {high:.1%}"
    first = "-" if row["first"] is None else f"{row['first']:,.0f}"
    labels = "-" if row["labels"] is None else f"{row['labels']:,.0f}"
    twice = "-" if row["twice"] is None else f"{row['twice']:.1%}"
    work = "-" if row["work"] is None else f"{row['work']:.2f}"
    shares = f"{row['violated']:.1%} | {row['opened']:.1%} | {first} | {row['hits']:.1%}"
    return f"| {delta:.0%} | {row['method']} | {shares} | {wrong} | {within} | {labels} | {twice} | {work} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 2 for a mistake."""
    given = _parser().parse_args(arguments)
    try:
        print(HEAD)
        found = replay(given)
        print(f"\n{found['hits']} hits, {found['wrong']} wrong by {given.differs}; {found['machine']['cpu']}")
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    except DejaKVError as error:
        print(f"research.trust: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m research.trust", description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    played = commands.add_parser("replay")
    played.add_argument("--bound", type=float, nargs="+", default=BOUNDS)
    played.add_argument("--seed", type=int, default=0)
    played.add_argument("table", type=Path, nargs="+")
    played.add_argument("--orders", type=int, default=1000)
    played.add_argument(
        "--length", type=int, default=0, help="rows of an order, drawn with replacement; default each row once"
    )
    played.add_argument("--differs", default="first")
    played.add_argument("--confidence", type=float, default=0.95)
    played.add_argument("--explore", type=float, default=1.0)
    played.add_argument("--audit", type=float, default=0.02)
    played.add_argument("--late", action="store_true", help="order by the first token's margin in the approximate run")
    played.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
