"""The summary of a run as tables for a terminal: arms, levels, what was not used, and the answers that the cache changed."""

import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dejakv.experiments.plain_words import in_plain_words, is_faster, no_claim, not_run_in_words
from dejakv.experiments.plain_words import shares_in_words as in_words
from dejakv.experiments.summary import Row


def show(
    summary: dict[str, Any], rows: Sequence[Row] = (), console: Console | None = None, *, disagreements: int = 0
) -> None:
    """Prints a run's or a dry run's summary, then up to `disagreements` changed answers, and the result in plain words."""
    console = console or Console()
    for line in summary.get("implied", ()):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    if summary.get("cache_mode") in ("dry-run", "shares"):
        _show_dry_run(summary, console)
        return
    console.print(_arms(summary))
    if summary.get("by_level"):
        console.print(_levels(summary))
    if (unused := unused_table(summary.get("not_used", {}))) is not None:
        console.print(unused)
    for line in _lines(summary) if "cache" in summary["arms"] else []:
        console.print(line, soft_wrap=True)
    _show_not_run(summary, console)
    _show_shares(summary, console)
    if changed := changed_answers(rows)[:disagreements]:
        console.print(side_by_side(changed))
    for line in in_plain_words(summary):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _arms(summary: dict[str, Any]) -> Table:
    arms: dict[str, Any] = summary["arms"]
    table = Table(title=f"{summary['samples']} samples of {summary['dataset']} through {summary['model']}")
    table.add_column("")
    for name in arms:
        table.add_column(name, justify="right")
    if any(arm["accuracy"] is not None for arm in arms.values()):
        table.add_row("accuracy", *[_share(arm["accuracy"]) for arm in arms.values()])
    table.add_row("prompt tokens", *[f"{arm['prompt_tokens']:,}" for arm in arms.values()])
    table.add_row("computed tokens", *[f"{arm['computed_tokens']:,}" for arm in arms.values()])
    base = arms.get("none", {}).get("computed_tokens")
    if base:
        table.add_row("  of none", *[_share(arm["computed_tokens"] / base) for arm in arms.values()])
    table.add_row("encoder runs", *[f"{arm['encoder_runs']:,}" for arm in arms.values()])
    table.add_row("TTFT p50 ms", *[f"{arm['ttft_ms']['p50']:.2f}" for arm in arms.values()])
    table.add_row("TTFT p95 ms", *[f"{arm['ttft_ms']['p95']:.2f}" for arm in arms.values()])
    table.add_row("TTFT mean ms", *[f"{arm['ttft_ms']['mean']:.2f}" for arm in arms.values()])
    table.add_row("latency p50 ms", *[f"{arm['latency_ms']['p50']:.2f}" for arm in arms.values()])
    return table


def _levels(summary: dict[str, Any]) -> Table:
    table = Table(title="hits by level (prefix apart)")
    for name in ("level", "hits", "of them exact", "agreement with full", "false hits"):
        table.add_column(name, justify="left" if name == "level" else "right")
    for level, row in summary["by_level"].items():
        table.add_row(
            level, str(row["hits"]), str(row["exact_hits"]), _share(row["agreement"]), _count(row["false_hits"])
        )
    return table


def _lines(summary: dict[str, Any]) -> list[str]:
    low, high = summary["hit_rate_interval"]
    lines = [
        f"hit rate {_share(summary['hit_rate'])} (95%: {_share(low)} to {_share(high)}),"
        f" exact prefixes besides: {summary['prefix_hits']}"
    ]
    if summary["agreement"] is not None:
        low, high = summary["agreement_interval"]
        lines.append(
            f"answers that equal full computation's: {_share(summary['agreement'])} (95%: {_share(low)} to {_share(high)})"
        )
        lines.append(f"answers changed: {round((1 - summary['agreement']) * summary['samples'])}")
    lines += in_words_of_bound(summary.get("trust"), summary.get("noise_floor"))
    lines += _nearness(summary)
    response = summary.get("response_cache", {})
    if response.get("hits"):
        lines.append(
            f"a response cache on the same {response['hits']} hits would agree {_share(response['agreement'])}"
            " and compute no token"
        )
    beyond = summary.get("beyond_prefix")
    if summary.get("started_with_chunks"):
        lines.append(
            f"the cache began with {summary['started_with_chunks']} stored chunks, prefix with none: no verdict on TTFT"
        )
    elif beyond is not None:
        lines += _verdict(beyond)
    skips = {name: count for name, count in summary.get("hook_counts", {}).items() if "skip" in name}
    lines += [f"embedding hook, {name}: {count} times" for name, count in skips.items()]
    lines.append(f"lookup p50 {summary['lookup_ms']['p50']:.2f} ms, p95 {summary['lookup_ms']['p95']:.2f} ms")
    if "store_bytes" in summary:
        lines.append(f"store {summary['store_bytes'] / 1e6:.1f} MB in {summary['store_entries']} chunks")
    if summary.get("warning"):
        lines.append(f"WARNING {summary['warning']}")
    return lines


