"""From the figures of an estimate to a recommendation: most tokens saved with a false-hit rate that is shown to be low enough."""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from dejakv.config import SemanticCacheConfig
from dejakv.experiments.plain_words import (
    counted,
    estimated,
    figure,
    interval,
    plans_in_words,
    share,
    shares_in_words,
)
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.summary import wilson
from dejakv.experiments.table import Sheet, say
from dejakv.trust.evidence import labels_needed

DONORS = {"exact": "equal prompts", "exact_text": "equal texts", "semantic_text": "similar texts"}


def recommend(rows: Sequence[Mapping[str, Any]], max_false_hits: float) -> dict[str, Any]:
    """The recommended settings and the reason.

    A row is shown to be right often enough if the upper end of its 95% interval of false hits is at most `max_false_hits`. Of
    those rows the one with the most tokens saved is taken, of equals the strictest. If there is none, exact reuse is
    recommended; `candidate` is then the row that more labels might show to be right, if there is one.
    """
    labelled = any(row["judged"] for row in rows)
    useful = [row for row in rows if row["hits"]]
    shown = [row for row in useful if row["judged"] and row["false_hit_interval"][1] <= max_false_hits]
    if shown:
        best = max(shown, key=_worth)
        enough = f", which is shown to be at most {max_false_hits:.1%}; of such settings it saves the most tokens"
        return {"settings": _settings(best), "row": dict(best), "reason": f"{_rate(best)}{enough}"}
    exact: dict[str, Any] = {"settings": {"reuse": "exact"}, "row": None}
    if not useful:
        return {**exact, "reason": "no prompt would have been answered from a similar one: exact reuse loses nothing"}
    if not labelled:
        return {
            **exact,
            "reason": "whether a hit is right is unknown: add an 'answer' to the lines of the log, or give --label-with MODEL",
        }
    likely = [row for row in useful if row["judged"] and row["false_hit_rate"] <= max_false_hits]
    if not likely:
        return {**exact, "reason": f"every setting with hits is wrong in more than {max_false_hits:.1%} of them"}
    best = max(likely, key=_worth)
    return {**exact, "reason": _not_shown(best, max_false_hits), "candidate": _settings(best)}


def hits_needed(false_hit_rate: float, max_false_hits: float) -> int | None:
    """How many judged hits at this rate would show that it is at most `max_false_hits`; None if a million would not."""
    trials = 1
    while trials <= 1_000_000:
        if wilson(round(trials * false_hit_rate), trials)[1] <= max_false_hits:
            return trials
        trials = trials + max(1, trials // 50)
    return None


def labels_for(rows: Sequence[Mapping[str, Any]], samples: int, max_false_hits: float) -> dict[str, Any] | None:
    """What it would take to bound the share of wrong answers while serving (`--error-bound`) with the setting that saves most: `labels`,
    None where they would never do, the `prompts` that have so many hits, and the `false_hit_rate` that was assumed (0 if it is
    unknown). None if no setting has hits, and for a bound that says nothing."""
    useful = [row for row in rows if row["hits"]]
    if not useful or max_false_hits >= 1:
        return None
    row = max(useful, key=_worth)
    rate = row["false_hit_rate"] or 0.0
    labels = labels_needed(max_false_hits, wrong_share=rate) if rate < max_false_hits else None
    prompts = math.ceil(labels * samples / row["hits"]) if labels is not None else None
    return {"labels": labels, "prompts": prompts, "false_hit_rate": rate}


def _worth(row: Mapping[str, Any]) -> tuple[int, bool, float]:
    return row["tokens_saved"], row["lexical_guard"], row["threshold"] or 1.0


def _settings(row: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"reuse": "adopt", "lexical_guard": row["lexical_guard"]}
    if row["level"] == "exact_text":
        return {**settings, "semantic_text": False}
    return {**settings, "similarity_threshold": row["threshold"]}


def _rate(row: Mapping[str, Any]) -> str:
    return f"{row['false_hits']} of {row['judged']} judged hits false (95%: {interval(row['false_hit_interval'])})"


def _not_shown(row: Mapping[str, Any], most: float) -> str:
    needed = hits_needed(row["false_hit_rate"], most)
    more = "" if needed is None else f"; about {needed:,} judged hits at this rate would show it"
    return f"no setting is shown to be wrong in at most {most:.1%} of its hits; the nearest has {_rate(row)}{more}"


def command_of(settings: RunSettings, index_encoder: str, chosen: Mapping[str, Any]) -> str:
    """The live run that proves a recommendation."""
    data = [
        "--dataset",
        settings.dataset,
        *(["--dataset-path", settings.dataset_path] if settings.dataset_path else []),
    ]
    words = ["dejakv", "run", *data, "--model", settings.model, "--reuse", chosen["reuse"]]
    words += ["--chunk-source", settings.chunk_source, *(["--raw-prompts"] if settings.raw_prompts else [])]
    if "similarity_threshold" in chosen:
        words += ["--index-encoder", index_encoder, "--similarity-threshold", str(chosen["similarity_threshold"])]
    else:
        words.append("--disable-semantic-cache")
    if chosen.get("lexical_guard") is False:
        words.append("--disable-lexical-guard")
    if chosen["reuse"] != "exact" and chosen["min_gain"] != SemanticCacheConfig.min_gain:
        words += ["--min-gain", str(chosen["min_gain"])]
    return shlex.join(words)


def show(result: dict[str, Any], console: Console) -> None:
    """Prints the shares, a table of the settings, the recommendation and the command that proves it."""
    say(
        console,
        f"{counted(result['samples'], 'prompt')} of {result['log']}, {result['prompt_tokens']:,} tokens of {result['model']}'s tokenizer, "
        f"{result['labelled']} with a right answer ({result['labels']})",
        *shares_in_words(result),
    )
    console.print(settings_sheet(result).printed())
    say(console, *in_plain_words(result))


def settings_sheet(result: Mapping[str, Any]) -> Sheet:
    """A row a setting: hits, false hits and tokens saved."""
    rows = [
        [
            DONORS[row["level"]], figure(row["threshold"]), "checked" if row["lexical_guard"] else "-",
            estimated(row["hit_rate"], row["hit_interval"]), estimated(row["false_hit_rate"], row["false_hit_interval"]),
            share(row["tokens_saved"] / result["prompt_tokens"]),
        ]
        for row in result["rows"]
    ]  # fmt: skip
    columns = ("donors", "least cosine", "words", "hit rate", "false of judged", "tokens saved")
    return Sheet("each similar prompt answered as its donor", columns, rows)


def in_plain_words(result: Mapping[str, Any]) -> list[str]:
    """What to set, why, what it saves, what a dry run of it found, and how to prove it."""
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
    if (found := result.get("dry_run")) is not None:
        wrong = "" if found["false_hits"] is None else f", {found['false_hits']} of {found['judged']} hits false"
        lines.append(f"a dry run of it: hit rate {share(found['hit_rate'])}{wrong}; plans: {plans_in_words(found)}")
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
