"""From the records of a run to its summary: every figure of the report is computed here."""

import math
import statistics
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dejakv import __version__
from dejakv.records import Record
from dejakv.trust.differs import divergence


def normal(answer: str) -> str:
    """Return the answer to compare: NFKC, case folded, white space single, no dots at the ends."""
    return " ".join(unicodedata.normalize("NFKC", answer).casefold().split()).strip(" .")


def same_answer(answer: str, expected: str | None) -> bool:
    """Tell whether an answer is the expected one in `normal` form; False if none is expected."""
    return expected is not None and normal(answer) == normal(expected)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95% interval of a rate by its score (Wilson, 1927).

    Parameters
    ----------
    successes : int
        Successful trials.
    trials : int
        All trials; none gives (0, 1).
    """
    if trials == 0:
        return 0.0, 1.0

    z, rate = 1.96, successes / trials
    scale = 1 + z * z / trials
    middle = (rate + z * z / (2 * trials)) / scale
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


def student(values: int) -> float:
    """Return the standard errors to either side of a mean for a 95% interval (Student, 1908).

    The result is right to 1%.

    Parameters
    ----------
    values : int
        Number of values of which the mean is taken, two or more.
    """
    free = values - 1
    # Two values of the table, then a series in 1 / free that is right to 1%.
    return (
        (12.71, 4.30)[free - 1]
        if free < 3
        else 1.96 + 2.372 / free + 2.823 / free**2 + 2.56 / free**3
    )


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of two or more values, and the ends of its 95% interval."""
    mean = statistics.fmean(values)
    half = student(len(values)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def ratio_interval(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of the means of pairs, and the ends of its 95% interval (Cochran, 1977).

    There are two or more pairs, and all values are positive.
    """
    ratio = sum(over) / sum(under)
    # Of paired values: what both share, as the length of a prompt, cancels out.
    error = statistics.stdev(
        [
            over_value - ratio * under_value
            for over_value, under_value in zip(over, under, strict=True)
        ]
    )
    half = student(len(over)) * error / math.sqrt(len(over)) / statistics.fmean(over)

    # Symmetric in the logarithm, so that an end is never below 0.
    return ratio, ratio * math.exp(-half), ratio * math.exp(half)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie, linear between neighbours.

    No values give 0.
    """
    return float(np.quantile(values, share)) if len(values) else 0.0


STEPS = 16
"""First tokens of an answer that are compared."""


@dataclass(frozen=True)
class SampleFidelity:
    """One sample against full computation, along full computation's own answer (teacher forcing).

    Attributes
    ----------
    kl : float
        Kullback-Leibler divergence of the first token from full computation's, in nats.
    top1 : float
        Share of the answer's first `STEPS` tokens with the same likeliest token.
    """

    kl: float
    top1: float


def fidelity(
    full_logprobs: NDArray[np.float32] | None, reused_logprobs: NDArray[np.float32] | None
) -> SampleFidelity | None:
    """Compare reused with full computation along full computation's own answer.

    Parameters
    ----------
    full_logprobs, reused_logprobs : array, shape [tokens, vocabulary], or None
        Log probabilities, float32.

    Returns
    -------
    SampleFidelity or None
        None if either is missing or there are no tokens.
    """
    if full_logprobs is None or reused_logprobs is None or not len(full_logprobs):
        return None
    same = full_logprobs.argmax(axis=-1) == reused_logprobs.argmax(axis=-1)
    return SampleFidelity(
        float(divergence(full_logprobs[:1], reused_logprobs[:1])[0]), float(same.mean())
    )


def mean_fidelity(values: Sequence[SampleFidelity]) -> dict[str, Any]:
    """Return `kl_mean` and `top1` over samples, None if there are none."""
    values_by_name = {"kl_mean": [v.kl for v in values], "top1": [v.top1 for v in values]}
    return {
        name: statistics.fmean(figures) if figures else None
        for name, figures in values_by_name.items()
    }


@dataclass(frozen=True)
class ArmOutcome:
    """One sample in one arm.

    Attributes
    ----------
    record : Record
        What happened to the request.
    text : str
        The answer.
    cached_answer : str or None
        The donor's own answer, if a donor was used.
    first_token : int or None
        Id of the answer's first token, None for an empty answer.
    fidelity : SampleFidelity or None
        How close it is to the `none` arm, if the engine can measure it.
    donors : tuple[str, ...]
        Names of the requests whose state the answer used, best first. One that gave several
        segments is named as often.
    """

    record: Record
    text: str
    cached_answer: str | None = None
    first_token: int | None = None
    fidelity: SampleFidelity | None = None
    donors: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return one arm's part of a line in `samples.jsonl`."""
        outcome_fields = asdict(self)
        return {**outcome_fields.pop("record"), **outcome_fields}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ArmOutcome":
        """Restore an outcome from `as_dict`; another form raises KeyError or TypeError."""
        record = Record(**{item.name: values[item.name] for item in fields(Record)})
        outcome_fields = {name: values[name] for name in ("text", "cached_answer", "first_token")}
        near, donors = values["fidelity"], tuple(values.get("donors", ()))
        fidelity = SampleFidelity(**near) if near is not None else None
        return cls(
            replace(record, order=tuple(record.order)),
            **outcome_fields,
            fidelity=fidelity,
            donors=donors,
        )


@dataclass(frozen=True)
class SampleRow:
    """One sample in all arms.

    Attributes
    ----------
    sample_id : str
        Id of the sample.
    question : str
        Its question.
    answer : str or None
        The right answer, if it is known.
    arms : mapping of str to ArmOutcome
        Outcomes by arm.
    scored : bool
        Whether `answer` is meant to be said as it stands (`Sample.scored`).
    error : str
        Why the sample could not run, else empty; it has no arms then.
    """

    sample_id: str
    question: str
    answer: str | None
    arms: Mapping[str, ArmOutcome] = field(default_factory=dict[str, ArmOutcome])
    scored: bool = True
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return one line of `samples.jsonl`."""
        arms = {
            name: {**outcome.as_dict(), "correct": self.correct(name)}
            for name, outcome in self.arms.items()
        }
        cache = self.arms.get("cache")
        return {
            "id": self.sample_id,
            "question": self.question,
            "answer": self.answer,
            "scored": self.scored,
            "error": self.error,
            "provenance": cache.record.provenance if cache else "",
            "statuses": dict(cache.record.statuses) if cache else {},
            "agrees": self.agrees("cache"),
            "arms": arms,
        }

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> "SampleRow":
        """Restore what `as_dict` gave; a KeyError or TypeError tells that it is something else."""
        arms = {name: ArmOutcome.from_dict(values) for name, values in line["arms"].items()}
        # Older logs have neither.
        scored, error = line.get("scored", True), line.get("error", "")
        return cls(line["id"], line["question"], line["answer"], arms, scored, error)

    def correct(self, arm: str) -> bool | None:
        """Tell whether the arm's answer is right.

        None if no right answer is known, or it is only a note for readers (`scored`).
        """
        return (
            None
            if self.answer is None or not self.scored
            else same_answer(self.arms[arm].text, self.answer)
        )

    @property
    def exact(self) -> ArmOutcome | None:
        """Outcome that others are compared with: without reuse, or else behind an exact prefix.

        None without both.
        """
        return exact_of(self.arms)

    def agrees(self, arm: str) -> bool | None:
        """Tell whether the arm's answer equals the exact one; None without both answers."""
        return (
            None
            if arm not in self.arms or self.exact is None
            else self.arms[arm].text == self.exact.text
        )

    def agrees_first(self, arm: str) -> bool | None:
        """Tell whether the arm's first token equals the exact one; None without both answers."""
        if arm not in self.arms or self.exact is None:
            return None
        return self.arms[arm].first_token == self.exact.first_token


class RunProgress:
    """Observer of a run's stages and samples that never changes a result; this one does nothing."""

    def stage(self, text: str) -> None:
        """Note the stage that begins now, in a few words: `loading smollm2-135m`."""

    def sample(self, done: int, total: int, row: SampleRow | None) -> None:
        """Note that `done` of `total` samples are finished; `row` is the last one.

        The row is None where there are no arms, as in a dry run.
        """


T = TypeVar("T")


def exact_of(arms: Mapping[str, T]) -> T | None:
    """Return the arm that others are compared with; None without both.

    It is `none`, or else `prefix`, whose answers are full computation's too.
    """
    return arms.get("none", arms.get("prefix"))


def summarize(
    rows: Sequence[SampleRow], model: str, dataset: str, sizes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of `summary.json`.

    Times are in milliseconds, and rates have their 95% Wilson intervals. Figures that were not
    measured are None: the hit rate without the cache arm, false hits without an exact arm to judge
    them. `not_run` has the samples that could not run, and why; no other figure counts them.

    Parameters
    ----------
    rows : sequence of SampleRow
        The samples in the order of the run.
    model, dataset : str
        Names for the summary.
    sizes : mapping
        Sizes of the cache (`compare.sizes_of`).
    """
    not_run = {row.sample_id: row.error for row in rows if row.error}
    rows = [row for row in rows if not row.error]
    names = list(rows[0].arms) if rows else []
    records = [row.arms["cache"].record for row in rows if "cache" in row.arms]
    hits = [row for row in rows if "cache" in row.arms and _is_hit(row.arms["cache"].record)]

    # Of all requests and not of hits alone: a wrong prefix would be found here too.
    judged = [agrees for row in rows if (agrees := row.agrees("cache")) is not None]
    first = [agrees for row in rows if (agrees := row.agrees_first("cache")) is not None]

    summary: dict[str, Any] = {
        "model": model,
        "dataset": dataset,
        "dtype": _dtype(rows),
        "samples": len(rows),
        "not_run": not_run,
        "arms": {name: _arm(rows, name) for name in names},
        **_rate("hit_rate", [_is_hit(record) for record in records]),
        "prefix_hits": sum(record.method == "prefix" for record in records),
        "by_level": _by_level(hits),
        "by_method": by_count(record.method for record in records),
        **_rate("agreement", judged),
        **_rate("agreement_first", first),
        "stored_answers": _stored_answers(hits),
        **mean_fidelity(
            [
                near
                for row in rows
                if "cache" in row.arms and (near := row.arms["cache"].fidelity) is not None
            ]
        ),
        "beyond_prefix": _beyond_prefix(rows),
        "not_used": by_count(record.refused for record in records if record.refused),
        "lookup_ms": _spread([record.lookup_ms for record in records]),
        "bytes_loaded": sum(record.bytes_loaded for record in records),
        **sizes,
        "dejakv_version": __version__,
    }

    return summary


def _dtype(rows: Sequence[SampleRow]) -> str:
    """Return the model's dtype as its answers tell it; empty where none does."""
    dtypes = {outcome.record.arithmetic for row in rows for outcome in row.arms.values()}
    return ", ".join(sorted(dtypes - {""}))


def _rate(name: str, marks: Sequence[bool]) -> dict[str, Any]:
    """Return the share of true marks, and its 95% interval under `name_interval`.

    Both are None for no marks.
    """
    rate, ends = (
        (sum(marks) / len(marks), wilson(sum(marks), len(marks))) if marks else (None, None)
    )
    return {name: rate, f"{name}_interval": ends}


def _stored_answers(hits: Sequence[SampleRow]) -> dict[str, int]:
    """Count hits whose donor has an answer of its own, and those of full computation among them."""
    exact = [(row.exact, row.arms["cache"].cached_answer) for row in hits]
    matches_full = [
        stored == full.text for full, stored in exact if full is not None and stored is not None
    ]
    return {"known": len(matches_full), "agree": sum(matches_full)}


def _is_hit(record: Record) -> bool:
    return record.method not in ("none", "prefix")


def _arm(rows: Sequence[SampleRow], name: str) -> dict[str, Any]:
    records = [row.arms[name].record for row in rows]
    marks = [correct for row in rows if (correct := row.correct(name)) is not None]
    sums = ("computed_tokens", "prompt_tokens", "encoder_runs")
    return {
        **_rate("accuracy", marks),
        **{figure: sum(getattr(record, figure) for record in records) for figure in sums},
        **{
            figure: _spread([getattr(record, figure) for record in records])
            for figure in ("ttft_ms", "latency_ms")
        },
    }


def _by_level(hits: Sequence[SampleRow]) -> dict[str, Any]:
    groups: dict[str, list[SampleRow]] = defaultdict(list)
    for row in hits:
        groups[row.arms["cache"].record.level].append(row)
    table: dict[str, Any] = {}
    for level, group in sorted(groups.items()):
        judged = [agrees for row in group if (agrees := row.agrees("cache")) is not None]
        wrong = len(judged) - sum(judged)
        table[level] = {
            "hits": len(group),
            "exact_hits": sum(row.arms["cache"].record.method == "exact" for row in group),
            "agreement": sum(judged) / len(judged) if judged else None,
            "judged": len(judged),
            "false_hits": wrong if judged else None,
            "false_hit_interval": wilson(wrong, len(judged)) if judged else None,
        }

    return table


def _beyond_prefix(rows: Sequence[SampleRow]) -> dict[str, Any] | None:
    """Return the gain of the levels over prefix caching, for all requests.

    It has ratios, and the paired difference of TTFT with its 95% interval.
    """
    pairs = _pairs(rows, "prefix", "cache")
    # An interval needs the spread of two or more.
    if len(pairs) < 2:
        return None

    tokens = sum(prefix.computed_tokens for prefix, _ in pairs)
    mean, low, high = mean_interval([cache.ttft_ms - prefix.ttft_ms for prefix, cache in pairs])
    ratio, *ends = _times([(cache, prefix) for prefix, cache in pairs])
    return {
        "tokens_ratio": (
            sum(cache.computed_tokens for _, cache in pairs) / tokens if tokens else None
        ),
        "ttft_ratio": ratio,
        "ttft_ratio_interval": ends if ratio is not None else None,
        "ttft_difference_ms": mean,
        "ttft_difference_interval": (low, high),
        "noise": _noise(rows),
    }


def _noise(rows: Sequence[SampleRow]) -> dict[str, Any] | None:
    """Return the run's own noise, None where less than half of the requests tell it.

    It is the mean TTFT of `prefix` over that of `none`, with its 95% interval, over the requests
    that both computed in full. Chance in the few is not chance in the many.
    """
    pairs = _pairs(rows, "none", "prefix")
    equal = [
        (prefix, none)
        for none, prefix in pairs
        if (prefix.computed_tokens, prefix.encoder_runs)
        == (none.computed_tokens, none.encoder_runs)
    ]

    # No interval of one value, and no noise from a minority of the requests.
    if len(equal) < 2 or 2 * len(equal) < len(pairs):
        return None

    ratio, *ends = _times(equal)
    return (
        None
        if ratio is None
        else {"requests": len(equal), "ttft_ratio": ratio, "ttft_ratio_interval": ends}
    )


def _pairs(
    rows: Sequence[SampleRow], first_arm: str, second_arm: str
) -> list[tuple[Record, Record]]:
    """Return the records of two arms, of the samples that ran in both."""
    return [
        (row.arms[first_arm].record, row.arms[second_arm].record)
        for row in rows
        if {first_arm, second_arm} <= set(row.arms)
    ]


def _times(pairs: Sequence[tuple[Record, Record]]) -> tuple[float | None, ...]:
    """Return the mean TTFT of the first over that of the second, and the ends of its interval.

    The ratio is None where there are no times.
    """
    over, under = ([record.ttft_ms for record in records] for records in zip(*pairs, strict=True))
    return ratio_interval(over, under) if sum(over) and sum(under) else (None,)


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(("p50", "p95", "mean"))
    spread = {
        "p50": percentile(values, 0.5),
        "p95": percentile(values, 0.95),
        "mean": statistics.fmean(values),
    }
    return {name: round(value, 4) for name, value in spread.items()}


def by_count(values: Iterable[str]) -> dict[str, int]:
    """Return how often each value occurs, the most frequent first."""
    return dict(Counter(values).most_common())
