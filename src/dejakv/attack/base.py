"""The seam of an attack, and what it reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dejakv.attack.figures import Figure, plain

if TYPE_CHECKING:
    from dejakv.attack.scene import Scene

Verdict = Literal["held", "broken", "not applicable"]
SHOWN = 5
"""Findings that a reason names; all are in the JSON file."""


@dataclass(frozen=True)
class Result:
    """How an attack ended.

    tried     what was done, in words with its numbers
    reason    what broke, or why the attack cannot be made here; empty if it held
    figures   by name
    notes     how each of many small trials ended; in the JSON file alone
    findings  everything that counts as broken, one text each
    """

    verdict: Verdict
    tried: str = ""
    reason: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure])
    findings: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict[str, str])

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "tried": self.tried,
            "reason": self.reason,
            "figures": {name: plain(figure) for name, figure in self.figures.items()},
            "findings": list(self.findings),
            "notes": dict(self.notes),
        }


class Attack(Protocol):
    """`tries` and `broken_if` are sentences for the report. `outside`: it needs nothing but a server's address and keys."""

    @property
    def name(self) -> str: ...

    @property
    def tries(self) -> str: ...

    @property
    def broken_if(self) -> str: ...

    @property
    def outside(self) -> bool: ...

    def run(self, scene: "Scene") -> Result: ...


@dataclass(frozen=True)
class Done:
    """An attack that was made, and the seconds it took."""

    name: str
    tries: str
    broken_if: str
    result: Result
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        named = {"name": self.name, "tries": self.tries, "broken_if": self.broken_if}
        return {**named, **self.result.as_dict(), "seconds": round(self.seconds, 2)}


def judged(
    tried: str,
    findings: Sequence[str],
    figures: Mapping[str, Figure] | None = None,
    notes: Mapping[str, str] | None = None,
) -> Result:
    """Held if nothing was found, broken otherwise."""
    different = list(dict.fromkeys(findings))
    more = f"; and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
    reason = "; ".join(different[:SHOWN]) + more
    return Result("broken" if findings else "held", tried, reason, figures or {}, tuple(findings), notes or {})


def not_applicable(reason: str) -> Result:
    return Result("not applicable", reason=reason)
