"""docs/results/load.md: the text, and tables from the figures."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from research.load.figures import ALL_AT_ONCE, ARMS, BASE, BLEND

ABOUT = """\
# vLLM under load

Real servers (`vllm serve` with SmolLM2-135M in float32 on a CPU), a client that sends each request when it is due, and three arms: vLLM's **prefix** caching alone, and DejaKV's connector beside it
in modes **exact** and **blend**, with default settings. One arm gets requests at a time, another one first in each phase, and the others idle. All arms get the same prompts at the same times.

By round and workload, in a partition of its own: prompts that are served before, one at a time; a phase in which all requests arrive at once, for the **capacity** in requests a second;
and a phase for each load, with Poisson arrivals from fixed seeds at a percentage of *prefix caching's* capacity. Phases continue the stream: no prompt comes twice. Workloads are those of
[workloads](../workloads.md); `mix` is `rag` with as many prompts of the same lengths that share nothing with any other.

**How to read it.** Times are of the client, from the moment a request was due. *By prefix* is an arm's figure divided by prefix caching's: below 1 is faster for times, above 1 is more for
capacity; in brackets the range over the rounds, if there are several. *ITL*: time between tokens. *Blendable*: prompts of which a quarter or more, exact prefixes apart, stands in prompts of earlier phases; *blended* is the
share of them for which more tokens were reused than any exact prefix has, and *refused* the rest, whatever the reason: the queue, the cost, a load that failed. *First tokens*, *answers*: the
share that equals prefix caching's, greedy. *Thrown away*: loads that took too long or failed after work was spent. Every request counts, and a failed one ends the run. With few requests a p95 is
nearly the slowest of them.
"""
_TIMES = ("ttft_p50", "ttft_p95", "itl_p99")
_TITLES = ("TTFT p50 by prefix", "TTFT p95 by prefix", "ITL p99 by prefix")


def text(result: Mapping[str, Any], name: str) -> str:
    """The page. `name`: the JSON's, which stands beside it."""
    lines = [ABOUT, _where(result, name)]
    if "workloads" in result:
        cells = [
            (workload, load, cell) for workload, some in result["workloads"].items() for load, cell in some.items()
        ]
        at_once = [(workload, cell) for workload, load, cell in cells if load == ALL_AT_ONCE]
        lines += [
            "\n## Capacity\n",
            *_table(("workload", "requests", "arm", "requests a second", "by prefix", *_SERVED), _capacity(at_once)),
        ]
        under = [(f"{workload}, {load}%", cell) for workload, load, cell in cells if load != ALL_AT_ONCE]
        lines += [
            "\n## Latency\n",
            *_table(("workload, load", "requests", "arm", "TTFT p50, p95, ms", *_TITLES, *_SERVED), _latency(under)),
        ]
        strangers = [(name, {**cell, **cell["strangers"]}) for name, cell in under if "strangers" in cell]
        if strangers:
            lines += ["\nThe prompts of `mix` that share nothing (above are the others):\n"]
            lines += _table(
                ("workload, load", "requests", "arm", "TTFT p50, p95, ms", *_TITLES),
                [row[:7] for row in _latency(strangers)],
            )
    if "exact_hits" in result:
        lines += ["\n## Exact hits\n", _exact(result["exact_hits"])]
    if "misses" in result:
        lines += ["\n## Prompts that reuse nothing, with the connector storing them (`exact`)\n"]
        lines += _table(
            (
                "model",
                "turns, prompts each",
                "requests a second without, with",
                "throughput by prefix",
                "processor seconds by prefix",
            ),
            _misses(result["misses"]),
        )
    return "\n".join([*lines, ""])  # fmt: skip


_SERVED = ("first tokens, answers equal", "blended, refused of blendable", "thrown away")


def _table(titles: Sequence[str], rows: Any) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]


def _where(result: Mapping[str, Any], name: str) -> str:
    machine, settings = result["machine"], result["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"`{result['command']}`, {result['finished'][:10]}: {machine['cpu']}, {machine['cores_used']} of {machine['cores']} cores, load {machine['load_average']} at the end; {settings['threads']} thread"
        f" and {settings['kv_gib']} GiB of KV cache for each server; {settings['warm']} prompts served before, {settings['requests']} in a phase, {settings['rounds']} rounds; {versions}."
        f" [Figures, spread and counters]({name})."
    )  # fmt: skip


def _ratio(cell: Mapping[str, Any], name: str, arm: str) -> str:
    if arm == BASE:
        return ""
    rounds = cell[f"{name}_by_prefix_rounds"][arm]
    spread = f" ({min(rounds):.2f} to {max(rounds):.2f})" if len(rounds) > 1 else ""
    return f"{cell[f'{name}_by_prefix'][arm]:.2f}{spread}"


def _served(cell: Mapping[str, Any], arm: str) -> tuple[str, str, str]:
    if arm == BASE:
        return "", "", ""
    equal = f"{cell['first_tokens_equal'][arm]:.0%}, {cell['answers_equal'][arm]:.0%}"
    blended = (
        f"{cell['blended']:.0%}, {cell['refused']:.0%} of {cell['blendable']}"
        if arm == BLEND and cell["blendable"]
        else ""
    )
    return equal, blended, str(cell["loads_thrown_away"][arm])


def _capacity(cells: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, ...]]:
    for name, cell in cells:
        for arm in ARMS:
            rate = f"{cell['capacity_per_second'][arm]:.2f}"
            yield name, str(cell["requests"]), arm, rate, _ratio(cell, "capacity", arm), *_served(cell, arm)


def _latency(cells: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, ...]]:
    for name, cell in cells:
        for arm in ARMS:
            times = f"{cell['ttft_p50_ms'][arm]:,.0f}, {cell['ttft_p95_ms'][arm]:,.0f}"
            ratios = [_ratio(cell, kind, arm) for kind in _TIMES]
            yield name, str(cell["requests"]), arm, times, *ratios, *_served(cell, arm)


def _range(found: Mapping[str, float], digits: int = 2) -> str:
    return f"{found['median']:.{digits}f} ({found['low']:.{digits}f} to {found['high']:.{digits}f})"


def _exact(found: Mapping[str, Any]) -> str:
    return (
        f"{found['tokens']:,} tokens, {found['turns']} turns, medians and ranges: time to first token of a stored prompt that vLLM's own prefix cache no longer holds {_range(found['hit_ms'], 0)} ms,"
        f" computed in full without the connector {_range(found['full_ms'], 0)} ms, **{_range(found['ttft_by_full'], 3)}** of it. The longest pause of another answer meanwhile:"
        f" {_range(found['pause_of_hit_ms'], 0)} ms and {_range(found['pause_of_full_ms'], 0)} ms, {_range(found['pause_by_full'])}."
    )  # fmt: skip


def _misses(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for model, cell in found.items():
        rates = ", ".join(f"{value:.2f}" for value in cell["requests_per_second"].values())
        yield model, f"{cell['pairs']}, {cell['prompts']}", rates, _range(cell["throughput_by_prefix"]), _range(cell["cpu_seconds_by_prefix"])  # fmt: skip
