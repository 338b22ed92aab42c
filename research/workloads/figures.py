"""From the rows of a stream to every figure of its report."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dejakv.experiments.summary import SampleRow, mean_fidelity, percentile
from dejakv.records import Record
from research.workloads.streams import BASE

REFERENCE = "none"
RESAMPLES = 10_000


def figures(rows: Sequence[SampleRow]) -> dict[str, dict[str, Any]]:
    """Each arm's figures.

    Times are milliseconds; what compares is against the same requests under prefix caching; answers
    are compared where full computation was among the arms.
    """
    return {name: _arm(rows, name) for name in (rows[0].arms if rows else ())}


def _arm(rows: Sequence[SampleRow], name: str) -> dict[str, Any]:
    records = [row.arms[name].record for row in rows]
    base = [row.arms[BASE].record for row in rows]
    ttft, latency = (
        [record.ttft_ms for record in records],
        [record.latency_ms for record in records],
    )
    computed, of_base = (sum(record.computed_tokens for record in some) for some in (records, base))
    done: dict[str, Any] = {
        "prompt_tokens": sum(record.prompt_tokens for record in records),
        "computed_tokens": computed,
        "computed_of_prefix": computed / of_base if of_base else None,
        "ttft_ms": {
            "mean": sum(ttft) / len(ttft),
            "p50": percentile(ttft, 0.5),
            "p95": percentile(ttft, 0.95),
        },
        "ttft_against_prefix": (
            paired([record.ttft_ms for record in base], ttft) if name != BASE else None
        ),
        "requests_per_second": 1e3 * len(latency) / sum(latency),
        "latency_against_prefix": (
            paired([record.latency_ms for record in base], latency) if name != BASE else None
        ),
        "methods": dict(Counter(_method(record) for record in records)),
        "first_token_equal": None,
        "answers_equal": None,
        "kl_mean": None,
        "top1": None,
        "missed": None,
    }
    if name != REFERENCE and REFERENCE in rows[0].arms:
        near = [found for row in rows if (found := row.arms[name].fidelity) is not None]
        done |= {
            "first_token_equal": sum(bool(row.agrees_first(name)) for row in rows),
            "answers_equal": sum(bool(row.agrees(name)) for row in rows),
            **mean_fidelity(near),
        }
    if name not in (REFERENCE, BASE):
        done["missed"] = _missed(rows, name)
    return done


def _method(record: Record) -> str:
    """How it ran. A prefix that vLLM found by itself is a prefix too."""
    return "prefix" if record.method == "none" and record.reused_tokens else record.method


def _missed(rows: Sequence[SampleRow], name: str) -> dict[str, Any]:
    """The requests for which no donor was used, beside the same ones under prefix caching."""
    part = [row.arms for row in rows if row.arms[name].record.method in ("none", "prefix")]
    base = [arms[BASE].record.ttft_ms for arms in part]
    return {
        "requests": len(part),
        "against_prefix": paired(base, [arms[name].record.ttft_ms for arms in part]),
    }


def paired(base: Sequence[float], other: Sequence[float]) -> dict[str, Any] | None:
    """`difference` (mean of other minus base) and `ratio` (mean of other by mean of base), each
    with the 95% percentile interval over resampled requests (Efron, 1979). None for fewer than
    two requests, or a base that is all zero.
    """
    if len(base) < 2 or sum(base) == 0:
        return None
    ones, others = np.asarray(base, dtype=np.float64), np.asarray(other, dtype=np.float64)
    picks = np.random.default_rng(0).integers(0, len(ones), (RESAMPLES, len(ones)))
    of_base, of_other = ones[picks].mean(axis=1), others[picks].mean(axis=1)
    return {
        "difference": float((others - ones).mean()),
        "difference_interval": np.percentile(of_other - of_base, [2.5, 97.5]).tolist(),
        "ratio": float(others.mean() / ones.mean()),
        "ratio_interval": (
            np.percentile(of_other / np.maximum(of_base, 1e-12), [2.5, 97.5]).tolist()
        ),
    }
