"""From the rows of a stream to every figure of its report."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dejakv.experiments.fidelity import means
from dejakv.experiments.summary import Row, percentile
from dejakv.records import Record
from research.workloads.paired import paired
from research.workloads.streams import BASE

REFERENCE = "none"
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
"""Reasons that differ in their figures alone are counted as one."""


def figures(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Each arm's figures. Times are milliseconds; what compares is against the same requests under prefix caching;
    answers are compared where full computation was among the arms."""
    return {name: _arm(rows, name) for name in (rows[0].arms if rows else ())}


def _arm(rows: Sequence[Row], name: str) -> dict[str, Any]:
    records = [row.arms[name].record for row in rows]
    base = [row.arms[BASE].record for row in rows]
    ttft, latency = [record.ttft_ms for record in records], [record.latency_ms for record in records]
    done: dict[str, Any] = {
        "prompt_tokens": sum(record.prompt_tokens for record in records),
        "computed_tokens": sum(record.computed_tokens for record in records),
        "computed_of_prefix": _computed_of(base, records),
        "ttft_ms": {"mean": sum(ttft) / len(ttft), "p50": percentile(ttft, 0.5), "p95": percentile(ttft, 0.95)},
        "ttft_against_prefix": paired([record.ttft_ms for record in base], ttft) if name != BASE else None,
        "requests_per_second": 1e3 * len(latency) / sum(latency),
        "latency_against_prefix": paired([record.latency_ms for record in base], latency) if name != BASE else None,
        "later_half": _later(rows[len(rows) // 2 :], name) if name != BASE else None,
        "methods": dict(Counter(_method(record) for record in records)),
        "reasons": dict(Counter(_NUMBER.sub("n", record.reason) for record in records if record.reason).most_common()),
        "first_token_equal": None,
        "answers_equal": None,
        "kl_mean": None,
        "top1": None,
        "blended": None,
        "missed": None,
    }
    if name != REFERENCE and REFERENCE in rows[0].arms:
        near = [found for row in rows if (found := row.arms[name].fidelity) is not None]
        done |= {
            "first_token_equal": sum(bool(row.agrees_first(name)) for row in rows),
            "answers_equal": sum(bool(row.agrees(name)) for row in rows),
            **means(near),
        }
    if name not in (REFERENCE, BASE):
        done["blended"] = _part(rows, name, "blend")
        done["missed"] = _part(rows, name, "none", "prefix")
    return done


def _method(record: Record) -> str:
    """How it ran. A prefix that vLLM found by itself is a prefix too."""
    return "prefix" if record.method == "none" and record.reused_tokens else record.method


def _computed_of(base: Sequence[Record], own: Sequence[Record]) -> float | None:
    """Tokens computed by those of prefix caching; None where it computed none."""
    of_base = sum(record.computed_tokens for record in base)
    return sum(record.computed_tokens for record in own) / of_base if of_base else None


def _later(rows: Sequence[Row], name: str) -> dict[str, Any]:
    """Of the later requests, which find more in the store than the first ones, beside the same ones under prefix caching."""
    own, base = [row.arms[name].record for row in rows], [row.arms[BASE].record for row in rows]
    return {
        "requests": len(rows),
        "computed_of_prefix": _computed_of(base, own),
        "ttft_against_prefix": paired([record.ttft_ms for record in base], [record.ttft_ms for record in own]),
    }


def _part(rows: Sequence[Row], name: str, *methods: str) -> dict[str, Any]:
    """The requests that ran in one of these ways, beside the same ones under prefix caching."""
    part = [row for row in rows if row.arms[name].record.method in methods]
    own = [row.arms[name].record for row in part]
    base = [row.arms[BASE].record.ttft_ms for row in part]
    prompts = sum(record.prompt_tokens for record in own)
    return {
        "requests": len(part),
        "computed_share": sum(record.computed_tokens for record in own) / prompts if prompts else None,
        "ttft_ms": sum(record.ttft_ms for record in own) / len(own) if own else None,
        "prefix_ttft_ms": sum(base) / len(base) if base else None,
        "against_prefix": paired(base, [record.ttft_ms for record in own]),
    }
