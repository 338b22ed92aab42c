"""Timing: whether the time of an answer tells that somebody has sent the same prompt before."""

import random
from dataclasses import dataclass

from dejakv.attack.base import Result, judged
from dejakv.attack.client import Client
from dejakv.attack.figures import Estimate, Figure, auc_estimate
from dejakv.attack.material import Material
from dejakv.attack.scene import Scene

MOST = 0.55
"""The AUC across partitions that is allowed."""


@dataclass(frozen=True)
class Timing:
    """material  what the prompts are made of; None: documents of facts for the served model, as in the other attacks"""

    name: str = "timing"
    tries: str = "the time of a prompt that was sent before against that of a new one of the same kind, in random order"
    broken_if: str = (
        "across partitions the time tells the two apart: the lower end of the AUC's 95% interval is above .55, or the upper end "
        "below .45. Within one partition it is measured: a hit is meant to be faster"
    )
    outside: bool = True
    material: Material | None = None

    def run(self, scene: Scene) -> Result:
        server, rng = scene.server, scene.rng("timing")
        material = self.material or scene.material
        figures: dict[str, Figure] = {
            "within a partition (AUC)": _told(server.first, server.first, material, scene, rng)
        }
        if server.second is None:
            return Result("not applicable", "", server.alone, figures)
        across = figures["across partitions (AUC)"] = _told(server.first, server.second, material, scene, rng)
        findings = []
        if across.low > MOST or across.high < 1 - MOST:
            findings.append(f"the time tells what another partition has sent: AUC {across}")
        return judged(f"{scene.effort.asked} requests in each of 4 groups", findings, figures)


def _told(owner: Client, asker: Client, material: Material, scene: Scene, rng: random.Random) -> Estimate:
    """AUC of the time of prompts that `owner` has stored against others, both asked by `asker`, which stores nothing.

    Before each request the owner stores a prompt, so that the history is the same whether it is the one asked for."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    order = [True, False] * scene.effort.asked
    rng.shuffle(order)
    for known in order:
        stored, other = material.any_prompt(rng), material.any_prompt(rng)
        owner.complete(stored, keep=True, tokens=1)
        asker.complete(material.any_prompt(rng), tokens=1)  # so that what is timed is not the first after a store
        seconds[known].append(asker.complete(stored if known else other, tokens=1).seconds)
    return auc_estimate(seconds[True], seconds[False], rng)
