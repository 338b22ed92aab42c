"""Runs one case on one engine: full computation, and every way of blending."""

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.engines.transformers.blend import plan_cache
from dejakv.engines.transformers.continuation import Continue, continuation
from dejakv.engines.transformers.engine import TransformersEngine
from dejakv.engines.transformers.kv import captured, plain_cache
from dejakv.errors import ModelError
from dejakv.experiments.frontier.answers import Answer, Answers
from dejakv.experiments.frontier.cases import Case
from dejakv.experiments.frontier.cells import Cell
from dejakv.request import Request
from dejakv.reuse.blend import BlendConfig, find
from dejakv.reuse.need import Need
from dejakv.reuse.selector import Selector
from dejakv.reuse.sentences import sentence_ends
from dejakv.reuse.token_map import Donors, TokenMap
from dejakv.store.base import Tensor
from dejakv.trust.differs import divergence

FULL, NOISE = "full", "noise"
"""Names of the rows of full computation, and of it in the other dtype."""


class Bench:
    """`steps`: number of tokens of full computation's greedy answer along which others are compared (teacher forcing). `twin`:
    the same model in the other dtype, for the noise floor. `answers`: a folder that keeps what full computation said. Raises:
    ModelError for a model that reads more than text."""

    def __init__(
        self,
        engine: TransformersEngine,
        steps: int = 1,
        twin: TransformersEngine | None = None,
        answers: Path | None = None,
    ) -> None:
        if hasattr(engine.model.config, "vision_config") or hasattr(engine.model.config, "audio_config"):
            raise ModelError(
                "the frontier measures text models, and this model reads more than text: give --model docs-lm"
            )
        self.engine = engine
        self.steps = steps
        self.twin = twin
        self.answers = Answers(answers, steps)
        self._found: dict[Any, tuple[TokenMap, Need, float]] = {}
        self.layers = engine.model.config.get_text_config(decoder=True).num_hidden_layers
        self.ends = sentence_ends(engine.tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt."""
        return self.engine.prepare(Request("frontier", text, text)).token_ids

    def run(self, case: Case, chosen: Sequence[Cell], known: Collection[str] = ()) -> dict[str, Any]:
        """One line of `cases.jsonl`: `rows[cell]` as `_row` makes them, and those of `full` and, with a twin, `noise` unless
        both are `known` and full computation's answer was kept."""
        self._found.clear()
        states = [_prefill(self.engine, ids)[1] for ids in case.donors]
        rows: dict[str, Any] = {}
        answer = self.answers.read(case) if {FULL, NOISE if self.twin else FULL} <= set(known) else None
        if answer is None:
            answer, rows = self._full(case)
        for cell in chosen:
            got, share, last, took = self.blend(case, states, cell.config)
            rows[cell.name] = _row(case, got, _scored(got, answer.tokens), answer.scores, share, last, took)
        return {"kind": case.kind, "number": case.number, "tokens": len(case.target), "rows": rows}

    def _full(self, case: Case) -> tuple[Answer, dict[str, Any]]:
        """Full computation's answer, its row, and the twin's."""
        full, _, seconds = _prefill(self.engine, case.target)
        tokens = _greedy(full, self.steps)
        answer = Answer(tokens, _scored(full, tokens))
        self.answers.keep(case, answer)
        rows = {FULL: _row(case, full, answer.scores, answer.scores, 1.0, 1.0, seconds)}
        if self.twin is not None:
            other, _, took = _prefill(self.twin, case.target)
            rows[NOISE] = _row(case, other, _scored(other, tokens), answer.scores, 1.0, 1.0, took)
        return answer, rows

    @torch.inference_mode()
    def blend(self, case: Case, states: Sequence[Tensor], config: BlendConfig) -> tuple[Continue, float, float, float]:
        """The output after the blended prompt, mean share of rows over layers, share in the last layer, and the seconds to the
        first token, planning included."""
        donors = Donors.of(*case.donors)
        found, needed, searched = self._find(case, donors, config)
        begun = time.perf_counter()
        planned = plan_cache(
            self.engine.model, case.target, [[(0, state)] for state in states], donors, found, needed,
            config.schedule_for(self.layers), Selector(config.selector, case.number), threshold=config.threshold,
            offsets=config.offsets, surroundings=config.surroundings,
        )  # fmt: skip
        given = torch.tensor([list(case.target)], device=self.engine.device)
        self.engine.model(input_ids=given, past_key_values=planned.cache, use_cache=True, logits_to_keep=1)
        seconds = time.perf_counter() - begun + searched
        trace = planned.cache.trace
        after = continuation(self.engine.model, planned.cache, given, None)
        return after, trace.share, trace.counts[-1] / trace.tokens, seconds

    def _find(self, case: Case, donors: Donors, config: BlendConfig) -> tuple[TokenMap, Need, float]:
        """Map and need with their seconds; shared by cells that differ only in later steps."""
        limit = None if (config.by_need and config.rule != "first") or config.rule == "none" else config.share
        key = (case, config.map, config.rule, config.min_similarity, limit)
        if key not in self._found:
            begun = time.perf_counter()
            target = np.asarray(case.target, dtype=np.int64)
            # The published ways have no exact prefix beside the blend.
            exact = [config.rule != "none"] * len(case.donors)
            found, needed = find(target, donors, self.engine.embed_tokens, config, self.ends, exact)
            self._found[key] = found, needed, time.perf_counter() - begun
        return self._found[key]


@torch.inference_mode()
def _prefill(engine: TransformersEngine, ids: Sequence[int]) -> tuple[Continue, Tensor, float]:
    """The output after a prompt computed in full, its state, and the seconds to the first token."""
    given = torch.tensor([list(ids)], device=engine.device)
    begun = time.perf_counter()
    cache = plain_cache()
    engine.model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1)
    seconds = time.perf_counter() - begun
    state = captured(cache, len(ids))
    assert state is not None
    return continuation(engine.model, cache, given, None), state, seconds


def _scored(after: Continue, tokens: Sequence[int]) -> NDArray[np.float32]:
    scored = after(tokens)
    assert scored is not None  # a plain cache, and at least one token
    return scored


def _greedy(after: Continue, steps: int) -> tuple[int, ...]:
    """The likeliest tokens, one after another. (Each step recomputes the answer so far: a few rows.)"""
    tokens: list[int] = [0]
    for step in range(steps):
        tokens[step] = int(_scored(after, tokens)[step].argmax())
        if step + 1 < steps:
            tokens.append(0)
    return tuple(tokens)


def _row(
    case: Case, after: Continue, got: NDArray[np.float32], wanted: NDArray[np.float32],
    share: float, last: float, seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """`right` and `stale`: whether greedy decoding gives the right answer, or the answer before the change (None: no label);
    `kl` of the first token and `kl_mean` along the answer, nats; `top1`: share of it with the same likeliest token."""
    distances = divergence(wanted, got)
    return {
        "right": _says(after, case.answer),
        "stale": _says(after, case.old_answer),
        "kl": round(float(distances[0]), 6),
        "kl_mean": round(float(distances.mean()), 6),
        "top1": round(float((wanted.argmax(-1) == got.argmax(-1)).mean()), 4),
        "share": round(share, 4),
        "last": round(last, 4),
        "seconds": round(seconds, 6),
    }


def _says(after: Continue, answer: tuple[int, ...] | None) -> bool | None:
    return None if answer is None else bool((_scored(after, answer).argmax(-1) == np.asarray(answer)).all())
