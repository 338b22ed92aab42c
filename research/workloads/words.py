"""The result of a stream in plain words: what each quality saved and what it changed, or that it lost, and why."""

from collections.abc import Mapping
from typing import Any

from dejakv.blend.settings import QUALITIES


def verdict(summary: Mapping[str, Any]) -> str:
    """A paragraph."""
    arms: Mapping[str, Any] = summary["arms"]
    qualities = [name for name in QUALITIES if name in arms]
    says = [_speed(name, arms[name]) + " " + _change(arms[name], summary) for name in qualities]
    lost = [name for name in qualities if _lost(arms[name])]
    if lost:
        says.append(_why(arms[lost[0]], summary))
    return " ".join(says)


def _speed(name: str, arm: Mapping[str, Any]) -> str:
    found = arm["ttft_against_prefix"]
    tokens = arm["computed_of_prefix"]
    share = "" if tokens is None else f", with {100 * tokens:.0f}% of its tokens computed"
    if not found:
        return f"Blend {name}: too few requests for a verdict{share}."
    low, high = found["ratio_interval"]
    if high < 1:
        return f"Blend {name} was **{1 / found['ratio']:.2f} times as fast to the first token as prefix caching** (95%: {1 / high:.2f} to {1 / low:.2f}){share}."
    interval = f"{found['ratio']:.2f} times its time to first token (95%: {low:.2f} to {high:.2f}){share}"
    return f"Blend {name} **lost to prefix caching**: {interval}." if low > 1 else f"Blend {name} **gained nothing over prefix caching that this run can show**: {interval}."  # fmt: skip


def _change(arm: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    count = summary["samples"]
    if arm["first_token_equal"] is None:
        return "Answers were not compared."
    first, whole = count - arm["first_token_equal"], count - arm["answers_equal"]
    if not first and not whole:
        return "It changed no answer."
    near = (
        ""
        if arm["top1"] is None
        else f", and the likeliest token at {100 * (1 - arm['top1']):.0f}% of the places along it"
    )
    return f"It changed the first token of {first} and the whole answer of {whole} of {count}{near}."


def _lost(arm: Mapping[str, Any]) -> bool:
    found = arm["ttft_against_prefix"]
    return bool(found) and found["ratio_interval"][1] >= 1


def _why(arm: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """What stood in the way: how few requests were blended and why, or how much of them was computed all the same."""
    blended, count = arm["blended"]["requests"], summary["samples"]
    said = f"{'Only ' if 2 * blended < count else ''}{blended} of {count} requests were blended"
    if blended:
        said += f", with {100 * arm['blended']['computed_share']:.0f}% of their rows computed: what has changed is computed at every quality"
    said += "."
    if arm["reasons"]:
        reason, times = next(iter(arm["reasons"].items()))
        said += f" The commonest reason against a donor ({times} times): {reason}."
    return said