def in_words_of_bound(trust: dict[str, Any] | None, noise: dict[str, Any] | None = None) -> list[str]:
    """What came of the error bound, and beside it how often full computation differs from itself; nothing without a bound."""
    if trust is None:
        return []
    rules = f", {trust['rules']} rules" if trust["rules"] else ""
    audited = f", {trust['audited']} of them audited ({trust['wrong']} wrong)" if trust["served"] else ""
    lost = f", {trust['lost']} labels lost" if trust["lost"] else ""
    upper = (
        ""
        if trust["upper"] is None
        else f"; at most {_share(trust['upper'])} of what is served now is wrong ({_share(trust['confidence'])} confidence)"
    )
    return [
        f"error bound {_share(trust['delta'])}: {trust['gate']}{rules}; {trust['explored']} hits computed both ways "
        f"({trust['explored_wrong']} wrong), {trust['served']} served{audited}{lost}{upper}",
        *_beside(noise),
    ]


def _beside(noise: dict[str, Any] | None) -> list[str]:
    if noise is None or noise.get("wrong") is None:
        return []
    batch = noise.get("batch")
    together = (
        f", and {_share(batch['first'])} of first tokens in a batch against alone ({batch['samples']} prompts)"
        if batch
        else ""
    )
    return [
        f"  beside it, not subtracted: by the same measure {_share(noise['wrong'])} of the answers in {noise['dtype']} are "
        f"others than the model's own ({noise['samples']} prompts){together}"
    ]


def _nearness(summary: dict[str, Any]) -> list[str]:
    """The distance from full computation, and for comparison that between fp32 and bf16."""
    lines: list[str] = []
    for title, values in (("cache", summary), ("noise floor", summary.get("noise_floor"))):
        if values and values.get("kl_mean") is not None:
            beside = f" ({values['dtype']}, {values['samples']} prompts)" if "dtype" in values else ""
            lines.append(
                f"{title}{beside}: KL of the first token {values['kl_mean']:.4f}, same likeliest token along the answer"
                f" {_share(values['top1'])}"
            )
    return lines


