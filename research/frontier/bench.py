"""Runs one case on one engine: full computation, and every way of blending."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.blend import blend
from dejakv.blend.forced import ForcedTokens
from dejakv.blend.recomputed import Choose, highest
from dejakv.blend.sentences import sentence_ends
from dejakv.blend.token_map import DonorTokens, TokenMap
from dejakv.engines.tensors import tensor_view
from dejakv.engines.transformers.blending import plan_cache, rearrange
from dejakv.engines.transformers.decoding import answer_logprobs
from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.engines.transformers.kv import plain_cache, stacked_state
from dejakv.errors import ModelError
from dejakv.models.cache_name import CACHE_NAME
from dejakv.request import Request
from dejakv.store.base import RawTensor
from dejakv.trust.differs import divergence
from research.frontier.cases import Case
from research.frontier.cells import Cell, at_random, by_deviation, first_of_runs

Continue = Callable[[Sequence[int]], Iterator[NDArray[np.float32]]]
"""See `Completion.continued_in_pieces`."""

FULL, NOISE = "full", "noise"
"""Names of the rows of full computation, and of it in the other dtype."""


class Bench:
    """Bench on which one model blends cases in several ways.

    Parameters
    ----------
    engine : TransformersEngine
        The model; a ModelError tells that it reads more than text.
    steps : int
        Tokens of full computation's greedy answer along which others are compared (teacher
        forcing).
    twin : TransformersEngine, optional
        The same model in the other dtype, for the noise floor.
    """

    def __init__(
        self,
        engine: TransformersEngine,
        steps: int = 1,
        twin: TransformersEngine | None = None,
    ) -> None:
        if hasattr(engine.model.config, "vision_config") or hasattr(
            engine.model.config, "audio_config"
        ):
            raise ModelError(
                "the frontier measures text models, and this model reads more than text: give"
                " --model docs-lm"
            )
        self.engine = engine
        self.steps = steps
        self.twin = twin
        self._fresh: torch.Tensor | None = None
        self.layers = engine.model.config.get_text_config(decoder=True).num_hidden_layers
        self.ends = sentence_ends(engine.tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt."""
        return self.engine.prepare(Request("frontier", text, text)).token_ids

    def run(self, case: Case, cells: Sequence[Cell]) -> dict[str, Any]:
        """Return one line of `cases.jsonl`.

        It has `rows[cell]` as `_row` makes them, and those of `full` and, with a twin, `noise`.
        """
        states: dict[tuple[int, ...], RawTensor] = {}
        self._fresh = None
        full, _, seconds = captured_state(self.engine, case.target)
        tokens = greedy(full, self.steps)
        scores = scored(full, tokens)
        rows = {FULL: row_of(case, full, scores, scores, 1.0, seconds)}
        if self.twin is not None:
            other, _, took = captured_state(self.twin, case.target)
            rows[NOISE] = row_of(case, other, scored(other, tokens), scores, 1.0, took)
        for cell in cells:
            for ids in case.donors:
                if ids not in states:
                    states[ids] = captured_state(self.engine, ids)[1]
            got, share, took = self.blend(case, [states[ids] for ids in case.donors], cell)
            rows[cell.name] = row_of(case, got, scored(got, tokens), scores, share, took)
        return {"kind": case.kind, "number": case.number, "tokens": len(case.target), "rows": rows}

    @torch.inference_mode()
    def blend(
        self, case: Case, states: Sequence[RawTensor], cell: Cell
    ) -> tuple[Continue, float, float]:
        """Blend a prompt in one way. `states`: of the donors.

        Returns the output after the blended prompt, the share of recomputed tokens, and the seconds
        to the first token, planning included. (The published choices that compare KV entries take
        them from full computation, which is not timed.)
        """
        model = self.engine.blend_model
        if isinstance(model, ModelError):
            raise model
        donors = DonorTokens.of(*case.donors)
        begun = time.perf_counter()
        found, needed = self.find(case, donors, cell)
        searched = time.perf_counter() - begun
        choose = self._choice(case, states, donors, found, cell)
        begun = time.perf_counter()
        parts = [[(0, state)] for state in states]
        planned = plan_cache(model, case.target, parts, donors, found, needed, cell.config, choose)
        given = torch.tensor([list(case.target)], device=self.engine.device)
        self.engine.model(
            input_ids=given, **{CACHE_NAME: planned.cache}, use_cache=True, logits_to_keep=1
        )
        seconds = time.perf_counter() - begun + searched
        after = partial(answer_logprobs, self.engine.model, planned.cache, given, None)
        return after, planned.cache.recomputed / len(case.target), seconds

    def _choice(
        self,
        case: Case,
        states: Sequence[RawTensor],
        donors: DonorTokens,
        found: TokenMap,
        cell: Cell,
    ) -> Choose:
        target = np.asarray(case.target, dtype=np.int64)
        if cell.selector == "random":
            return at_random(len(case.target), case.number)
        if cell.selector == "first":
            return first_of_runs(target, donors, found)
        if cell.selector not in ("value", "kv"):
            return highest
        if self._fresh is None:
            self._fresh = tensor_view(captured_state(self.engine, case.target)[1])
        model = self.engine.blend_model
        assert not isinstance(model, ModelError)
        parts = [[(0, state)] for state in states]
        held = rearrange(model, parts, donors, found, self._fresh.device, self._fresh.dtype)
        return by_deviation(self._fresh, held, min(1, self.layers - 1), keys=cell.selector == "kv")

    def find(self, case: Case, donors: DonorTokens, cell: Cell) -> tuple[TokenMap, ForcedTokens]:
        """Return the token map and the forced tokens."""
        target = np.asarray(case.target, dtype=np.int64)
        # The published ways have no exact prefix beside the blend, and force nothing but the
        # question.
        exact = [cell.budget != "share"] * len(donors.starts)
        found, needed = blend.map_donors(
            target, donors, self.engine.embed_tokens, cell.config, self.ends, exact
        )
        if cell.budget == "share":
            none, asked = (
                np.zeros(len(target), dtype=bool),
                np.arange(len(target)) >= len(target) - needed.tail,
            )
            needed = ForcedTokens(asked, none, needed.tail, none)
        return found, needed


