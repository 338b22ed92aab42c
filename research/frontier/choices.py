"""Choices among tokens by their scores (`prophet`) and what is known of their text beforehand, and among donors: tried, see
docs/results/fidelity.md.

Each choice of tokens is made of the text before each token and of the copied runs along which offsets are carried, `[tokens]` (`offsets.runs_of`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dejakv.blend.offsets import NOISE, REACH
from dejakv.blend.recomputed import Choose, Surroundings, highest
from dejakv.blend.token_map import Donors, Ids, TokenMap, equal_runs

Make = Callable[[Surroundings, Ids], Choose]

MORE, FADES = 2.0, 16.0
"""A run's first token counts 1 + MORE times as much; tokens over which that fades."""
FIRST = 0.1
"""Share of the tokens beyond the forced ones that goes to the first tokens of runs, or to anchors."""
ANCHORS = 0.3
COVERED = 0.84
"""Share of the attention to tokens that are not forced: at the default's mean cost for `reorder` and `apart`."""
MOST = 0.6


def placed(around: Surroundings, runs: Ids) -> Choose:
    """Scores fall with the place in the copied run."""
    weights = torch.from_numpy(1 + MORE * np.exp(-around.behind / FADES)).float()
    return lambda scores, forced, count: highest(torch.where(scores < 0, scores, scores * weights), forced, count)


def firsts(around: Surroundings, runs: Ids) -> Choose:
    """First tokens of runs with other text before them, then the highest scores."""

    def choose(scores: Tensor, forced: Tensor, count: int) -> Tensor:
        free = (scores >= 0) & ~forced & torch.from_numpy(around.changed > 0.05)
        wanted = min(round(FIRST * max(0, count - int(forced.sum()))), int(free.sum()))
        near = torch.where(free, 1.0 / (1.0 + torch.from_numpy(around.behind).double()), -1.0)
        return highest(scores, _with(forced, near.sort(descending=True, stable=True).indices[:wanted]), count)

    return choose


def anchors(around: Surroundings, runs: Ids) -> Choose:
    """Of each of equally long stretches of copied text the highest score, so that offsets are known everywhere; then the highest scores."""

    def choose(scores: Tensor, forced: Tensor, count: int) -> Tensor:
        free = np.flatnonzero((runs >= 0) & (scores >= 0).numpy() & ~forced.numpy())
        wanted = round(ANCHORS * max(0, count - int(forced.sum())))
        pieces = [piece for piece in np.array_split(free, max(1, wanted)) if len(piece)] if wanted else []
        best = [int(piece[int(scores[torch.from_numpy(piece)].argmax())]) for piece in pieces]
        return highest(scores, _with(forced, torch.tensor(best, dtype=torch.long)), count)

    return choose


def covering(around: Surroundings, runs: Ids) -> Choose:
    """As many of the highest scores as have the share COVERED of their sum, at most the share MOST of the prompt."""

    def choose(scores: Tensor, forced: Tensor, count: int) -> Tensor:
        sums = scores.masked_fill(forced, 0).clamp_min(0).sort(descending=True).values.cumsum(0)
        wanted = int((sums < COVERED * sums[-1]).sum()) + 1
        return highest(scores, forced, int(forced.sum()) + min(wanted, round(MOST * len(scores))))

    return choose


def spread(around: Surroundings, runs: Ids) -> Choose:
    """One after another the token that takes most of the sum of score times variance, in the model of `blend.offsets`: what is computed
    tells of its neighbours, so a second token beside it is worth less."""
    index = np.arange(len(runs))
    same = (runs[:, None] == runs[None]) & (runs >= 0)[:, None]
    prior = np.where(same, np.exp(-np.abs(index[:, None] - index[None]) / REACH), 0.0)

    def choose(scores: Tensor, forced: Tensor, count: int) -> Tensor:
        left, worth = prior.copy(), scores.double().clamp_min(0).numpy()
        chosen, barred = np.zeros(len(runs), dtype=bool), (scores < 0).numpy()

        def add(token: int) -> None:
            told = left[:, token].copy()
            left[...] -= np.outer(told, told) / (told[token] + NOISE)
            chosen[token] = True

        for token in np.flatnonzero(forced.numpy()).tolist():
            add(token)
        for _ in range(count - int(chosen.sum())):
            own = left.diagonal() + NOISE
            falls = left**2 / own[None]
            gain = ((worth * ~chosen)[:, None] * falls).sum(0) + worth * (own - falls.diagonal())
            gain[chosen | barred] = -1.0
            add(int(gain.argmax()))
        return torch.from_numpy(np.flatnonzero(chosen))

    return choose


def _with(forced: Tensor, more: Tensor) -> Tensor:
    made = forced.clone()
    made[more] = True
    return made


CHOICES: Mapping[str, Make] = {made.__name__: made for made in (placed, firsts, anchors, covering, spread)}
"""By the name of a cell's selector."""

LEAST_RUN = 24
"""Tokens of a copied run that may come from another donor."""
GRAM = 4


def by_context(target: Ids, donors: Donors, found: TokenMap, *, most: bool) -> TokenMap:
    """The map with each copied run taken from the donor with the most alike text before it, or the least: by the number of `GRAM` tokens in
    a row that both have, here and there, of those of the longer one."""
    source = found.source.copy()
    first, stop = equal_runs(target, donors, source)
    for start in np.unique(first).tolist():
        run = target[start : stop[start]]
        if len(run) < LEAST_RUN:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(donors.ids, len(run))
        places = np.flatnonzero((windows == run).all(1))
        places = places[donors.number[places] == donors.number[places + len(run) - 1]]
        mine = _grams(target[:start])
        alike = [_likeness(mine, _grams(donors.ids[donors.starts[donors.number[at]] : at])) for at in places.tolist()]
        at = places[int(np.argmax(alike) if most else np.argmin(alike))]
        source[start : start + len(run)] = at + np.arange(len(run))
    return replace(found, source=source)


def _grams(ids: Ids) -> set[tuple[int, ...]]:
    tokens = ids.tolist()
    return {tuple(tokens[at : at + GRAM]) for at in range(len(tokens) - GRAM + 1)}


def _likeness(one: set[tuple[int, ...]], other: set[tuple[int, ...]]) -> float:
    return len(one & other) / max(1, len(one), len(other))
