"""The page of a run, in Markdown for a bug report, and its JSON."""

import json
import shlex
from collections import Counter
from typing import Any

from dejakv import __version__
from dejakv.errors import count_noun, printable
from dejakv.verify.client import Body, ServerAnswer
from dejakv.verify.noise import middle
from dejakv.verify.probes import KINDS
from dejakv.verify.run import EQUAL, ROUNDING, WRONG, Observation, VerifyResult

SHOWN = 5
"""Wrong answers that the page shows; the JSON has all."""


def verdict_line(result: VerifyResult) -> str:
    """Say in a sentence what a run has shown."""
    total, wrong = len(result.observations), len(result.wrong)
    if wrong:
        kinds = ", ".join(sorted({each.kind for each in result.wrong}))
        answers = count_noun(total, "answer")
        return f"WRONG: {wrong:,} of {answers} ({kinds}) are not those of full computation."
    text = f"No wrong answer among {total:,}: equal, or apart by no more than rounding."
    cached = [count for count, _ in result.cached]
    if cached and not any(cached):
        text += " But no cache was seen at work."
    elif len(result.blind) == len(result.signals):
        text += " But no mix-up would have shown: the model answers all probes alike."
    return text


def to_markdown(result: VerifyResult) -> str:
    """Return the page: verdict, table of kinds, noise, notes, and how to see each wrong answer."""
    client = result.client
    lines = [
        f"# Caches of {client.model} at {client.url}",
        "",
        f"**{verdict_line(result)}**",
        "",
        f"`dejakv verify` {__version__}, {result.seconds:.0f} s,"
        f" {client.events['requests']:,} requests, `--seed {result.seed}`."
        f" Compared with {result.fresh}.",
        "",
        "| probes | answers | equal | rounding | wrong | median apart | a mix-up would move"
        " | what they are |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(result, kind) for kind in KINDS),
        "",
        _noise_line(result),
    ]
    if result.cached:
        shares = [cached / tokens for cached, tokens in result.cached]
        lines += [
            "",
            f"Of prompts that came again, {middle(shares):.0%} of the tokens were cached (median).",
        ]
    lines += ["", *(f"- {note}" for note in result.notes)] if result.notes else []
    if result.wrong:
        lines += ["", "## Wrong answers", ""]
        if client.settings.api_key:
            lines += ["Put the key into `DEJAKV_API_KEY`.", ""]
        for number, each in enumerate(result.wrong[:SHOWN], 1):
            lines += _reproduction(result, number, each)
        if len(result.wrong) > SHOWN:
            lines.append(f"{len(result.wrong) - SHOWN:,} more are in the JSON (`--json`).")
    return printable("\n".join(lines).rstrip() + "\n")


def _row(result: VerifyResult, kind: str) -> str:
    about = KINDS[kind]
    observations = [each for each in result.observations if each.kind == kind]
    if not observations:
        reason = result.not_taken.get(kind, "no time was left").replace("|", "/")
        return f"| {kind} | not tried: {' '.join(reason.split())[:120]} | | | | | | {about} |"
    counts = Counter(each.verdict for each in observations)
    apart = middle([each.distance for each in observations])
    signals = result.signals.get(kind)
    signal = f"{middle(signals):.3g}" if signals else ""
    numbers = f"{counts[EQUAL]} | {counts[ROUNDING]} | {counts[WRONG]} | {apart:.2g} | {signal}"
    return f"| {kind} | {len(observations)} | {numbers} | {about} |"


def _noise_line(result: VerifyResult) -> str:
    noise = result.noise
    if noise.texts:
        return (
            "Texts alone: a kind is wrong if its answers differ more often than those of plain"
            " repeats, by more than chance."
        )
    return (
        "Numbers are nats, mean over the answer's tokens of the mean difference of the likeliest"
        " tokens' log probabilities. The server's own noise: up to"
        f" {max(noise.alone, default=0):.2g} alone,"
        f" {max(noise.batched, default=0):.2g} in batches; more than {noise.limit:.2g} is"
        " wrong, if fresh answers to the same prompt stay together. A kind whose mix-up would move"
        " less cannot be told from rounding."
    )


def _reproduction(result: VerifyResult, number: int, each: Observation) -> list[str]:
    client = result.client
    return [
        f"### {number}. {each.kind}: {KINDS[each.kind]}",
        "",
        f"{each.distance:.3g} nats apart, where rounding explains {each.limit:.2g}."
        + (f" {each.note[:1].upper()}{each.note[1:]}." if each.note else ""),
        "",
        f"- expected: `{_shown(each.expected)}`",
        f"- answered: `{_shown(each.answer)}`",
        "",
        "Send these in this order to a fresh server, and the last one alone to another:",
        "",
        "```sh",
        *(
            _curl(client.url, client.full_body(body), bool(client.settings.api_key))
            for body in each.history
        ),
        "# the answer to this one is wrong:",
        _curl(client.url, client.full_body(each.content), bool(client.settings.api_key)),
        "```",
        "",
    ]


def _shown(answer: ServerAnswer) -> str:
    first = answer.likely[0] if answer.likely else {}
    tops = ", ".join(f"{token!r} {value:.3f}" for token, value in first.items())
    text = f"{answer.text!r}" + (f"; first token: {tops}" if tops else "")
    return text.replace("`", "'")[:400]


def _curl(url: str, body: Body, key: bool) -> str:
    route = "completions" if "prompt" in body else "chat/completions"
    header = ' -H "Authorization: Bearer $DEJAKV_API_KEY"' if key else ""
    data = shlex.quote(json.dumps(body))
    return f"curl -s {url}/v1/{route} -H 'Content-Type: application/json'{header} -d {data}"


def to_json(result: VerifyResult) -> dict[str, Any]:
    """Return the figures of a run and its wrong answers with their requests, for JSON.

    Of the other answers it has verdicts and distances (nats) by kind.
    """
    client, noise = result.client, result.noise
    return {
        "dejakv_version": __version__,
        "url": client.url,
        "model": client.model,
        "verdict": "wrong" if result.wrong else "no wrong answer",
        "sentence": verdict_line(result),
        "seconds": round(result.seconds, 1),
        "seed": result.seed,
        "requests": client.events["requests"],
        "fresh": result.fresh,
        "noise": {
            "alone": noise.alone,
            "batched": noise.batched,
            "repeated": noise.repeated,
            "sampled": noise.sampled,
            "limit": noise.limit,
        },
        "kinds": {
            kind: {
                "verdicts": Counter(e.verdict for e in result.observations if e.kind == kind),
                "distances": [e.distance for e in result.observations if e.kind == kind],
                "signals": result.signals.get(kind, []),
                "not_taken": result.not_taken.get(kind),
            }
            for kind in KINDS
        },
        "notes": result.notes,
        "wrong": [
            {
                "kind": each.kind,
                "distance": each.distance,
                "limit": each.limit,
                "note": each.note,
                "before": [client.full_body(body) for body in each.history],
                "request": client.full_body(each.content),
                "expected": vars(each.expected),
                "answer": vars(each.answer),
            }
            for each in result.wrong
        ],
    }