@torch.inference_mode()
def captured_state(
    engine: TransformersEngine, ids: Sequence[int]
) -> tuple[Continue, RawTensor, float]:
    """Return the output after a prompt computed in full, its state, and the time.

    The time is in seconds, to the first token.
    """
    given = torch.tensor([list(ids)], device=engine.device)
    layout = engine.capabilities.state_layout
    begun = time.perf_counter()
    cache = plain_cache() if layout is None else layout.empty_cache()
    engine.model(input_ids=given, **{CACHE_NAME: cache}, use_cache=True, logits_to_keep=1)
    seconds = time.perf_counter() - begun
    count = len(ids)
    state = stacked_state(cache, count) if layout is None else layout.pack(cache, count)
    assert state is not None
    return partial(answer_logprobs, engine.model, cache, given, None), state, seconds


def scored(after: Continue, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the log probabilities of the tokens: of a plain cache, and at least one token."""
    return np.concatenate(list(after(tokens)))


def greedy(after: Continue, steps: int) -> tuple[int, ...]:
    """Return the likeliest tokens, one after another.

    Each step recomputes the answer so far: a few rows.
    """
    tokens: list[int] = [0]
    for step in range(steps):
        tokens[step] = int(scored(after, tokens)[step].argmax())
        if step + 1 < steps:
            tokens.append(0)
    return tuple(tokens)


def row_of(
    case: Case, after: Continue, got: NDArray[np.float32], wanted: NDArray[np.float32],
    share: float, seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Return the figures of one way in one case.

    They are `right` and `stale` (whether greedy decoding gives the right answer, or the answer
    before the change; None without a label), `kl` of the first token and `kl_mean` along the answer
    in nats, `top1` (share of the answer with the same likeliest token) and `changed` (whether its
    first token is another).
    """
    distances, same = divergence(wanted, got), wanted.argmax(-1) == got.argmax(-1)
    return {
        "right": _says(after, case.answer),
        "stale": _says(after, case.old_answer),
        "kl": round(float(distances[0]), 6),
        "kl_mean": round(float(distances.mean()), 6),
        "top1": round(float(same.mean()), 4),
        "changed": not bool(same[0]),
        "share": round(share, 4),
        "seconds": round(seconds, 6),
    }


def _says(after: Continue, answer: tuple[int, ...] | None) -> bool | None:
    return (
        None
        if answer is None
        else bool((scored(after, answer).argmax(-1) == np.asarray(answer)).all())
    )
