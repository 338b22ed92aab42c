"""The picture of the report: mean time to first token of prefix caching and of DejaKV, a panel an engine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAME = "workloads"
_BARS = (
    ("prefix", "prefix caching", "#8a8f98"),
    ("strict", "DejaKV, strict", "#a9c9ee"),
    ("default", "DejaKV, default", "#1f5fa8"),
    ("loose", "DejaKV, loose", "#c8dcf4"),
)
_TITLES = {"transformers": "transformers", "vllm": "vLLM"}
_INK = "#24292f"
_WIDTH = 0.2


def draw(found: Sequence[Mapping[str, Any]], folder: Path) -> bool:
    """Writes `workloads.png` and `workloads.svg`. False without matplotlib (extra `report`) or without streams."""
    try:
        import matplotlib
    except ImportError:
        return False
    engines = list(dict.fromkeys(summary["engine"] for summary in found))
    if not engines:
        return False
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = NAME  # the same figures give the same file
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(engines), figsize=(4.0 * len(engines) + 0.4, 4.0), squeeze=False, sharey=True)
    for panel, engine in zip(panels.flat, engines, strict=True):
        _panel(panel, [summary for summary in found if summary["engine"] == engine])
        panel.set_title(_TITLES.get(engine, engine), fontsize=12, color=_INK)
    panels.flat[0].set_ylabel("mean time to first token, seconds", fontsize=11, color=_INK)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(labels) if len(engines) > 1 else 2,
        fontsize=11,
        frameon=False,
    )
    figure.set_layout_engine("constrained")
    figure.savefig(folder / f"{NAME}.png", dpi=150, facecolor="white")
    figure.savefig(folder / f"{NAME}.svg", facecolor="white", metadata={"Date": None})
    plt.close(figure)
    return True


def _panel(panel: Any, streams: Sequence[Mapping[str, Any]]) -> None:
    """Groups of bars. Error bars: the 95% interval of the paired ratio, times prefix caching's mean."""
    for place, (name, label, color) in enumerate(_BARS):
        measured = [(group, summary) for group, summary in enumerate(streams) if name in summary["arms"]]
        at = [group + (place - 1.5) * _WIDTH for group, _ in measured]
        heights = [summary["arms"][name]["ttft_ms"]["mean"] / 1e3 for _, summary in measured]
        panel.bar(at, heights, _WIDTH * 0.94, label=label, color=color)
        for x, height, (_, summary) in zip(at, heights, measured, strict=True):
            top = height
            against = summary["arms"][name]["ttft_against_prefix"]
            if against:
                base = summary["arms"]["prefix"]["ttft_ms"]["mean"] / 1e3
                low, top = (base * bound for bound in against["ratio_interval"])
                panel.errorbar(
                    x, height, [[max(0.0, height - low)], [max(0.0, top - height)]], color=_INK, capsize=2, linewidth=1
                )
            text = f"{height:.1f}" if height >= 0.1 else f"{height:.2g}"
            panel.annotate(
                text, (x, max(top, height)), (0, 2), textcoords="offset points", ha="center", fontsize=9, color=_INK
            )
    panel.set_xticks(
        range(len(streams)),
        [f"{summary['workload']}\n{summary['samples']} requests" for summary in streams],
        fontsize=11,
        color=_INK,
    )
    panel.margins(y=0.1)
    panel.tick_params(length=0)
    panel.grid(axis="y", alpha=0.25)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
