"""How much an attack tries."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """Numbers of one run. All defaults are here.

    victims, texts      prompts whose key is attacked, and texts that the search may embed for each
    mutations           texts for each victim that are made to get past the guards
    poisonings          near duplicates for each way of reuse
    secrets, samples    secrets in donors, and answers drawn for each
    probes              documents that one partition stores and the other looks for
    asked               requests that are timed for each of four groups
    largest             bytes of the largest body that is sent
    """

    victims: int
    texts: int
    mutations: int
    poisonings: int
    secrets: int
    samples: int
    probes: int
    asked: int
    largest: int


QUICK = Effort(
    victims=6, texts=600, mutations=200, poisonings=6, secrets=32, samples=2, probes=3, asked=30, largest=34 << 20
)
FULL = Effort(
    victims=30,
    texts=4000,
    mutations=2000,
    poisonings=60,
    secrets=250,
    samples=4,
    probes=20,
    asked=400,
    largest=40 << 20,
)
