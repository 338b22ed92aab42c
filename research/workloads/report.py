"""`workloads.md`, `workloads.json` and the picture: where each stream was measured, and a table of its arms."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv.blend.settings import QUALITIES
from dejakv.experiments.output import SUMMARY, make_folder, read_object, replace_file

NAME = "workloads"
TITLES = {"none": "nothing reused", "prefix": "prefix caching"} | {name: f"blend {name}" for name in QUALITIES}

_ABOUT = f"""\
# The work that reuse pays for

Streams of prompts that repeat without being identical ([workloads](../how-to/measure.md)), each request served by all arms one after another in
one process, another arm first each time, each with a store of its own. Greedy, fixed seeds, one request at a time. Times to first token are
compared with prefix caching, answers with full computation. Intervals are 95%, by bootstrap over the requests (10,000 resamples of the pairs).

*Tokens computed*: rows that went through the decoder; of a blend the mean over its layers. *Missed*: requests for which no donor was used,
and their time to first token by that of the same requests under prefix caching. *KL*: divergence of the first token from full computation's,
nats. *Same likeliest*: along full computation's answer. A dash: not measured by this engine, or nothing to compare.

![Time to first token]({NAME}.png)
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
    """The report as Markdown: a row for each arm of each stream, beside the same stream's prefix caching."""
    lines = [_ABOUT, "| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    for summary in found:
        stream = f"{summary['workload']}, {summary['engine']}, {summary['samples']}"
        base = summary["arms"]["prefix"]["ttft_ms"]["mean"]
        for name, arm in summary["arms"].items():
            if name != "prefix":
                cells = _cells(arm, base, summary["sizes"].get(name, {}), summary["samples"])
                lines.append(f"| {stream} | {TITLES.get(name, name)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *map(_where, found), ""])


_COLUMNS = (
    "workload, engine, requests", "arm", "tokens computed, of prefix's", "TTFT mean, of prefix's, ms", "TTFT by prefix's",
    "a request's time by prefix's", "how they ran", "first token, answer equal", "KL", "same likeliest", "missed", "stored",
)  # fmt: skip


def _cells(arm: Mapping[str, Any], base: float, sizes: Mapping[str, Any], samples: int) -> list[str]:
    equal, stored, missed = arm["answers_equal"], sizes.get("store_bytes"), arm["missed"]
    return [
        f"{arm['computed_tokens']:,}, {_share(arm['computed_of_prefix'])}",
        f"{arm['ttft_ms']['mean']:,.0f}, {base:,.0f}",
        _against(arm["ttft_against_prefix"]),
        _against(arm["latency_against_prefix"]),
        ", ".join(f"{count} {name}" for name, count in arm["methods"].items()),
        "-" if equal is None else f"{arm['first_token_equal']}, {equal} of {samples}",
        "-" if arm["kl_mean"] is None else f"{arm['kl_mean']:.4f}",
        _share(arm["top1"]),
        f"{missed['requests']}: {_against(missed['against_prefix'])}" if missed and missed["requests"] else "-",
        f"{stored / 1e6:,.0f} MB" if stored else "-",
    ]


def _where(summary: Mapping[str, Any]) -> str:
    machine, (least, most) = summary["machine"], summary["lengths"]
    return (
        f"- `{summary['command']}`: {summary['samples']} requests of {least} to {most:,} tokens, {summary['answer_tokens']} of answer,"
        f" {_share(summary['share_prefix'])} of the tokens in prefix blocks of earlier prompts, {_share(summary['share_anywhere'])} anywhere in"
        f" them; {summary['model']}, {summary['dtype']}, {summary['finished'][:10]}, {machine['cpu']}, {machine['cores_used']} of"
        f" {machine['cores']} cores, {machine['threads']} threads, load {machine['load_average']} to {machine['load_average_after']};"
        f" {', '.join(f'{name} {value}' for name, value in summary['versions'].items())}"
        + ("; stopped and went on" if summary["resumed"] else "")
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _against(found: Mapping[str, Any] | None) -> str:
    if not found:
        return "-"
    low, high = found["ratio_interval"]
    return f"{found['ratio']:.2f} ({low:.2f} to {high:.2f})"


def draw(found: Sequence[Mapping[str, Any]], folder: Path) -> bool:
    """Writes `workloads.png` and `workloads.svg`: mean time to first token by stream and arm, a panel an engine. Error bars: the 95%
    interval of the paired ratio, times prefix caching's mean. False without matplotlib or without streams."""
    engines = list(dict.fromkeys(summary["engine"] for summary in found))
    try:
        import matplotlib
    except ImportError:
        return False
    if not engines:
        return False
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = NAME  # the same figures give the same file
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(engines), figsize=(4.5 * len(engines), 4), squeeze=False, sharey=True, layout="constrained")  # fmt: skip
    for panel, engine in zip(panels.flat, engines, strict=True):
        streams = [summary for summary in found if summary["engine"] == engine]
        for place, name in enumerate(name for name in TITLES if name != "none"):
            measured = [(at, one["arms"]) for at, one in enumerate(streams) if name in one["arms"]]
            means = [arms[name]["ttft_ms"]["mean"] / 1e3 for _, arms in measured]
            ends: list[list[float]] = [[], []]
            for mean, (_, arms) in zip(means, measured, strict=True):
                base, against = arms["prefix"]["ttft_ms"]["mean"] / 1e3, arms[name]["ttft_against_prefix"]
                low, high = against["ratio_interval"] if against else (mean / base, mean / base)
                ends[0].append(max(0.0, mean - base * low))
                ends[1].append(max(0.0, base * high - mean))
            at = [at + 0.2 * (place - 1.5) for at, _ in measured]
            bars = panel.bar(at, means, 0.19, yerr=ends, label=TITLES[name], capsize=2)
            panel.bar_label(bars, fmt="%.2g", fontsize=8)
        panel.set_xticks(range(len(streams)), [f"{one['workload']}\n{one['samples']} requests" for one in streams])
        panel.set_title(engine)
    panels.flat[0].set_ylabel("mean time to first token, seconds")
    panels.flat[0].legend()
    figure.savefig(folder / f"{NAME}.png", dpi=150)
    figure.savefig(folder / f"{NAME}.svg", metadata={"Date": None})
    plt.close(figure)
    return True
