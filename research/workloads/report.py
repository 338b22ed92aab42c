"""`workloads.md` and `workloads.json`: what was measured where, a table and a verdict for each workload and engine."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv.blend.settings import QUALITIES
from dejakv.experiments.output import SUMMARY, make_folder, read_object, replace_file
from research.workloads.picture import NAME as PICTURE
from research.workloads.streams import REQUESTS
from research.workloads.words import verdict

NAME = "workloads"
TITLES = {"none": "nothing reused", "prefix": "prefix caching"} | {name: f"blend {name}" for name in QUALITIES}

_ABOUT = """\
Three streams of prompts that repeat without being identical ([workloads](../workloads.md)), each request served by five arms one after
another in one process, another arm first each time: nothing reused, prefix caching, and DejaKV's `blend` at its three qualities,
each with a store of its own. Greedy, fixed seeds, one request at a time. Times to first token are compared with prefix caching, answers
with full computation. Intervals are 95%, by bootstrap over the requests (10,000 resamples of the pairs).

- *Tokens computed*: rows that went through the decoder; of a blend the mean over its layers.
- *Requests a second*: of the answers alone. State is stored while the next request runs: no request waits until that of the one before
  it is stored.
- *Later half*: of the requests alone that came last, and find more in the store.
- *Missed*: requests for which no donor was used, so that they ran as under prefix caching; the ratio is against the same requests there.
  It says what a miss costs. *Blended*: the same for those that were blended.
- *KL*: divergence of the first token from full computation's, nats. *Same likeliest token*: along full computation's answer.
- A dash: not measured by this engine, or nothing to compare.
"""


def summaries(output: Path) -> list[dict[str, Any]]:
    """The streams that are measured, whole or in part, in a fixed order."""
    found = [read_object(path) for path in sorted(output.glob(f"*/{SUMMARY}"))]
    order = ("repo", "rag", "sessions")
    ours = [summary for summary in found if "workload" in summary and summary["samples"]]
    return sorted(
        ours, key=lambda item: (item["engine"], order.index(item["workload"]) if item["workload"] in order else 99)
    )


def write(output: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Writes both files."""
    folder = make_folder(output)
    replace_file(folder / f"{NAME}.json", json.dumps({"streams": list(found)}, indent=2) + "\n", "--output")
    replace_file(folder / f"{NAME}.md", page(found), "--output")


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """The report as Markdown."""
    parts = ["# The work that reuse pays for", _ABOUT, f"![Time to first token]({PICTURE}.png)"]
    parts += [_stream(summary) for summary in found]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _stream(summary: Mapping[str, Any]) -> str:
    many = f", {summary['samples']} requests" if summary["samples"] != REQUESTS else ""
    lines = [f"## {summary['workload']} through {summary['engine']}{many}", "", *_where(summary), ""]
    arms: Mapping[str, Any] = summary["arms"]
    lines += ["| | " + " | ".join(TITLES.get(name, name) for name in arms) + " |", "|---" * (len(arms) + 1) + "|"]
    for title, cell in _ROWS.items():
        lines.append(f"| {title} | " + " | ".join(cell(arm, name, summary) for name, arm in arms.items()) + " |")
    return "\n".join([*lines, "", verdict(summary)])


def _where(summary: Mapping[str, Any]) -> list[str]:
    machine, versions = summary["machine"], summary["versions"]
    least, most = summary["lengths"]
    again = " The run was stopped and went on." if summary["resumed"] else ""
    return [
        f"{summary['samples']} requests of {least} to {most:,} tokens through {summary['model']}, {summary['dtype']},"
        f" {summary['answer_tokens']} tokens of answer. In prefix blocks of earlier prompts: {_share(summary['share_prefix'])}"
        f" of the tokens; anywhere in earlier prompts: {_share(summary['share_anywhere'])}.",
        f"`{summary['command']}`, {summary['finished'][:10]}, {machine['cpu']}, {machine['cores_used']} of"
        f" {machine['cores']} cores, {machine['threads']} threads, load {machine['load_average']} before and"
        f" {machine['load_average_after']} after; {', '.join(f'{name} {value}' for name, value in versions.items())}.{again}",
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _against(found: Mapping[str, Any] | None) -> str:
    if not found:
        return "-"
    low, high = found["ratio_interval"]
    return f"{found['ratio']:.2f} ({low:.2f} to {high:.2f})"


def _half(found: Mapping[str, Any] | None) -> str:
    if not found:
        return "-"
    return f"{_against(found['ttft_against_prefix'])}, {_share(found['computed_of_prefix'])} of its tokens computed"


def _difference(found: Mapping[str, Any] | None) -> str:
    if not found:
        return "-"
    low, high = found["difference_interval"]
    return f"{found['difference']:+,.0f} ({low:+,.0f} to {high:+,.0f})"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _of(count: int | None, summary: Mapping[str, Any]) -> str:
    return "-" if count is None else f"{count} of {summary['samples']}"


def _stored(name: str, summary: Mapping[str, Any]) -> str:
    size = summary["sizes"].get(name, {}).get("store_bytes")
    return f"{size / 1e6:,.0f} MB" if size else "-"


def _part(part: Mapping[str, Any] | None) -> str:
    if not part or not part["requests"]:
        return "-"
    times = f"{_milliseconds(part['ttft_ms'])} / {_milliseconds(part['prefix_ttft_ms'])} ms"
    return f"{part['requests']}: {times}, {_against(part['against_prefix'])}"


_ROWS = {
    "prompt tokens": lambda arm, *_: f"{arm['prompt_tokens']:,}",
    "tokens computed": lambda arm, *_: f"{arm['computed_tokens']:,}",
    "of prefix caching's": lambda arm, *_: _share(arm["computed_of_prefix"]),
    "TTFT mean, ms": lambda arm, *_: _milliseconds(arm["ttft_ms"]["mean"]),
    "TTFT p50 / p95, ms": lambda arm, *_: " / ".join(_milliseconds(arm["ttft_ms"][name]) for name in ("p50", "p95")),
    "TTFT against prefix, ms": lambda arm, *_: _difference(arm["ttft_against_prefix"]),
    "TTFT by prefix's": lambda arm, *_: _against(arm["ttft_against_prefix"]),
    "the same, later half": lambda arm, *_: _half(arm.get("later_half")),
    "requests a second": lambda arm, *_: f"{arm['requests_per_second']:.3f}",
    "time of a request by prefix's": lambda arm, *_: _against(arm["latency_against_prefix"]),
    "how they ran": lambda arm, *_: ", ".join(f"{count} {_METHODS[name]}" for name, count in arm["methods"].items()),
    "first token equal": lambda arm, _, summary: _of(arm["first_token_equal"], summary),
    "whole answer equal": lambda arm, _, summary: _of(arm["answers_equal"], summary),
    "KL of the first token": lambda arm, *_: "-" if arm["kl_mean"] is None else f"{arm['kl_mean']:.4f}",
    "same likeliest token": lambda arm, *_: _share(arm["top1"]),
    "bytes stored": lambda _, name, summary: _stored(name, summary),
    "blended: TTFT / prefix's, ratio": lambda arm, *_: _part(arm["blended"]),
    "missed: TTFT / prefix's, ratio": lambda arm, *_: _part(arm["missed"]),
}
"""Title and cell of every row: of an arm's figures, its name, and the stream's summary."""

_METHODS = {"none": "in full", "prefix": "from a prefix", "exact": "exact", "adopt": "adopted", "blend": "blended"}
