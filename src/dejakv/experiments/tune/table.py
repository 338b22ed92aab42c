"""The result of a tuning for a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

from dejakv.experiments.plain_words import counted
from dejakv.experiments.shares import in_words

DONORS = {"exact": "equal prompts", "exact_text": "equal texts", "semantic_text": "similar texts"}


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the shares, a table of the settings, the recommendation and the command that proves it."""
    console.print(
        f"{counted(result['samples'], 'prompt')} of {result['log']}, {result['prompt_tokens']:,} tokens of {result['model']}'s tokenizer, "
        f"{result['labelled']} with a right answer ({result['labels']})",
        soft_wrap=True,
    )
    for line in in_words(result):
        console.print(line, soft_wrap=True)
    table = Table(title="each similar prompt answered as its donor")
    for title in ("donors", "least", "words", "hit rate", "false hits", "saved"):
        table.add_column(title, justify="left" if title in ("donors", "words") else "right")
    for row in result["rows"]:
        table.add_row(
            DONORS[row["level"]], "-" if row["threshold"] is None else f"{row['threshold']:g}",
            "checked" if row["lexical_guard"] else "-", f"{row['hit_rate']:.1%} {_interval(row['hit_interval'])}", _false(row),
            f"{row['tokens_saved'] / result['prompt_tokens']:.1%}",
        )  # fmt: skip
    console.print(table)
    for line in in_plain_words(result):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def in_plain_words(result: dict[str, Any]) -> list[str]:
    """What to set, why, what it saves, and how to prove it."""
    advice = result["recommended"]
    settings = ", ".join(f"{name}={value}" for name, value in advice["settings"].items())
    saved = (advice["row"] or result["rows"][0])["tokens_saved"]
    lines = [
        f"recommended: {settings}",
        f"why: {advice['reason']}",
        f"it saves about {saved / result['prompt_tokens']:.1%} of the prompts' tokens, exact prefixes included",
    ]
    if "candidate" in advice:
        lines.append("nearest: " + ", ".join(f"{name}={value}" for name, value in advice["candidate"].items()))
    not_worth = max(row["not_worth"] for row in result["rows"])
    if not_worth:
        have = "has" if not_worth == 1 else "have"
        lines.append(
            f"up to {counted(not_worth, 'prompt')} {have} a donor that would save fewer than "
            f"{counted(result['min_gain'], 'token')} beyond the exact prefix: no hit (--min-gain)"
        )
    beyond = result["share_anywhere"] - result["share_prefix"]
    if beyond >= 0.1:
        lines.append(f"{beyond:.1%} of the tokens stand in earlier prompts at another place: try --reuse blend as well")
    lines += in_words_of_bound(result.get("bound"), result["max_false_hits"])
    return [*lines, *result["notes"], f"prove it: {result['command']}"]


def in_words_of_bound(bound: dict[str, Any] | None, most: float) -> list[str]:
    """What a bound takes that holds while serving; nothing where there is nothing to say."""
    if bound is None:
        return []
    rate = f"at {bound['false_hit_rate']:.1%} wrong hits" if bound["false_hit_rate"] else "if no hit is wrong"
    if bound["labels"] is None:
        return [f"to bound wrong answers while serving: --error-bound {most:g} would serve nothing {rate}"]
    return [
        f"to bound wrong answers while serving: --error-bound {most:g} serves after about {bound['labels']:,} labelled hits {rate}, that is "
        f"{bound['prompts']:,} prompts of this log"
    ]


def _interval(interval: tuple[float, float]) -> str:
    return f"({100 * interval[0]:.1f} to {100 * interval[1]:.1f})"


def _false(row: dict[str, Any]) -> str:
    if row["false_hit_rate"] is None:
        return "-"
    return f"{row['false_hit_rate']:.1%} {_interval(row['false_hit_interval'])}"
