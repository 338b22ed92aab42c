"""The page: sections of facts, tables, charts and texts. It loads nothing, and its own policy forbids it to."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dejakv import __version__
from dejakv.experiments.report.charts import INK, LINE, Chart
from dejakv.experiments.table import Sheet

GENERATOR = '<meta name="generator" content="dejakv report'

_STYLE = """
:root{color-scheme:light dark;--ink:%s;--line:%s;--ground:#fff;--soft:#f4f5f7}
@media(prefers-color-scheme:dark){:root{--ink:#dde1e6;--line:#3b424b;--ground:#14171b;--soft:#1f242a}
figure img{filter:invert(.9) hue-rotate(180deg)}}
*{box-sizing:border-box}body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:68rem;padding:1rem;color:var(--ink);
background:var(--ground);overflow-wrap:anywhere}h1{font-size:1.5rem}h2{font-size:1.25rem;margin-top:2.2rem}h3{font-size:1rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%%,26rem),1fr));gap:1rem}
figure{margin:0;padding:.6rem;background:var(--soft);border-radius:8px;min-width:0;align-self:start}figcaption{font-weight:600;margin-bottom:.4rem}
figure img{display:block;width:100%%;height:auto;max-width:34rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{border-bottom:1px solid var(--line);padding:.3rem .6rem;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}pre{background:var(--soft);padding:.6rem;border-radius:8px;white-space:pre-wrap}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%%,18rem),1fr));gap:.6rem}
.pair>div{background:var(--soft);padding:.6rem;border-radius:8px}.case{border-top:1px solid var(--line);padding:.6rem 0}
.case img{max-width:12rem;width:100%%;image-rendering:pixelated;border-radius:4px}small{opacity:.75}
span{border-radius:3px;padding:1px 3px;color:#222}.k{background:#a9d8a9}.c{background:#ffe9a8}.f{background:#ffd0a6}.x{background:#ffb3b3}
"""


@dataclass(frozen=True)
class Block:
    """HTML of part of a section."""

    html: str


@dataclass(frozen=True)
class Section:
    """One source of the report."""

    title: str
    blocks: Sequence[Block]


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole page."""
    body = "".join(
        f"<section><h2>{text(section.title)}</h2>{''.join(block.html for block in section.blocks)}</section>"
        for section in sections
    )
    style = _STYLE % (INK, LINE)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f'{GENERATOR} {__version__}"><title>{text(title)}</title><style>{style}</style></head>'
        f"<body><h1>{text(title)}</h1>{body}<p><small>DejaKV {__version__}</small></p></body></html>\n"
    )


def text(value: object) -> str:
    """A value as HTML text."""
    return html.escape(str(value))


def paragraph(*sentences: str) -> Block:
    return Block("".join(f"<p>{text(sentence)}</p>" for sentence in sentences))


def command(line: str) -> Block:
    return Block(f"<h3>Command</h3><pre>{text(line)}</pre>")


def table(sheet: Sheet) -> Block:
    """A table that scrolls on a phone."""
    title = f"<h3>{text(sheet.title)}</h3>" if sheet.title else ""
    head = "".join(f"<th>{text(column)}</th>" for column in sheet.columns)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in sheet.rows)
    return Block(f'{title}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')


def charts(found: Sequence[Chart]) -> Block:
    """Charts beside each other, or below each other on a phone."""
    inner = "".join(
        f'<figure><figcaption>{text(chart.title)}</figcaption><img alt="{text(chart.title)}" src="{data_of("svg+xml", chart.svg.encode())}"></figure>'
        for chart in found
    )
    return Block(f'<div class="charts">{inner}</div>')


def data_of(kind: str, content: bytes) -> str:
    """The address of a picture that stands in the page."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def facts(values: Mapping[str, Any], title: str = "") -> Block:
    return table(Sheet(title, ("", ""), [(name, str(value)) for name, value in values.items()]))
