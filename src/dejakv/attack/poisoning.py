"""Poisoning: an attacker stores a near duplicate of a victim's prompt, in which the fact asked for is another."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dejakv.attack.base import Result, judged
from dejakv.attack.client import Client, answer_of, origin_of
from dejakv.attack.figures import Figure, Share
from dejakv.attack.material import NearDuplicate
from dejakv.attack.scene import Scene

MODES = ("exact", "adopt", "blend")


@dataclass(frozen=True)
class Poisoning:
    name: str = "poisoning"
    tries: str = (
        "a near duplicate of a victim's prompt, with another fact where the victim asks, is stored before the victim asks: by "
        "the victim's own key and by another one"
    )
    broken_if: str = (
        "the victim gets the planted fact, or state of another prompt, under exact reuse; or anything at all from the other "
        "partition. Within one partition adopt and blend are measured: they are approximate, asked for and labelled"
    )
    outside: bool = True

    def run(self, scene: Scene) -> Result:
        server, rng = scene.server, scene.rng("poisoning")
        findings: list[str] = []
        figures: dict[str, Figure] = {}
        where = [("same partition", server.first)] + ([("other partition", server.second)] if server.second else [])
        for place, attacker in where:
            for mode in MODES:
                pairs = [scene.material.near_duplicate(rng) for _ in range(scene.effort.poisonings)]
                counts = _poisoned(server.first, attacker, mode, pairs, findings, across=attacker is not server.first)
                total = len(pairs)
                figures[f"{place}, {mode}: answered approximately"] = Share(counts["approximate"], total)
                figures[f"{place}, {mode}: other answer"] = Share(counts["changed"], total)
                figures[f"{place}, {mode}: the planted fact"] = Share(counts["planted"], total)
        if server.alone:
            figures["other partition"] = f"not tried: {server.alone}"
        tried = f"{scene.effort.poisonings} near duplicates for each of {len(where) * len(MODES)} ways"
        return judged(tried, findings, figures)


def _poisoned(
    victim: Client, attacker: Client, mode: str, pairs: Sequence[NearDuplicate], findings: list[str], *, across: bool
) -> Counter[str]:
    counts: Counter[str] = Counter()
    for pair in pairs:
        honest = answer_of(victim.complete(pair.prompt, "off"))
        attacker.complete(pair.duplicate, keep=True)
        reply = victim.complete(pair.prompt, mode)
        answer, origin = answer_of(reply), origin_of(reply)
        changed = answer != honest
        planted = changed and pair.planted in answer.lower() and pair.planted not in honest.lower()
        counts.update({"changed": changed, "planted": planted, "approximate": bool(origin.get("approximate"))})
        if across and (planted or origin.get("tokens_reused")):
            findings.append(f"state or an answer of another partition was used under {mode}")
        elif mode == "exact" and (planted or origin.get("approximate")):
            findings.append("under exact reuse a near duplicate changed the victim's answer")
    return counts
