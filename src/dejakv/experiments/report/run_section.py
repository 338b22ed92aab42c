"""The section of a run: what hit, what it saved, how long requests waited, and which answers changed."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv.datasets.base import Sample
from dejakv.errors import DejaKVError
from dejakv.experiments.data import read_samples
from dejakv.experiments.output import SETTINGS, read_object
from dejakv.experiments.plain_words import in_plain_words, not_run_in_words
from dejakv.experiments.report.charts import Chart, Series, bars, lines
from dejakv.experiments.report.page import (
    Block,
    Section,
    charts,
    command,
    facts,
    interval,
    paragraph,
    share,
    table,
    text,
)
from dejakv.experiments.samples_log import finished_rows, finished_settings
from dejakv.experiments.scoring import wilson
from dejakv.experiments.settings import run_command_of
from dejakv.experiments.summary import Row
from dejakv.experiments.table import changed_answers
from dejakv.pictures import decoded
from dejakv.request import Media

MOST_DISAGREEMENTS = 8


def run_section(folder: Path, summary: Mapping[str, Any], prefix: str) -> Section:
    """`prefix` distinguishes the names of the charts. Raises: ConfigError if the samples of a live run are missing."""
    title = f"Run {folder.name}: {summary['model']} on {summary['dataset']}"
    told = read_object(folder / SETTINGS)
    made = [command(run_command_of(told))] if told else []
    if "arms" not in summary:
        return Section(
            title,
            [paragraph(*summary.get("implied", ()), *not_run_in_words(dict(summary))), *_dry(summary, prefix), *made],
        )
    rows = [row for row in finished_rows(folder) if not row.error]
    words = [*in_plain_words(dict(summary)), *not_run_in_words(dict(summary))]
    drawn = [chart for chart in (_levels(summary, prefix), *_savings(summary, prefix), _waiting(rows, prefix)) if chart]
    return Section(title, [paragraph(*words), _arms(summary), charts(drawn), *_changed(folder, rows), *made])


def _arms(summary: Mapping[str, Any]) -> Block:
    arms: Mapping[str, Any] = summary["arms"]
    rows: list[Sequence[object]] = [["prompt tokens", *(f"{arm['prompt_tokens']:,}" for arm in arms.values())]]
    rows.append(["computed tokens", *(f"{arm['computed_tokens']:,}" for arm in arms.values())])
    rows.append(["encoder runs", *(f"{arm['encoder_runs']:,}" for arm in arms.values())])
    if any(arm["accuracy"] is not None for arm in arms.values()):
        rows.append(
            ["accuracy", *(f"{share(arm['accuracy'])} {interval(arm['accuracy_interval'])}" for arm in arms.values())]
        )
    rows += [
        [f"TTFT {name}, ms", *(f"{arm['ttft_ms'][name]:.2f}" for arm in arms.values())]
        for name in ("p50", "p95", "mean")
    ]
    if summary.get("agreement") is not None:
        agreed = f"{share(summary['agreement'])} {interval(summary['agreement_interval'])}"
        rows.append(["answers equal to full computation's", *(agreed if name == "cache" else "" for name in arms)])
    return table((f"{summary['samples']} requests", *arms), rows)


def _levels(summary: Mapping[str, Any], prefix: str) -> Chart | None:
    samples = summary["samples"]
    counts = {level: row["hits"] for level, row in summary.get("by_level", {}).items()}
    counts["exact prefix"] = summary.get("prefix_hits") or 0
    if not samples or "cache" not in summary["arms"]:
        return None
    ends = {level: wilson(count, samples) for level, count in counts.items()}
    values = {level: count / samples for level, count in counts.items()}
    return bars(f"{prefix}-levels", "Hits by level", "share of requests, with 95% intervals", values, ends)


def _savings(summary: Mapping[str, Any], prefix: str) -> list[Chart]:
    arms = summary["arms"]
    found = [
        bars(
            f"{prefix}-tokens",
            "Prompt tokens computed",
            "tokens",
            {name: arm["computed_tokens"] for name, arm in arms.items()},
        )
    ]
    if any(arm["encoder_runs"] for arm in arms.values()):
        runs = {name: arm["encoder_runs"] for name, arm in arms.items()}
        found.append(bars(f"{prefix}-encoder", "Pictures encoded", "encoder runs", runs))
    return found


def _waiting(rows: Sequence[Row], prefix: str) -> Chart | None:
    names = list(rows[0].arms) if rows else []
    series = [Series(name, *_distribution([row.arms[name].record.ttft_ms for row in rows])) for name in names]
    if not series:
        return None
    title = "Time to first token of all requests"
    return lines(f"{prefix}-ttft", title, "milliseconds", "share of requests that are as fast", series, log_x=True)


def _distribution(values: Sequence[float]) -> tuple[list[float], list[float]]:
    ordered = sorted(max(value, 1e-3) for value in values)
    return ordered, [(place + 1) / len(ordered) for place in range(len(ordered))]


def _changed(folder: Path, rows: Sequence[Row]) -> list[Block]:
    """The changed answers, the furthest from full computation first, with their pictures."""
    changed = changed_answers(rows)
    if not changed:
        same = "No answer of the cache arm differs from full computation's."
        return [paragraph(same)] if rows and rows[0].agrees("cache") is not None else []
    worst = sorted(changed, key=_distance, reverse=True)[:MOST_DISAGREEMENTS]
    samples = _samples(folder, {row.sample_id for row in worst})
    head = f"<h3>Changed answers: {len(changed)} of {len(rows)}, the {len(worst)} furthest from full computation</h3>"
    return [Block(head + "".join(_case(row, samples.get(row.sample_id)) for row in worst))]


def _distance(row: Row) -> float:
    near = row.arms["cache"].fidelity
    return near.kl if near is not None else 0.0


def _samples(folder: Path, wanted: set[str]) -> dict[str, Sample]:
    """The samples themselves, for their pictures. Without the data set the page has none."""
    try:
        return {sample.id: sample for sample in read_samples(finished_settings(folder)) if sample.id in wanted}
    except DejaKVError:
        return {}


def _case(row: Row, sample: Sample | None) -> str:
    record = row.arms["cache"].record
    score = "" if record.score is None else f", score {record.score:.3f}"
    pictures = "".join(_picture(media) for media in (sample.media if sample is not None else ())[:2])
    expected = f"<p>expected: {text(row.answer)}</p>" if row.answer is not None else ""
    full = row.exact.text if row.exact is not None else ""
    question = row.question if len(row.question) <= 600 else f"... {row.question[-600:]}"
    return (
        f'<div class="case"><p><b>{text(row.sample_id)}</b>: {text(question)}</p>{pictures}<div class="pair">'
        f"<div><small>computed in full</small><br>{text(full)}</div>"
        f"<div><small>with the cache: {text(record.provenance)}{score}</small><br>{text(row.arms['cache'].text)}</div>"
        f"</div>{expected}</div>"
    )


def _picture(media: Media) -> str:
    """A picture as data in the page, at most 480 pixels wide and high."""
    if media.modality != "image":
        return ""
    picture = decoded(media)
    picture.thumbnail((480, 480))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="the picture of the question" src="data:image/png;base64,{data}">'


def _dry(summary: Mapping[str, Any], prefix: str) -> list[Block]:
    blocks = [
        facts(
            {
                "requests": summary["samples"], "tokens in prefix blocks of earlier prompts": share(summary.get("share_prefix")),
                "tokens anywhere in earlier prompts": share(summary.get("share_anywhere")),
                "would-be hits": share(summary.get("hit_rate")),
                "of the judged hits false": share(summary.get("false_hit_rate")),
            }
        )
    ]  # fmt: skip
    levels = summary.get("by_level") or {}
    if levels:
        samples = summary["samples"]
        values = {level: row["hits"] / samples for level, row in levels.items()}
        ends = {level: wilson(row["hits"], samples) for level, row in levels.items()}
        title = "Would-be hits by level"
        blocks.append(charts([bars(f"{prefix}-levels", title, "share of requests, with 95% intervals", values, ends)]))
    return blocks
