"""Ledgers of evidence, and gates whose draws are known."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dejakv.trust.draw import HitDraw
from dejakv.trust.gate import TrustGate
from dejakv.trust.ledger import EvidenceLedger
from dejakv.trust.rules import PILOT
from dejakv.trust.settings import TrustSettings


@pytest.fixture(params=["memory", "disk"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EvidenceLedger]:
    made = EvidenceLedger(None if request.param == "memory" else tmp_path, "t")
    yield made
    made.close()


def gate_of(ledger: EvidenceLedger | None = None, *, chance: float = 0.0, **settings: Any) -> TrustGate:
    """A gate that draws `chance` each time: 0 labels every hit."""
    return TrustGate(TrustSettings(**{"error_bound": 0.2, **settings}), ledger=ledger, random=lambda: chance)


def hit(gate: TrustGate, risk: float = 0.5, partition: str = "a", **known: str) -> HitDraw:
    """One would-be hit of this risk."""
    asked = {"epoch": "e", "method": "adopt", "setting": "default", **known}
    return gate.draw(gate.class_of(partition, **asked), {"score": 1 - risk})


def pilot(gate: TrustGate, partition: str = "a", **known: str) -> None:
    """The hits that choose the rules: risks 0, .05 and so on."""
    for number in range(PILOT):
        hit(gate, number / PILOT, partition, **known)


def teach(gate: TrustGate, labels: int, *, wrong: int = 0, risk: float = 0.0, partition: str = "a") -> list[HitDraw]:
    """Labels of as many hits, the wrong ones last. Returns the draws."""
    draws = [hit(gate, risk, partition) for _ in range(labels)]
    for number, draw in enumerate(draws):
        gate.learn(draw, number >= labels - wrong)
    return draws


def opened(ledger: EvidenceLedger | None = None, **settings: Any) -> TrustGate:
    """A gate whose strictest rule alone is open for partition a, after 36 labels."""
    gate = gate_of(ledger, **settings)
    pilot(gate)
    teach(gate, 6, wrong=6, risk=0.15)
    teach(gate, 30)
    assert gate.report("a").rules == 1
    return gate
