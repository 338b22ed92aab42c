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
from dejakv.experiments.labels import LabelledHit, read_labels
from dejakv.trust.evidence import Terms
from dejakv.trust.features import LATE_BLEND, risk_of
from research.machine import machine
from research.trust import baselines
from research.trust.gates import QUANTILES, Table, drift_row, gate_row

DRIFTS = 100
"""Orders with a drift."""

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
    donors = tuple(hit.donor for hit in hits) if all(hit.donor for hit in hits) else ()
    wrong = [hit.is_wrong(differs) for hit in hits]
    return Table(name, np.array(risks), np.array(scores), np.array(wrong), np.array(computed), donors, late)


def replay(given: argparse.Namespace) -> dict[str, Any]:
    """All figures of one table."""
    hits = [hit for path in given.table for hit in read_labels(path)]
    table = table_of(", ".join(path.stem for path in given.table), hits, given.differs, given.late)
    found: dict[str, Any] = {
        "table": table.name, "hits": len(table), "wrong": int(table.wrong.sum()), "differs": given.differs,
        "orders": given.orders, "length": given.length or len(table), "ordered_by": "first token's margin" if given.late else "plan's risk",
        "explore_share": given.explore, "audit_share": given.audit, "seed": given.seed, "machine": machine(), "rows": [], "drift": [],
    }  # fmt: skip
    few = min(given.orders, given.slow)
    vcache = list(baselines.vcache_rows(table, given.bound, few, given.length, given.seed)) if few else []
    for delta in given.bound:
        terms = Terms(delta, -math.log(1 - given.confidence), given.explore, given.audit)
        rows = [
            gate_row(table, terms, given.orders, given.length, given.seed),
            baselines.hindsight_row(table, delta, "risk"),
            baselines.static_row(table, delta, "risk", given.orders, given.length, given.seed),
            baselines.static_row(table, delta, "score", given.orders, given.length, given.seed),
            baselines.hindsight_row(table, delta, "score"),
            baselines.gptcache_row(table, delta),
            *(row for bound, row in vcache if bound == delta),
        ]
        found["rows"] += [{"delta": delta, **row} for row in rows]
        for row in rows:
            print(line(delta, row), flush=True)
        if given.drift and table.wrong.any() and not table.wrong.all():
            found["drift"].append(
                {
                    "delta": delta,
                    **drift_row(table, terms, min(given.orders, DRIFTS), given.drift, given.risen, given.seed),
                }
            )
    for row in found["drift"]:
        print(drift_line(row, given.drift, given.risen))
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


def drift_line(row: dict[str, Any], length: int, risen: float) -> str:
    """What drift did, in words."""
    said = f"delta {row['delta']:.0%}: after {length:,} hits the gate was open in {row['open']:.0%} of the orders"
    if not row["open"]:
        return said
    said += f"; then {risen:.0%} were wrong, and it closed in {row['noticed']:.0%} of these"
    said += (
        f", after {row['delay']:,.0f} hits of which it served {row['served']:,.0f}, {row['wrong_served']:,.0f} wrong (medians); delays at "
        f"{', '.join(f'{share:.0%}' for share in QUANTILES)}: {', '.join(f'{value:,.0f}' for value in row['delays'])}"
    )
    if row["unnoticed"]:
        said += f"; of {row['unnoticed']} orders in which it did not close the open rule keeps the bound in {row['kept_bound']}"
    if row["missed_error"] is not None:
        said += f", and in the others {row['missed_error']:.1%} of what it serves is wrong, with {row['missed_audits']:.0f} audits (medians)"
    return said


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
        "--slow", type=int, default=10, help="orders for vCache, which is slow; 0 leaves it out; default 10"
    )
    played.add_argument(
        "--length", type=int, default=0, help="rows of an order, drawn with replacement; default each row once"
    )
    played.add_argument("--differs", default="first")
    played.add_argument("--confidence", type=float, default=0.95)
    played.add_argument("--explore", type=float, default=1.0)
    played.add_argument("--audit", type=float, default=0.02)
    played.add_argument("--late", action="store_true", help="order by the first token's margin in the approximate run")
    played.add_argument(
        "--drift", type=int, default=0, help="rows before and after a rise of wrong answers; default none"
    )
    played.add_argument("--risen", type=float, default=0.2, help="share of wrong answers after the rise, default 0.2")
    played.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
