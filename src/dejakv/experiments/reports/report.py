"""`dejakv report`: one HTML page from the files of runs, sweeps and estimates.

`dejakv explain` writes its pages with it too. A page loads nothing, and its own policy forbids it
to.
"""

import base64
import html
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from dejakv import __version__
from dejakv.datasets.base import Sample
from dejakv.errors import ConfigError, DejaKVError, printable
from dejakv.experiments import sweep_log
from dejakv.experiments.output import (
    SAMPLES,
    SETTINGS,
    SUMMARY,
    make_folder,
    read_json_or_empty,
    replace_file,
)
from dejakv.experiments.reports import advice
from dejakv.experiments.reports.plain_words import verdict
from dejakv.experiments.samples import read_samples
from dejakv.experiments.samples_log import finished_rows, finished_settings, finished_summary
from dejakv.experiments.settings import run_command_of
from dejakv.experiments.summary import SampleRow
from dejakv.experiments.table import (
    NAMES,
    Block,
    TextTable,
    changed_answers,
    details,
    headline,
    origin,
    times,
    workload_sentence,
)
from dejakv.pictures import decode_picture
from dejakv.request import Media

ESTIMATE = "estimate.json"
MAX_DISAGREEMENTS = 8
GENERATOR = '<meta name="generator" content="dejakv report'

_STYLE = """
:root{color-scheme:light dark;--ink:#24292f;--line:#d0d4d9;--ground:#fff;--soft:#f4f5f7}
@media(prefers-color-scheme:dark){:root{--ink:#dde1e6;--line:#3b424b;--ground:#14171b;\
--soft:#1f242a}}
*{box-sizing:border-box}body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:68rem;\
padding:1rem;color:var(--ink);
background:var(--ground);overflow-wrap:anywhere}h1{font-size:1.5rem}h2{font-size:1.25rem;\
margin-top:2.2rem}h3{font-size:1rem}
.scroll{overflow-x:auto;margin:1rem 0}table{border-collapse:collapse;font-size:.9rem;\
font-variant-numeric:tabular-nums}
th,td{border-bottom:1px solid var(--line);padding:.3rem .6rem;text-align:right;white-space:nowrap}
th,td:first-child,.w{white-space:normal}th,td:first-child{overflow-wrap:break-word}\
th:first-child,td:first-child,.w{text-align:left}p code{white-space:nowrap}\
pre{background:var(--soft);padding:.6rem;border-radius:8px;white-space:pre-wrap}
summary{cursor:pointer;font-weight:bold;margin:1rem 0}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,18rem),1fr));gap:.6rem}
.pair>div{background:var(--soft);padding:.6rem;border-radius:8px}\
.case{border-top:1px solid var(--line);padding:.6rem 0}
.case img{max-width:12rem;width:100%;image-rendering:pixelated;border-radius:4px}small{opacity:.75}
"""


class ReportSection(NamedTuple):
    """Section of a report: its title, and its parts in HTML, in order."""

    title: str
    blocks: Sequence[str]


def page(title: str, sections: Sequence[ReportSection]) -> str:
    """Return a self-contained HTML page of these sections.

    A section that is called like the page has no heading of its own.
    """
    body = "".join(
        f"<section>{f'<h2>{text(name)}</h2>' if name != title else ''}{''.join(blocks)}</section>"
        for name, blocks in sections
    )

    # The policy forbids all that a page could load, should a text ever become markup.
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta http-equiv="Content-Security-Policy"'
        " content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f'{GENERATOR} {__version__}"><title>{text(title)}</title>'
        f"<style>{_STYLE}{_CURVES}</style></head><body><main><h1>{text(title)}</h1>{body}"
        f"<p><small>DejaKV {__version__}</small></p></main></body></html>\n"
    )


def text(value: object) -> str:
    """Return a value as HTML text, with markup and control characters escaped."""
    return html.escape(printable(str(value)))


def paragraph(*sentences: str) -> str:
    """Return sentences as paragraphs in HTML."""
    return "".join(f"<p>{_with_code_tags(sentence)}</p>" for sentence in sentences)


