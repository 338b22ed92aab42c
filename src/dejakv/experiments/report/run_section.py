"""The section of a run: what hit, what it saved, and which answers changed."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv.datasets.base import Sample
from dejakv.errors import DejaKVError
from dejakv.experiments.output import SETTINGS, read_object
from dejakv.experiments.plain_words import in_words
from dejakv.experiments.report.page import Block, Section, command, data_of, paragraph, table, text
from dejakv.experiments.samples import read_samples
from dejakv.experiments.samples_log import finished_rows, finished_settings
from dejakv.experiments.settings import run_command_of
from dejakv.experiments.summary import Row
from dejakv.experiments.table import changed_answers, origin, sheets_of
from dejakv.pictures import decoded
from dejakv.request import Media

MOST_DISAGREEMENTS = 8


def run_section(folder: Path, summary: Mapping[str, Any]) -> Section:
    """Raises: ConfigError if the samples of a live run are missing."""
    blocks = [paragraph(*summary.get("implied", ()), *in_words(summary)), *map(table, sheets_of(summary))]
    if "arms" in summary:
        rows = [row for row in finished_rows(folder) if not row.error]
        blocks += _changed(folder, rows)
    if told := read_object(folder / SETTINGS):
        blocks.append(command(run_command_of(told)))
    return Section(f"Run {folder.name}: {summary['model']} on {summary['dataset']}", blocks)


def _changed(folder: Path, rows: Sequence[Row]) -> list[Block]:
    """The changed answers, the furthest from full computation first, with their pictures."""
    changed = changed_answers(rows)
    if not changed:
        return (
            [paragraph("No answer of the cache arm differs from full computation's.")]
            if rows and rows[0].agrees("cache") is not None
            else []
        )
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
    pictures = "".join(_picture(media) for media in (sample.media if sample is not None else ())[:2])
    expected = f"<p>expected: {text(row.answer)}</p>" if row.answer is not None else ""
    full = row.exact.text if row.exact is not None else ""
    question = row.question if len(row.question) <= 600 else f"... {row.question[-600:]}"
    return (
        f'<div class="case"><p><b>{text(row.sample_id)}</b>: {text(question)}</p>{pictures}<div class="pair">'
        f"<div><small>computed in full</small><br>{text(full)}</div>"
        f"<div><small>with the cache: {text(origin(row))}</small><br>{text(row.arms['cache'].text)}</div>"
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
    return f'<img alt="the picture of the question" src="{data_of("png", buffer.getvalue())}">'
