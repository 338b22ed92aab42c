"""`workloads.md`, `workloads.json` and the picture: where each stream was measured, and a table of its arms."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv.blend.settings import QUALITIES
from dejakv.experiments.output import SUMMARY, make_folder, read_object, replace_file
from research.workloads.streams import REQUESTS

NAME = "workloads"
TITLES = {"none": "nothing reused", "prefix": "prefix caching"} | {name: f"blend {name}" for name in QUALITIES}

_ABOUT = f"""\
# The work that reuse pays for

Streams of prompts that repeat without being identical ([workloads](../workloads.md)), each request served by all arms one after another in
one process, another arm first each time, each with a store of its own. Greedy, fixed seeds, one request at a time. Times to first token are
compared with prefix caching, answers with full computation. Intervals are 95%, by bootstrap over the requests (10,000 resamples of the pairs).

- *Tokens computed*: rows that went through the decoder; of a blend the mean over its layers.
- *Requests a second*: of the answers alone. State is stored while the next request runs.
- *Missed*: requests for which no donor was used, beside the same requests under prefix caching: the cost of a miss. *Blended*: the same
  for those that were blended.
- *KL*: divergence of the first token from full computation's, nats. *Same likeliest token*: along full computation's answer.
- A dash: not measured by this engine, or nothing to compare.

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
    """The report as Markdown."""
    return "\n".join([_ABOUT, *(_stream(summary) for summary in found)])


def _stream(summary: Mapping[str, Any]) -> str:
    many = f", {summary['samples']} requests" if summary["samples"] != REQUESTS else ""
    machine, (least, most) = summary["machine"], summary["lengths"]
    arms: Mapping[str, Any] = summary["arms"]
    lines = [
        f"## {summary['workload']} through {summary['engine']}{many}",
        "",
        f"{summary['samples']} requests of {least} to {most:,} tokens through {summary['model']}, {summary['dtype']},"
        f" {summary['answer_tokens']} tokens of answer. In prefix blocks of earlier prompts: {_share(summary['share_prefix'])}"
        f" of the tokens; anywhere in earlier prompts: {_share(summary['share_anywhere'])}.",
        f"`{summary['command']}`, {summary['finished'][:10]}, {machine['cpu']}, {machine['cores_used']} of"
        f" {machine['cores']} cores, {machine['threads']} threads, load {machine['load_average']} before and"
        f" {machine['load_average_after']} after; {', '.join(f'{name} {value}' for name, value in summary['versions'].items())}."
        + (" The run was stopped and went on." if summary["resumed"] else ""),
        "",
        "| | " + " | ".join(TITLES.get(name, name) for name in arms) + " |",
        "|---" * (len(arms) + 1) + "|",
    ]
    cells = {name: _cells(arm, summary["sizes"].get(name, {}), summary["samples"]) for name, arm in arms.items()}
    rows = [
        f"| {title} | " + " | ".join(cells[name][title] for name in arms) + " |" for title in next(iter(cells.values()))
    ]
    return "\n".join([*lines, *rows, ""])


def _cells(arm: Mapping[str, Any], sizes: Mapping[str, Any], samples: int) -> dict[str, str]:
    """The column of an arm, by the titles of its rows."""
    ttft, stored = arm["ttft_ms"], sizes.get("store_bytes")
    made = {
        "prompt tokens": f"{arm['prompt_tokens']:,}",
        "tokens computed": f"{arm['computed_tokens']:,}",
        "of prefix caching's": _share(arm["computed_of_prefix"]),
        "TTFT mean, ms": f"{ttft['mean']:,.0f}",
        "TTFT p50 / p95, ms": f"{ttft['p50']:,.0f} / {ttft['p95']:,.0f}",
        "TTFT against prefix, ms": _difference(arm["ttft_against_prefix"]),
        "TTFT by prefix's": _against(arm["ttft_against_prefix"]),
        "requests a second": f"{arm['requests_per_second']:.3f}",
        "time of a request by prefix's": _against(arm["latency_against_prefix"]),
        "how they ran": ", ".join(f"{count} {name}" for name, count in arm["methods"].items()),
    }
    for title, name in (("first token equal", "first_token_equal"), ("whole answer equal", "answers_equal")):
        made[title] = "-" if arm[name] is None else f"{arm[name]} of {samples}"
    made["KL of the first token"] = "-" if arm["kl_mean"] is None else f"{arm['kl_mean']:.4f}"
    made["same likeliest token"] = _share(arm["top1"])
    made["bytes stored"] = f"{stored / 1e6:,.0f} MB" if stored else "-"
    made["blended: TTFT / prefix's, ratio"] = _part(arm["blended"])
    made["missed: TTFT / prefix's, ratio"] = _part(arm["missed"])
    return made


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _against(found: Mapping[str, Any] | None) -> str:
    if not found:
        return "-"
    low, high = found["ratio_interval"]
    return f"{found['ratio']:.2f} ({low:.2f} to {high:.2f})"


def _difference(found: Mapping[str, Any] | None) -> str:
    if not found:
        return "-"
    low, high = found["difference_interval"]
    return f"{found['difference']:+,.0f} ({low:+,.0f} to {high:+,.0f})"


def _part(part: Mapping[str, Any] | None) -> str:
    if not part or not part["requests"]:
        return "-"
    times = f"{part['ttft_ms']:,.0f} / {part['prefix_ttft_ms']:,.0f} ms"
    return f"{part['requests']}: {times}, {_against(part['against_prefix'])}"


def draw(found: Sequence[Mapping[str, Any]], folder: Path) -> bool:
    """Writes `workloads.png` and `workloads.svg`: mean time to first token by stream and arm, a panel an engine. Error bars: the 95%
    interval of the paired ratio, times prefix caching's mean. False without matplotlib (extra `report`) or without streams."""
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
