"""Advice from an estimate: the setting that saves most and is shown to be right often enough."""

from collections.abc import Mapping, Sequence
from typing import Any

from dejakv.errors import count_noun
from dejakv.experiments import savings
from dejakv.experiments.reports.plain_words import estimated, figure, interval, share
from dejakv.experiments.rule_gains import gains_sheet
from dejakv.experiments.table import Block, TextTable

DONORS = {"exact": "equal prompts", "exact_text": "equal texts", "semantic_text": "similar texts"}


def recommend(rows: Sequence[Mapping[str, Any]], max_false_hits: float) -> dict[str, Any]:
    """Return the recommended settings and the reason.

    A row is shown to be right often enough if the upper end of its 95% interval of false hits is at
    most `max_false_hits`. Of those rows the one with the most tokens saved is taken, of equals the
    strictest. If there is none, exact reuse is recommended; the reason then names the setting that
    more labels might show to be right, if there is one.

    Parameters
    ----------
    rows : sequence of mappings
        The `rows` of an estimate, one for each setting that was tried.
    max_false_hits : float
        Largest share of hits that may be wrong, in (0, 1].

    Returns
    -------
    dict
        `settings` for the cache, the chosen `row` (None for exact reuse), and the `reason`.
    """
    # Rows with hits that nobody judged count as unknown, never as right.
    labelled = any(row["judged"] for row in rows)
    useful = [row for row in rows if row["hits"]]
    shown = [
        row for row in useful if row["judged"] and row["false_hit_interval"][1] <= max_false_hits
    ]
    if shown:
        best = max(shown, key=_worth)
        enough = (
            f", which is shown to be at most {max_false_hits:.1%}; of such settings it saves the"
            " most tokens"
        )
        return {"settings": _settings(best), "row": dict(best), "reason": f"{_rate(best)}{enough}"}

    exact: dict[str, Any] = {"settings": {"reuse": "exact"}, "row": None}
    if not useful:
        return {
            **exact,
            "reason": (
                "no prompt would have been answered from a similar one: exact reuse loses nothing"
            ),
        }
    if not labelled:
        return {
            **exact,
            "reason": (
                "whether a hit is right is unknown: add an 'answer' to the lines of the log, or"
                " give --label-with MODEL"
            ),
        }

    # Their rate and not the interval: what more labels might still show to be right.
    likely = [row for row in useful if row["judged"] and row["false_hit_rate"] <= max_false_hits]
    if not likely:
        return {
            **exact,
            "reason": f"every setting with hits is wrong in more than {max_false_hits:.1%} of them",
        }

    best = max(likely, key=_worth)
    nearest = f"the nearest ({_in_words(_settings(best))}) has {_rate(best)}"
    return {
        **exact,
        "reason": (
            f"no setting is shown to be wrong in at most {max_false_hits:.1%} of its hits;"
            f" {nearest}"
        ),
    }


def _worth(row: Mapping[str, Any]) -> tuple[int, bool, float]:
    # Ties go to the strictest: with the guard, then the highest threshold (none counts as 1).
    return row["tokens_saved"], row["lexical_guard"], row["threshold"] or 1.0


def _settings(row: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"reuse": "adopt", "lexical_guard": row["lexical_guard"]}
    if row["level"] == "exact_text":
        return {**settings, "semantic_text": False}
    return {**settings, "similarity_threshold": row["threshold"]}


def _rate(row: Mapping[str, Any]) -> str:
    return (
        f"{row['false_hits']} of {row['judged']} judged hits false (95%:"
        f" {interval(row['false_hit_interval'])})"
    )


def _in_words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


MIN_TRIAL_GAIN = 0.1
"""Share of all tokens that a blend must save beyond exact reuse to be worth a trial."""


