"""A state as JSON. What is read may be damaged or foreign: it is used only if every part of it is what a gate can have written."""

import json
import math
from dataclasses import asdict
from typing import Any, cast

from dejakv.trust import drift
from dejakv.trust.grid import PILOT
from dejakv.trust.state import Counts, State, Tally


def encoded(state: State) -> str:
    """Text that `decoded` takes."""
    return json.dumps(asdict(state), allow_nan=False)


def decoded(text: object) -> State | None:
    """The state in a text; None if it is none."""
    if not isinstance(text, str):
        return None
    try:
        found = json.loads(text)
        state = State(
            round=found["round"],
            pilot=tuple(found["pilot"]),
            cutoffs=tuple(found["cutoffs"]),
            tallies=tuple(Tally(**tally) for tally in found["tallies"]),
            opened=found["opened"],
            drift=tuple(found["drift"]),
            counts=Counts(**found["counts"]),
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return state if _sound(state) else None


def _sound(state: State) -> bool:
    known = len(state.cutoffs) == len(state.tallies)
    return (
        isinstance(cast(Any, state.round), str)
        and known
        and all(map(_is_risk, (*state.pilot, *state.cutoffs)))
        and len(state.pilot) < PILOT
        and list(state.cutoffs) == sorted(set(state.cutoffs))
        and state.cutoffs[-1:] in ((), (1.0,))
        and all(map(_is_tally, state.tallies))
        and _is_count(state.opened)
        and state.opened <= len(state.tallies)
        and len(state.drift) == len(drift.begin())
        and all(map(_is_positive, state.drift))
        and all(map(_is_count, vars(state.counts).values()))
    )


def _is_tally(tally: Tally) -> bool:
    *counts, best = vars(tally).values()
    return (
        all(map(_is_count, counts))
        and _is_positive(best)
        and tally.band_wrong <= tally.band
        and tally.full_wrong <= tally.full
        and tally.light_wrong <= tally.light
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(cast(float, value)) and cast(float, value) >= 0


def _is_risk(value: object) -> bool:
    return _is_positive(value) and cast(float, value) <= 1