def _verdict(beyond: dict[str, Any]) -> list[str]:
    """Whether reuse pays, beyond prefix caching, over all requests and beyond the run's noise."""
    low, high = beyond["ttft_difference_interval"]
    ends = beyond.get("ttft_ratio_interval")
    faster = is_faster(beyond) if ends else None
    shown = "reuse beyond prefixes pays" if faster else "reuse beyond prefixes does NOT pay"
    says = no_claim(beyond).removeprefix("which is ") if faster is None else shown
    within = f" (95%: {_ratio(ends[0])} to {_ratio(ends[1])})" if ends else ""
    return [
        f"beyond prefix caching, over all requests: {_share(beyond['tokens_ratio'])} of its tokens,"
        f" {_ratio(beyond['ttft_ratio'])} its mean TTFT{within}",
        f"  {beyond['ttft_difference_ms']:+.2f} ms a request (95%: {low:+.2f} to {high:+.2f}): {says}",
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _show_not_run(summary: dict[str, Any], console: Console) -> None:
    for line in not_run_in_words(summary):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _show_shares(summary: dict[str, Any], console: Console) -> None:
    for line in in_words(summary) if "share_prefix" in summary else []:
        console.print(line, soft_wrap=True)


def _show_dry_run(summary: dict[str, Any], console: Console) -> None:
    if "hit_rate" in summary:
        _show_look_ups(summary, console)
    else:
        console.print(
            f"{summary['samples']} samples of {summary['dataset']}, {summary['prompt_tokens']:,} tokens of "
            f"{summary['model']}'s tokenizer",
            soft_wrap=True,
        )
    _show_not_run(summary, console)
    _show_shares(summary, console)
    if summary.get("warning"):
        console.print(f"WARNING {summary['warning']}", soft_wrap=True)


def _show_look_ups(summary: dict[str, Any], console: Console) -> None:
    table = Table(title=f"dry run: {summary['samples']} samples of {summary['dataset']}, decoder not run")
    for name in ("level", "would hit", "judged", "false", "false-hit rate", "95%"):
        table.add_column(name, justify="left" if name == "level" else "right")
    for level, row in [
        *summary["by_level"].items(),
        ("all", {"hits": round(summary["hit_rate"] * summary["samples"]), **summary}),
    ]:
        low, high = row["false_hit_interval"] or (None, None)
        table.add_row(
            level,
            str(row["hits"]),
            str(row["judged"]),
            _count(row["false_hits"]),
            _share(row["false_hit_rate"]),
            "-" if low is None else f"{_share(low)} to {_share(high)}",
        )
    console.print(table)
    low, high = summary["hit_rate_interval"]
    console.print(f"hit rate {_share(summary['hit_rate'])} (95%: {_share(low)} to {_share(high)})")
    if (unused := unused_table(summary.get("not_used", {}))) is not None:
        console.print(unused)
    judged = (
        "judged by the data set's answers: a live run also counts answers that the model changes between two right wordings"
        if summary["judged"]
        else "no hit was judged, because the data set has no answers (or blend was asked for, which gives none of the donor's)"
    )
    console.print(judged, soft_wrap=True)
    console.print(f"plans: {', '.join(f'{name} {count}' for name, count in summary['plans'].items())}")


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


_MOST = 8
_LONGEST = 120


def unused_table(reasons: Mapping[str, int]) -> Table | None:
    """A row a guard or rule, from `not_used` of a summary (reason to requests, most frequent first); None for no reason."""
    if not reasons:
        return None
    groups: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for reason, count in reasons.items():
        who, colon, why = reason.partition(": ")
        groups[who if colon else "other"].append((why if colon else reason, count))
    table = Table(title="found and not used")
    for name in ("refused by", "requests", "most frequent reason"):
        table.add_column(name, justify="right" if name == "requests" else "left")
    ordered = sorted(groups.items(), key=lambda item: -sum(count for _, count in item[1]))
    for who, found in ordered[:_MOST]:
        why = max(found, key=lambda item: item[1])[0]
        more = f" (and {len(found) - 1} other reasons)" if len(found) > 1 else ""
        table.add_row(who, str(sum(count for _, count in found)), f"{why[:_LONGEST]}{more}")
    return table


_WIDTH = 120
_QUESTION = 160


def changed_answers(rows: Iterable[Row]) -> list[Row]:
    """The rows whose `cache` answer differs from the exact one, in the order of the run."""
    return [row for row in rows if row.agrees("cache") is False]


def side_by_side(rows: Sequence[Row]) -> RenderableType:
    """One block a row: question, both answers, and the origin of the cached one. For a rich console."""
    return Group(*(_block(row) for row in rows))


def as_text(rows: Sequence[Row]) -> str:
    """All disagreements of a run as plain text, `disagreements.txt`."""
    changed = changed_answers(rows)
    if not changed:
        return "No answer of the cache arm differs from full computation's.\n"
    buffer = io.StringIO()
    Console(file=buffer, width=_WIDTH, color_system=None).print(side_by_side(changed))
    return buffer.getvalue()


def _block(row: Row) -> Table:
    record = row.arms["cache"].record
    score = "" if record.score is None else f", score {record.score:.3f}"
    table = Table(title=Text(f"{row.sample_id}: {_short(row.question)}"), title_justify="left", expand=True)
    table.add_column("computed in full", ratio=1)
    table.add_column(f"with the cache: {record.provenance}{score}", ratio=1)
    table.add_row(Text(row.exact.text if row.exact is not None else ""), Text(row.arms["cache"].text))
    if row.answer is not None:
        table.caption = Text(f"expected: {row.answer}")
    return table


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _QUESTION else f"... {flat[-_QUESTION:]}"