def trial_settings(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for the trial that an estimate proposes.

    They are those of a blend if it saves at least `MIN_TRIAL_GAIN` of the prompt tokens beyond
    exact reuse. Otherwise, and for a log without whole texts, they are empty.
    """
    computed, total = figures["computed"], figures["prompt_tokens"]
    # Without the whole text only prefixes are known, and what a blend saves is not.
    gain = (
        (computed["exact"] - computed["blend default"]) / max(1, total)
        if figures["whole_text"]
        else 0.0
    )
    return {"reuse": "blend"} if gain >= MIN_TRIAL_GAIN else {}


def reuse_verdict(figures: Mapping[str, Any]) -> str:
    """Say in a sentence whether reuse pays."""
    total, computed = max(1, figures["prompt_tokens"]), figures["computed"]
    if not figures["prefixes_known"]:
        return "Whether reuse pays is unknown: the log has lengths alone, and no text."

    exact = 1 - computed["exact"] / total
    if not figures["whole_text"]:
        return (
            f"Prefix caching saves {exact:.0%} of the tokens here, in one engine and while it holds"
            " them; `exact` keeps that over restarts and evictions."
        )

    blend_gain = (computed["exact"] - computed["blend default"]) / total
    if trial_settings(figures):
        return (
            f"Worth a trial: a blend would save {blend_gain:.0%} of the tokens beyond the"
            f" {exact:.0%} that prefix caching saves; its answers are approximate."
        )

    # The same tenth decides here, so that a reader never sees two measures of "enough".
    if exact >= MIN_TRIAL_GAIN:
        return (
            f"Prefix caching is enough: it saves {exact:.0%} of the tokens, and a blend"
            f" {blend_gain:.0%} more; `exact` keeps that over restarts and evictions."
        )

    return (
        f"Reuse does not pay here: prefixes save {exact:.0%} of the tokens, and a blend"
        f" {blend_gain:.0%} more."
    )


def estimate_blocks(result: Mapping[str, Any]) -> list[Block]:
    """Return an estimate as tables and sentences.

    The first sentence says what was read. Then come earlier text, savings, the verdict, advice on
    similar prompts, the notes, and the command to prove it.
    """
    formats = ", ".join(result["formats"]) or "data set"
    read = (
        f"{count_noun(result['samples'], 'request')} of {result['log']} ({formats}),"
        f" {result['prompt_tokens']:,} tokens"
    )
    token_source = f" of {result['model']}'s tokenizer" if result["whole_text"] else ""
    # An estimate of an earlier version has none.
    gains = result.get("stabilize")
    return [
        f"{read}{token_source}",
        *savings.sheets(result),
        *([gains_sheet(gains)] if gains else ()),
        *_in_plain_words(result),
    ]


def settings_sheet(result: Mapping[str, Any]) -> TextTable:
    """Return a table with a row for each setting: hits, false hits and tokens saved."""
    rows = [
        [
            DONORS[row["level"]], figure(row["threshold"]),
            "checked" if row["lexical_guard"] else "-",
            estimated(row["hit_rate"], row["hit_interval"]),
            estimated(row["false_hit_rate"], row["false_hit_interval"]),
            share(row["tokens_saved"] / max(1, result["prompt_tokens"])),
        ]
        for row in result["rows"]
    ]  # fmt: skip

    columns = ("donors", "least cosine", "words", "hit rate", "false of judged", "tokens saved")
    return TextTable("each similar prompt answered as its donor", columns, rows)


def _in_plain_words(result: Mapping[str, Any]) -> list[str]:
    """Explain an estimate in sentences.

    They tell where and when tokens repeat, the verdict, what answers of similar prompts would be,
    what is not known, and the command to prove it.
    """
    lines = [*savings.savings_sentences(result), reuse_verdict(result)]
    if any(row["hits"] for row in result["rows"]):
        advice = result["recommended"]
        settings = _in_words(advice["settings"])
        lines.append(f"Answers of similar prompts: {settings}, since {advice['reason']}")

    lines += result["notes"]
    return [*lines, *([f"prove it: {result['command']}"] if result["command"] else ())]
