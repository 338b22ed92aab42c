"""The prompts of a workload, phase by phase, and what reuse could find of each."""

import copy
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dejakv.experiments.samples import tokenizer_of
from dejakv.experiments.shares import TokenShares
from research.workloads.streams import chosen_of, stream_of

MIX = "mix"
"""The workload `rag` with as many prompts that share nothing with any other."""
WORKLOADS = ("repo", "rag", "sessions", MIX)
LEAST_COPIED = 0.25
"""The connector blends a prompt of which at least so much stands in others."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of a phase.

    prefix     its first tokens that another prompt of this or an earlier phase begins with too:
               more is never reused exactly
    blendable  at least a quarter of it, exact prefixes apart, stands in runs of 32 tokens or more
               in prompts of earlier phases
    stranger   it shares nothing with any other
    """

    ids: tuple[int, ...]
    prefix: int = 0
    blendable: bool = False
    stranger: bool = False


def prompts_of(workload: str, count: int) -> list[tuple[int, ...]]:
    """The first prompts of a workload that have 600 to 2,000 tokens.

    Raises: DatasetError for too few.
    """
    stream = stream_of("rag" if workload == MIX else workload, "vllm", count)
    chosen, prompter, _ = chosen_of(stream)
    tokenizer = tokenizer_of(stream.settings)
    return [
        tuple(tokenizer(prompter.prompt(one), add_special_tokens=False)["input_ids"])
        for one in chosen
    ]


def phases(prompts: Sequence[tuple[int, ...]], warm: int, each: int) -> list[list[Prompt]]:
    """A phase of `warm` prompts, and then phases of `each`."""
    edges = [0, *range(warm, len(prompts) + 1, each)]
    shares, found = TokenShares(), list[list[Prompt]]()
    for start, stop in pairwise(edges):
        phase = list[Prompt]()
        for place in range(start, stop):
            ids = prompts[place]
            share = copy.deepcopy(shares).add(ids)
            others = [prompts[other] for other in range(stop) if other != place]
            prefix = max((len(os.path.commonprefix([ids, other])) for other in others), default=0)
            phase.append(
                Prompt(ids, prefix, share.anywhere - share.prefix >= LEAST_COPIED * len(ids))
            )
        for prompt in phase:
            shares.add(prompt.ids)
        found.append(phase)
    return found


def mixed(phase: Sequence[Prompt], seed: str) -> list[Prompt]:
    """Mix the phase with as many prompts of the same lengths that share nothing.

    These have the tokens of each prompt in random order.
    """
    rng = random.Random(seed)
    strangers = [Prompt(tuple(rng.sample(one.ids, len(one.ids))), stranger=True) for one in phase]
    every = [*phase, *strangers]
    rng.shuffle(every)
    return every
