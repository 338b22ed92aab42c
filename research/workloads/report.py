"""The report of the workloads: `workloads.md`, `workloads.json` and the picture.

`workloads.md` is docs/results/workloads.md, which adds its findings at the end.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv.blend.settings import QUALITIES
from dejakv.experiments.output import (
    SAMPLES,
    SUMMARY,
    make_folder,
    read_json_or_empty,
    replace_file,
)
from dejakv.experiments.samples_log import finished_rows
from research.workloads.figures import REFERENCE
from research.workloads.streams import ROUNDED

NAME = "workloads"
TITLES = {"none": "nothing reused", "prefix": "prefix caching"} | {
    name: f"blend {name}" for name in QUALITIES
}

_ABOUT = f"""\
# Blends save time on code, passages and conversations

[Streams](../how-to/measure.md#streams) of prompts that repeat without being identical. All arms \
serve each request in one process, in rotating order,
each with a store of its own; greedy, one request at a time. *By prefix's*: divided by prefix \
caching's, with 95% by bootstrap over the requests.
*Equal*: as full computation's; *bf16* is full computation in that dtype. *KL*: divergence of the \
first token from full computation's, in nats. A dash: full computation was not an arm.

![Time to first token]({NAME}.png)
"""


def summaries(output: Path) -> list[dict[str, Any]]:
    """The streams that are measured, whole or in part, in a fixed order.

    `rounded`: how many first tokens and answers in bf16 are those of the same requests in fp32, and
    how many were compared; None where it was not measured.
    """
    found = {path.parent: read_json_or_empty(path) for path in sorted(output.glob(f"*/{SUMMARY}"))}
    order = ("repo", "rag", "sessions")
    ours = [
        {**summary, "rounded": _alike(folder, folder.with_name(f"{folder.name}-{ROUNDED}"))}
        for folder, summary in found.items()
        if "workload" in summary and summary["samples"] and summary["dtype"] != ROUNDED
    ]
    return sorted(
        ours,
        key=lambda item: (
            item["engine"],
            order.index(item["workload"]) if item["workload"] in order else 99,
        ),
    )


def _alike(folder: Path, other: Path) -> list[int] | None:
    if not (other / SAMPLES).exists():
        return None
    rows = zip(
        finished_rows(folder), finished_rows(other), strict=False
    )  # one of them may have been stopped
    pairs = [
        (one.arms[REFERENCE], two.arms[REFERENCE]) for one, two in rows if REFERENCE in one.arms
    ]
    equal = [
        sum(one.first_token == two.first_token for one, two in pairs),
        sum(one.text == two.text for one, two in pairs),
    ]
    return [*equal, len(pairs)] if pairs else None


def write(output: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Writes both files."""
    folder = make_folder(output)
    replace_file(
        folder / f"{NAME}.json", json.dumps({"streams": list(found)}, indent=2) + "\n", "--output"
    )
    replace_file(folder / f"{NAME}.md", page(found), "--output")


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """The report as Markdown: a row for each arm with a cache, beside the same stream's prefix
    caching, and where it was measured.
    """
    lines = [_ABOUT, "| " + " | ".join(_COLUMNS) + " |", "| --- " * len(_COLUMNS) + "|"]
    for summary in found:
        stream = f"{summary['workload']}, {summary['engine']}, {summary['samples']}"
        for name, arm in summary["arms"].items():
            if name not in ("none", "prefix"):
                lines.append(
                    f"| {stream} | {name} | " + " | ".join(_cells(arm, summary["samples"])) + " |"
                )
        if summary["rounded"]:
            lines.append(
                f"| {stream} | {ROUNDED} | - | - | {{}}, {{}} of {{}} | - |".format(
                    *summary["rounded"]
                )
            )
    return "\n".join([*lines, "", _COMMAND, "", *_where(found), ""])


_COLUMNS = (
    "workload, engine, requests", "quality", "tokens computed by prefix's",
    "time to first token by prefix's",
    "first token, answer equal", "KL",
)  # fmt: skip
_COMMAND = (
    "`make workloads`, or a row: `python -m research.workloads --engine ENGINE --workload NAME"
    " --requests N --arm QUALITY --output runs/workloads`."
)


def _cells(arm: Mapping[str, Any], samples: int) -> list[str]:
    equal = arm["answers_equal"]
    return [
        _share(arm["computed_of_prefix"]),
        _against(arm["ttft_against_prefix"]),
        "-" if equal is None else f"{arm['first_token_equal']}, {equal} of {samples}",
        "-" if arm["kl_mean"] is None else f"{arm['kl_mean']:.4f}",
    ]


def _where(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each model, machine and kind of request."""
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for summary in found:
        machine, (least, most) = summary["machine"], summary["lengths"]
        about = (
            f"{summary['model']}, {summary['dtype']}, requests of {least} to {most:,} tokens,"
            f" answers of {summary['answer_tokens']}; {machine['cpu']}, {machine['cores_used']} of"
            f" {machine['cores']} cores, threads {machine['threads']}"
        )
        alike.setdefault(about, []).append(summary)
    lines = []
    for about, some in sorted(alike.items(), key=lambda item: len(item[1])):
        rows = ", ".join(f"{one['workload']} {one['engine']} {one['samples']}" for one in some)
        loads = [
            one["machine"][key] for one in some for key in ("load_average", "load_average_after")
        ]
        days = [one["finished"][:10] for one in some]
        versions = sorted(
            {f"{name} {value}" for one in some for name, value in one["versions"].items()}
        )
        lines.append(
            f"- {'all others' if 0 < len(lines) == len(alike) - 1 else rows}: {about}, load"
            f" {min(loads)} to {max(loads)}; {' to '.join(dict.fromkeys((min(days), max(days))))};"
            f" {', '.join(versions)}"
        )
    return lines


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _against(found: Mapping[str, Any] | None) -> str:
    if not found:
        return "-"
    low, high = found["ratio_interval"]
    return f"{found['ratio']:.2f} ({low:.2f} to {high:.2f})"


def draw(found: Sequence[Mapping[str, Any]], folder: Path) -> bool:
    """Writes `workloads.png` and `workloads.svg`: mean time to first token by stream and arm, a
    panel an engine. Error bars: the 95% interval of the paired ratio, times prefix caching's
    mean. False without matplotlib or without streams.
    """
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

    figure, panels = plt.subplots(
        1,
        len(engines),
        figsize=(4.5 * len(engines), 4),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for panel, engine in zip(panels.flat, engines, strict=True):
        streams = [summary for summary in found if summary["engine"] == engine]
        for place, name in enumerate(name for name in TITLES if name != "none"):
            measured = [(at, one["arms"]) for at, one in enumerate(streams) if name in one["arms"]]
            means = [arms[name]["ttft_ms"]["mean"] / 1e3 for _, arms in measured]
            ends: list[list[float]] = [[], []]
            for mean, (_, arms) in zip(means, measured, strict=True):
                base, against = (
                    arms["prefix"]["ttft_ms"]["mean"] / 1e3,
                    arms[name]["ttft_against_prefix"],
                )
                low, high = against["ratio_interval"] if against else (mean / base, mean / base)
                ends[0].append(max(0.0, mean - base * low))
                ends[1].append(max(0.0, base * high - mean))
            at = [at + 0.2 * (place - 1.5) for at, _ in measured]
            bars = panel.bar(at, means, 0.19, yerr=ends, label=TITLES[name], capsize=2)
            panel.bar_label(bars, fmt="%.2g", fontsize=8)
        panel.set_xticks(
            range(len(streams)),
            [f"{one['workload']}\n{one['samples']} requests" for one in streams],
        )
        panel.set_title(engine)
    panels.flat[0].set_ylabel("mean time to first token, seconds")
    panels.flat[0].legend()
    figure.savefig(folder / f"{NAME}.png", dpi=150)
    figure.savefig(folder / f"{NAME}.svg", metadata={"Date": None})
    plt.close(figure)
    return True
