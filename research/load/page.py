"""docs/results/load.md: the text, and tables from the figures."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from research.load.figures import ALL_AT_ONCE, ARMS, BASE, BLEND

ABOUT = """\
# vLLM under load

Real servers (SmolLM2-135M in float32 on a CPU), a client that sends each request when it is due, \
and three arms that get the same prompts at the same times, one after the other: vLLM's \
**prefix** caching alone, and DejaKV's
connector beside it in modes **exact** and **blend**. A server's model and the connector's \
threads share one core; all else has the others. Arrivals are Poisson at a percentage of the rate \
at which *prefix caching* serves requests
that arrive at once; these give the **capacity**. No prompt comes twice. Workloads are those of \
[streams](../how-to/measure.md#streams); `mix` is `rag` with as many prompts that share nothing.

*By prefix*: divided by prefix caching's; below 1 is faster for times, above 1 is more for \
capacity. *ITL*: time between tokens. *Blendable*: prompts of which a quarter or more, exact \
prefixes apart, stands in earlier prompts; *refused*
are those that reused no more than an exact prefix. *First tokens*, *answers*: the share that \
equals prefix caching's. *Thrown away*: loads that were too late or failed. With few requests a \
p95 is nearly the slowest of them.
"""
_TIMES = ("ttft_p50", "ttft_p95", "itl_p99")
_LATENCY = (
    "workload, load",
    "prefix: TTFT p50, p95, ms",
    "arm",
    "TTFT p50 by prefix",
    "TTFT p95 by prefix",
    "ITL p99 by prefix",
)
_SERVED = ("first tokens, answers equal", "blended, refused of blendable", "thrown away, failed")

Cell = Mapping[str, Any]
Cells = Sequence[tuple[str, Cell]]


def text(*results: tuple[Mapping[str, Any], str]) -> str:
    """The page of one or more runs, each with the name of its JSON, which stands beside it.

    Their `notes`, if somebody wrote some, are paragraphs of the page.
    """
    cells = [
        (workload, load, cell)
        for result, _ in results
        for workload, some in result["workloads"].items()
        for load, cell in some.items()
    ]
    at_once = [(workload, cell) for workload, load, cell in cells if load == ALL_AT_ONCE]
    under = [
        (f"{workload}, {load}%", cell) for workload, load, cell in cells if load != ALL_AT_ONCE
    ]
    every = [*under, *((f"{workload}, all at once", cell) for workload, cell in at_once)]
    strangers = [
        (name, {**cell, **cell["strangers"]}) for name, cell in every if "strangers" in cell
    ]
    lines = [ABOUT, "\n\n".join(_where(result, name) for result, name in results)]
    lines += [f"\n{line}" for result, _ in results for line in result.get("notes", ())]
    lines.append("\n## Capacity\n")
    lines += _table(
        ("workload", "prefix: requests a second", "arm", "by prefix", *_SERVED), _capacity(at_once)
    )
    lines += ["\n## Latency\n", *_table((*_LATENCY, *_SERVED), _latency(under))]
    if strangers:
        lines += ["\nThe prompts of `mix` that share nothing (above are the others):\n"]
        lines += _table(_LATENCY, (row[: len(_LATENCY)] for row in _latency(strangers)))
    return "\n".join([*lines, ""])


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]


def _where(result: Mapping[str, Any], name: str) -> str:
    machine, settings = result["machine"], result["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"{', '.join(result['workloads'])}: `{result['command']}`, {result['finished'][:10]}:"
        f" {machine['cpu']}, {machine['cores_used']} of {machine['cores']} cores, load"
        f" {machine['load_average']} at the end; flags of all servers"
        f" `{' '.join(settings['flags'])}`,"
        f" {settings['kv_gib']} GiB of KV cache each; {settings['warm']} prompts served before,"
        f" {settings['requests']} in a phase of a round; {versions}."
        f" [Figures, spread and counters]({name})."
    )


def _ratio(cell: Cell, name: str, arm: str) -> str:
    if arm not in cell[f"{name}_by_prefix"]:
        return ""
    rounds = cell[f"{name}_by_prefix_rounds"][arm]
    spread = f" ({min(rounds):.2f} to {max(rounds):.2f})" if len(rounds) > 1 else ""
    return f"{cell[f'{name}_by_prefix'][arm]:.2f}{spread}"


def _served(cell: Cell, arm: str) -> tuple[str, str, str]:
    equal, blended = "", ""
    if not cell["failed"][arm]:
        equal = f"{cell['first_tokens_equal'][arm]:.0%}, {cell['answers_equal'][arm]:.0%}"
        if arm == BLEND and cell["blendable"]:
            blended = f"{cell['blended']:.0%}, {cell['refused']:.0%} of {cell['blendable']}"
    return equal, blended, f"{cell['loads_thrown_away'][arm]}, {cell['failed'][arm]}"


def _capacity(cells: Cells) -> Iterator[tuple[str, ...]]:
    for name, cell in cells:
        rate = (
            f"{cell['capacity_per_second'][BASE]:.2f}"
            if BASE in cell["capacity_per_second"]
            else ""
        )
        for arm in ARMS:
            if arm != BASE:
                yield name, rate, arm, _ratio(cell, "capacity", arm), *_served(cell, arm)


def _latency(cells: Cells) -> Iterator[tuple[str, ...]]:
    for name, cell in cells:
        times = [
            f"{cell[f'{kind}_ms'][BASE]:,.0f}" for kind in _TIMES[:2] if BASE in cell[f"{kind}_ms"]
        ]
        for arm in ARMS:
            if arm != BASE:
                yield (
                    name,
                    ", ".join(times),
                    arm,
                    *(_ratio(cell, kind, arm) for kind in _TIMES),
                    *_served(cell, arm),
                )