def _with_code_tags(words: str) -> str:
    """Return words as HTML; backticks become code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", text(words))


def command(line: str) -> str:
    """Return a command line with its heading in HTML."""
    return f"<h3>Command</h3><pre>{text(line)}</pre>"


def table(sheet: TextTable) -> str:
    """Return a table in HTML that scrolls on a phone."""
    title = f"<h3>{text(sheet.title)}</h3>" if sheet.title else ""
    kinds = [
        ' class="w"' if place and sheet.has_words(place) else ""
        for place in range(len(sheet.columns))
    ]
    titles = zip(kinds, sheet.columns, strict=True)
    head = "".join(
        f"<th{kind}>{text(column)}</th>" if column else "<td></td>" for kind, column in titles
    )
    rows = (
        "".join(
            f"<td{kind}>{_with_code_tags(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)
        )
        for row in sheet.rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'{title}<div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def drawn(blocks: Iterable[Block]) -> str:
    """Return tables and sentences as HTML."""
    return "".join(
        table(block) if isinstance(block, TextTable) else paragraph(block) for block in blocks
    )


def facts(values: Mapping[str, Any]) -> str:
    """Return names and values as a table of two columns in HTML."""
    return table(TextTable("", ("", ""), [(name, str(value)) for name, value in values.items()]))


def make_report(sources: Sequence[Path], output: Path) -> None:
    """Write one page with the sections of all sources.

    The folder of the page is made if it does not exist.

    Parameters
    ----------
    sources : sequence of Path
        Folders of runs and estimates, and logs of sweeps.
    output : Path
        The page. An earlier report is replaced.

    Raises
    ------
    ConfigError
        For a source without results, for an output that exists and is no report, and for one that
        cannot be written.
    """
    if output.is_dir():
        raise ConfigError(f"--output {str(output)!r} is a folder: give the name of a page in it")
    try:
        # The generator tag stands at the top, and no foreign page has it.
        ours = not output.exists() or GENERATOR.encode() in output.read_bytes()[:2000]
    except OSError as error:
        raise ConfigError(
            f"--output {str(output)!r} cannot be used ({error.strerror}): give another name"
        ) from error

    if not ours:
        raise ConfigError(
            f"--output {str(output)!r} exists and is no report of ours: give another name"
        )

    sections = [section for source in sources for section in sections_of(source)]
    make_folder(output.parent)
    replace_file(
        output,
        page(sections[0].title if len(sections) == 1 else "DejaKV report", sections),
        "--output",
    )


def sections_of(source: Path) -> list[ReportSection]:
    """Return the sections of a folder, of the file of an estimate, or of the log of a sweep.

    Raises
    ------
    ConfigError
        For a path that has nothing to report, a run that was stopped, and a file that is damaged or
        of another version.
    """
    if not source.exists():
        raise ConfigError(
            f"no file or folder {str(source)!r}: give the folder of a run, or the log of a sweep"
        )
    estimate = source / ESTIMATE if source.is_dir() else source
    estimate_sections = (
        [_estimate_section(estimate)] if estimate.name == ESTIMATE and estimate.exists() else []
    )

    # Either of them: a stopped run has samples and no summary, and the error says to resume it.
    if (source / SUMMARY).exists() or (source / SAMPLES).exists():
        return [run_section(source, finished_summary(source)), *estimate_sections]
    if estimate_sections:
        return estimate_sections
    if source.is_dir():
        raise ConfigError(
            f"{str(source)!r} has nothing to report: give a folder with {SUMMARY} or {ESTIMATE}, or"
            " the log of a sweep"
        )

    return [sweep_section(source, sweep_log.read_log(source))]


def _estimate_section(path: Path) -> ReportSection:
    """Return the section on an estimate: the recommendation, and hits by level and threshold.

    Raises
    ------
    ConfigError
        For a file that is no estimate of this version.
    """
    figures = read_json_or_empty(path)
    foreign = f"{str(path)!r} was not written by this version, or is damaged"
    if not isinstance(figures.get("computed"), dict):
        raise ConfigError(f"{foreign} (it has no figures): make it again")

    try:
        verdict_text, (read, *rest) = advice.reuse_verdict(figures), advice.estimate_blocks(figures)
        blocks = [
            drawn([read, verdict_text, *(block for block in rest if block != verdict_text)]),
            _collapsible("Answers of similar prompts", [table(advice.settings_sheet(figures))]),
        ]
        return ReportSection(f"Estimate for {figures['log']}", blocks)
    except (
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        StopIteration,
    ) as error:
        # A file of another shape.
        raise ConfigError(f"{foreign} ({type(error).__name__}: {error}): make it again") from error


def run_section(folder: Path, summary: Mapping[str, Any]) -> ReportSection:
    """Return the section on a run.

    Parameters
    ----------
    folder : Path
        Folder of the run.
    summary : Mapping[str, Any]
        Content of its `summary.json`.

    Raises
    ------
    ConfigError
        If the samples of a live run are missing or cannot be read. A dry run has none.
    """
    more, blocks = [drawn(details(summary))], list[str]()
    if "arms" in summary:
        rows = [row for row in finished_rows(folder) if not row.error]
        blocks = [drawn([workload_sentence(summary, rows), headline(summary), *verdict(summary)])]
        blocks += [*_over_the_stream(rows), *_changed(folder, rows)]
        more.append(table(times(rows)))

    # A dry run has no result before its details, which then need not open.
    blocks += [_collapsible("Details", more)] if blocks else more
    if measurement := summary.get("measured"):
        where, versions = (
            measurement["machine"],
            ", ".join(f"{name} {version}" for name, version in measurement["versions"].items()),
        )
        cores = f"{where['cores_used']} of {where['cores']} cores, load {where['load_average']}"
        on = where.get("gpu", where["cpu"])
        blocks.append(
            paragraph(f"Measured until {measurement['finished']} on {on} ({cores}); {versions}.")
        )

    if run_settings := read_json_or_empty(folder / SETTINGS):
        blocks.append(command(run_command_of(run_settings)))
    return ReportSection(f"Run {folder.name}: {summary['model']} on {summary['dataset']}", blocks)


def _collapsible(title: str, blocks: Sequence[str]) -> str:
    """Return blocks behind their title, which opens them."""
    return f"<details><summary>{text(title)}</summary>{''.join(blocks)}</details>"


def _over_the_stream(rows: Sequence[SampleRow]) -> list[str]:
    """Draw the time to the first token of each request, and the tokens computed so far."""
    arms = list(rows[0].arms) if rows else []
    seconds = {arm: [row.arms[arm].record.ttft_ms / 1e3 for row in rows] for arm in arms}
    tokens = {
        arm: list(accumulate(row.arms[arm].record.computed_tokens for row in rows)) for arm in arms
    }
    return [
        curves("Time to the first token", "seconds", seconds, NAMES),
        curves("Tokens computed so far", "tokens", tokens, NAMES),
    ]


def _changed(folder: Path, rows: Sequence[SampleRow]) -> list[str]:
    """Return the changed answers furthest from full computation, with their pictures.

    They are at most `MAX_DISAGREEMENTS`, the furthest first.
    """
    changed = changed_answers(rows)
    if not changed:
        judged = bool(rows) and rows[0].agrees("cache") is not None
        return (
            [paragraph("No answer of the cache arm differs from full computation's.")]
            if judged
            else []
        )

    near = {row.sample_id: row.arms["cache"].fidelity for row in changed}

    far = {name: fidelity.kl if fidelity is not None else 0.0 for name, fidelity in near.items()}

    # By divergence of the first token: the texts of two short answers tell little.
    worst = sorted(changed, key=lambda row: far[row.sample_id], reverse=True)[:MAX_DISAGREEMENTS]
    worst_ids, samples = {row.sample_id for row in worst}, dict[str, Sample]()
    # Without the data set the page has no pictures.
    with suppress(DejaKVError):
        samples = {
            sample.id: sample
            for sample in read_samples(finished_settings(folder))
            if sample.id in worst_ids
        }

    shown = (
        f", the {len(worst)} furthest from full computation" if len(worst) < len(changed) else ""
    )
    head = f"<h3>Changed answers: {len(changed)} of {len(rows)}{shown}</h3>"
    return [head + "".join(_case(row, samples.get(row.sample_id)) for row in worst)]


def _case(row: SampleRow, sample: Sample | None) -> str:
    pictures = "".join(
        _picture(media) for media in (sample.media if sample is not None else ())[:2]
    )
    expected = f"<p>expected: {text(row.answer)}</p>" if row.answer is not None else ""
    full = row.exact.text if row.exact is not None else ""
    question = row.question if len(row.question) <= 600 else f"... {row.question[-600:]}"
    return (
        f'<div class="case"><p><b>{text(row.sample_id)}</b>: {text(question)}</p>{pictures}'
        f'<div class="pair"><div><small>computed in full</small><br>{text(full)}</div>'
        f"<div><small>with the cache: {text(origin(row))}</small>"
        f"<br>{text(row.arms['cache'].text)}</div>"
        f"</div>{expected}</div>"
    )


def _picture(media: Media) -> str:
    """Return a picture as data in the page, at most 480 pixels wide and high."""
    if media.modality != "image":
        return ""

    picture = decode_picture(media)
    picture.thumbnail((480, 480))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="the picture of the question" src="data:image/png;base64,{data}">'


def sweep_section(path: Path, rows: Sequence[Mapping[str, Any]]) -> ReportSection:
    """Return the section on a sweep: its counts, table and errors, and each experiment's command.

    Parameters
    ----------
    path : Path
        The log. The section is called `Sweep` and the log's file name.
    rows : sequence of mappings
        The rows of `sweep_log.read_log`.
    """
    failed = sum(bool(row["error"]) for row in rows)
    commands = [
        f"<p>{text(row['name'])}</p>"
        f"<pre>{text(run_command_of(json.loads(row['settings'] or '{}')))}</pre>"
        for row in rows
    ]

    counts_sentence = paragraph(f"{len(rows) - failed} experiments, {failed} failed")
    folded = _collapsible("The command of each experiment", commands)
    return ReportSection(
        f"Sweep {path.name}", [counts_sentence, drawn(sweep_log.sweep_blocks(rows)), folded]
    )


_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 8, 12, 28
"""Margins, for the labels of the axes."""

_CURVES = (
    "svg{width:100%;max-width:40rem;height:auto;"
    "font:12px system-ui,sans-serif;fill:currentColor}"
    "svg .grid{stroke:var(--line)}svg path{fill:none;stroke-width:2}"
    ".none{--arm:#8a8f98}.prefix{--arm:#b35900}.cache{--arm:#1a7f64}"
    "@media(prefers-color-scheme:dark){.prefix{--arm:#f0a04b}.cache{--arm:#4cc9a0}}"
    "svg path{stroke:var(--arm)}"
    ".key{border-top:3px solid var(--arm);padding:0;margin-right:1rem;"
    "border-radius:0;color:inherit}"
)


def curves(
    title: str, unit: str, arms: Mapping[str, Sequence[float]], names: Mapping[str, str]
) -> str:
    """Draw one curve for each arm, over the number of the request.

    Parameters
    ----------
    title : str
        Heading of the drawing.
    unit : str
        Unit of the values.
    arms : mapping of str to sequence of float
        Values by arm, all of one length.
    names : mapping of str to str
        Names of the arms, for the key.

    Returns
    -------
    str
        HTML; empty for fewer than two requests.
    """
    count = max((len(values) for values in arms.values()), default=0)
    if count < 2:
        return ""
    # 1 where all values are 0, as heights are divided by it.
    top = _rounded(max(max(values) for values in arms.values()) or 1.0)

    def point_at(place: float, value: float) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * place / (count - 1)
        return x, _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top

    grid: list[str] = []
    for part in range(5):
        _, y = point_at(0, top * part / 4)
        label = f"{top * part / 4:,.10g}"
        grid.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}"'
            f' y2="{y:.1f}"></line>'
        )
        grid.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')

    for number in sorted({1, (count + 1) // 2, count}):
        x, _ = point_at(number - 1, 0)
        end = "end" if number == count else "middle"
        grid.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="{end}">{number}</text>')

    drawn = ""
    for arm, values in arms.items():
        points = ("{:.1f} {:.1f}".format(*point_at(n, value)) for n, value in enumerate(values))
        drawn += f'<path class="{arm}" d="M{" L".join(points)}"></path>'

    key = "".join(f'<span class="key {arm}">{html.escape(names[arm])}</span>' for arm in arms)
    last = ", ".join(f"{names[arm]} {values[-1]:,.4g}" for arm, values in arms.items())
    description = html.escape(f"{title}, {unit}, over {count} requests; at the last: {last}")
    return (
        f"<h3>{html.escape(title)}</h3><p>{key}<small>{html.escape(unit)}, by request</small></p>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' aria-label="{description}">{"".join(grid)}{drawn}</svg>'
    )


def _rounded(value: float) -> float:
    """Return the least of 1, 2, 4, 5, 8 and 10 times a power of ten that is not below the value."""
    power = 10.0 ** math.floor(math.log10(value))
    # A little slack, as 10.0 ** n may come out just below the value.
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value * (1 - 1e-9))
