"""What `research.frontier.trials` measures: one function a trial, which blends one case.

Each returns rows by way: what `bench.row_of` makes of the blended prompt.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache

from dejakv.blend import blend
from dejakv.blend.attention_probe import AttentionProbe
from dejakv.blend.recomputed import Choose, RecomputePlan, highest, surroundings_of
from dejakv.blend.settings import BlendConfig
from dejakv.blend.token_map import DonorTokens
from dejakv.engines.tensors import tensor_view, to_store
from dejakv.engines.transformers.blend_model import BlendCache, BlendLayer
from dejakv.engines.transformers.blending import plan_cache, rearrange
from dejakv.engines.transformers.decoding import answer_logprobs
from dejakv.models.cache_name import CACHE_NAME
from dejakv.store.base import RawTensor
from research.frontier.bench import NOISE, Bench, captured_state, row_of, scored
from research.frontier.cases import (
    Case,
    TextCases,
    passages_of_manuals,
    prompt,
)
from research.frontier.cells import ranked_by

Rows = dict[str, dict[str, Any]]
Line = dict[str, Any]
Ids = tuple[int, ...]

PASSAGES = 2
RANKS: dict[str, tuple[int | None, ...]] = {"other": (1, 4, 16, None), "same": (1, 4, 16)}
"""Ranks of a stored difference by the prompt that shows it; None: all of it."""
LAYERS, ANCHOR_LAYERS = (19, 24), (19,)
"""Layers whose attention alone ranks tokens, of the question over all tokens and over anchors."""
ANCHOR_STEP = 8
"""Of so many tokens one is an anchor."""
SHORT_ANSWER, LONG_ANSWER = 16, 64
"""Tokens of an answer that are compared, and of one that is repaired."""


@dataclass(frozen=True)
class Texts:
    """A case as text: the prompt's parts, and its donors' prompts."""

    instruction: str
    passages: tuple[str, ...]
    question: str
    begins: str
    donors: tuple[str, ...]
    answer: str | None


def texts_of(kind: str, number: int, seed: int, passages: int = PASSAGES) -> Texts:
    """Return a case of `TextCases` as text."""
    made: Any = TextCases(passages).make(kind, number, lambda text: text, seed)  # type: ignore[arg-type, return-value]
    first, *parts, last = made.target.split("\n\n")
    question, begins = last.split("<|im_end|>\n<|im_start|>assistant\n")
    return Texts(first.split("\n")[1], tuple(parts), question, begins, made.donors, made.answer)


class TrialBench(Bench):
    """A bench that blends from any states, in any choice of tokens."""

    def case_of(self, kind: str, number: int, seed: int, passages: int = PASSAGES) -> Case:
        """Return a case with its tokens."""
        return TextCases(passages).make(kind, number, self.encode, seed)

    def state(self, ids: Sequence[int]) -> RawTensor:
        """Return the state of a prompt that is computed in full."""
        return captured_state(self.engine, ids)[1]

    def reference(self, case: Case, steps: int) -> "Reference":
        """Return full computation's answer to a case, with which others are compared."""
        full, state, _ = captured_state(self.engine, case.target)
        tokens = self._decoded(full, steps)
        return Reference(case, tokens, scored(full, tokens), state, full)

    def rounded(self, reference: "Reference") -> dict[str, Any]:
        """Return the row of full computation in the other dtype."""
        assert self.twin is not None
        return reference.row(captured_state(self.twin, reference.case.target)[0], 1.0, long=True)

    @torch.inference_mode()
    def _decoded(self, full: Any, steps: int) -> Ids:
        """Return the greedy answer, decoded behind the cache that full computation left."""
        cache, tokens = full.args[1], [int(scored(full, [0])[0].argmax())]
        while len(tokens) < steps:
            ids = torch.tensor([[tokens[-1]]], device=self.engine.device)
            out = self.engine.model(input_ids=ids, **{CACHE_NAME: cache}, use_cache=True)
            tokens.append(int(out.logits[0, -1].argmax()))
        return tuple(tokens)

    @torch.inference_mode()
    def blend_from(
        self,
        reference: "Reference",
        donor_ids: Sequence[Ids],
        states: Sequence[RawTensor],
        config: BlendConfig | None = None,
        choose: Choose = highest,
        *,
        long: bool = False,
    ) -> dict[str, Any]:
        """Return the row of a prompt that is blended from these donors."""
        config = config or BlendConfig(max_share=1.0)
        target = reference.case.target
        model: Any = self.engine.blend_model
        donors = DonorTokens.of(*donor_ids)
        donor_map, needed = blend.map_donors(
            np.asarray(target, dtype=np.int64), donors, self.engine.embed_tokens, config, self.ends,
            [True] * len(donor_ids),
        )  # fmt: skip
        parts = [[(0, state)] for state in states]
        planned = plan_cache(model, target, parts, donors, donor_map, needed, config, choose)
        ids = torch.tensor([list(target)], device=self.engine.device)
        self.engine.model(
            input_ids=ids, **{CACHE_NAME: planned.cache}, use_cache=True, logits_to_keep=1
        )
        after = partial(answer_logprobs, self.engine.model, planned.cache, ids, None)
        row = reference.row(after, planned.cache.recomputed / len(target), long=long)
        return {**row, "rows": planned.cache.recomputed, "exact": needed.exact}


@dataclass(frozen=True)
class Reference:
    """Full computation's answer to a case: its log probabilities, state, and output."""

    case: Case
    tokens: Ids
    scores: NDArray[np.float32]
    state: RawTensor
    full: Any

    def row(self, after: Any, share: float, *, long: bool = False) -> dict[str, Any]:
        """Return the figures of another way along the same answer.

        Those of `row_of` are along its first tokens. With `long` all are compared, and `stays`
        counts those before the first other token.
        """
        scores = scored(after, self.tokens[: None if long else SHORT_ANSWER])
        first = slice(SHORT_ANSWER)
        row = row_of(self.case, after, scores[first], self.scores[first], share, 0.0)
        if long:
            same = scores.argmax(-1) == self.scores.argmax(-1)
            row["stays"] = int(same.argmin()) if not same.all() else len(same)
        return row


# --- corrections ---


def corrections(bench: TrialBench, trial: "TrialCase") -> Rows:
    """Passages computed apart, corrected by what prompts that were settled show of them.

    `other`: each passage stood behind two others that are not in this prompt. `same`: it stood in
    a prompt with these passages in this order, which prefix caching would serve. A number is the
    rank of the difference that is stored; `whole` is the settled prompt itself as the donor.
    """
    texts, case = trial.texts, trial.reference.case
    rng = random.Random(f"corrections/{trial.seed}/{trial.kind}/{trial.number}")
    strangers = [one.text for one in passages_of_manuals() if one.text not in texts.passages]

    def settled(passages: Sequence[str]) -> tuple[Ids, RawTensor]:
        ids = bench.encode(prompt(texts.instruction, passages, texts.question, texts.begins))
        return ids, bench.state(ids)

    # The first passage has nothing before it in this prompt: its state is exact.
    others = [settled([*rng.sample(strangers, 2), passage]) for passage in texts.passages[1:]]
    sources = {"other": others, "same": [(case.target, trial.reference.state)] * len(others)}
    rows: Rows = {}
    for name, prompts in sources.items():
        differences = [
            Difference.of(bench, ids, state, *settled_prompt)
            for ids, state, settled_prompt in zip(
                case.donors[1:], trial.states[1:], prompts, strict=True
            )
        ]
        for rank in RANKS[name]:
            states = [trial.states[0], *(each.added(rank) for each in differences)]
            rows[f"{name}, {rank or 'whole'}"] = bench.blend_from(
                trial.reference, case.donors, states
            )
    return rows


@dataclass(frozen=True)
class Difference:
    """What another prompt's state of a passage has beyond a donor's, by singular values.

    `parts` are U, S and V of each of K and V in each layer: `[2, layers, ...]`.
    """

    state: Tensor
    begin: int
    parts: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(
        cls, bench: TrialBench, ids: Ids, state: RawTensor, other_ids: Ids, other: RawTensor
    ) -> "Difference":
        """Compare a donor with another prompt along their longest common run of tokens."""
        model: Any = bench.engine.blend_model
        begin, other_begin, length = longest_run(ids, other_ids)
        mine = tensor_view(state).clone()
        theirs = tensor_view(other)[:, :, :, other_begin : other_begin + length].clone()
        places = torch.arange(begin, begin + length)
        shift = other_begin - begin
        model.move(theirs[0], places, places + shift, len(other_ids), len(ids))
        # [2, layers, tokens, heads * numbers]
        matrix = (theirs - mine[:, :, :, begin : begin + length]).transpose(2, 3).flatten(3)
        return cls(mine, begin, tuple(torch.linalg.svd(matrix, full_matrices=False)))

    def added(self, rank: int | None) -> RawTensor:
        """Return the donor's state with the difference's first singular values; None for all."""
        left, sizes, right = self.parts
        change = (left[..., :rank] * sizes[..., None, :rank]) @ right[..., :rank, :]
        out = self.state.clone()
        heads, width = out.shape[2], out.shape[4]
        stop = self.begin + change.shape[2]
        out[:, :, :, self.begin : stop] += change.unflatten(3, (heads, width)).transpose(2, 3)
        return to_store(out.contiguous())


def longest_run(first: Ids, second: Ids) -> tuple[int, int, int]:
    """Return where the longest common run behind the beginnings starts in each, and its length.

    Examples
    --------
    >>> longest_run((1, 2, 3, 4), (9, 3, 4))
    (2, 1, 2)
    """
    shared = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
    best, before = (0, 0, 0), np.zeros(len(second) + 1, dtype=np.int64)
    other = np.asarray(second)
    for place, token in enumerate(first):
        now = np.zeros_like(before)
        if place >= shared:
            equal = np.flatnonzero(other == token)
            now[equal + 1] = before[equal] + 1
            longest = int(now.argmax())
            if now[longest] > best[2]:
                length = int(now[longest])
                best = (place + 1 - length, longest - length, length)
        before = now
    return best


# --- selection ---


def selection(bench: TrialBench, trial: "TrialCase") -> Rows:
    """Tokens chosen by the question's attention in one layer, over all tokens or over anchors."""
    rows: Rows = {}
    attention, by_anchors, worth, _ = trial.attentions(bench)
    for name, weights, layers in (
        ("layer", attention, LAYERS),
        ("anchors, layer", by_anchors, ANCHOR_LAYERS),
    ):
        for layer in layers:
            choose = ranked_by(weights[layer] * worth)
            rows[f"{name} {layer}"] = bench.blend_from(
                trial.reference, trial.reference.case.donors, trial.states, choose=choose
            )
    return rows


class AnchorProbe(AttentionProbe):
    """Probe of queries that saw the anchors alone, against the keys of all tokens."""

    def __init__(self, queries: int, keys: Sequence[Tensor]) -> None:
        super().__init__(queries)
        self.keys = keys

    def _weights(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super()._weights(query, self.keys[len(self.weights)], query, None)


@torch.inference_mode()
def question_attentions(
    bench: TrialBench, case: Case, states: Sequence[RawTensor]
) -> tuple[list[Tensor], list[Tensor], Tensor, int]:
    """Return each layer's attention of the question, `[tokens]`: over all tokens, and by anchors.

    Behind them each token's `worth` (see `TextSurroundings`), and the tokens of the question.
    """
    model: Any = bench.engine.blend_model
    config, donors = BlendConfig(max_share=1.0), DonorTokens.of(*case.donors)
    target = np.asarray(case.target, dtype=np.int64)
    donor_map, needed = blend.map_donors(
        target, donors, bench.engine.embed_tokens, config, bench.ends, [True] * len(states)
    )
    device = bench.engine.device
    parts = [[(0, state)] for state in states]
    entries = rearrange(model, parts, donors, donor_map, device, model.model.dtype)
    layers = [BlendLayer(k[None].clone(), v[None].clone()) for k, v in model.layer_states(entries)]
    plan = RecomputePlan.of(config, target, donors, donor_map, needed, device)
    ids, tail = torch.tensor([list(case.target)], device=device), needed.tail
    cache = BlendCache(layers, plan.of_question(tail))
    with AttentionProbe(tail) as probe:
        model.model.get_decoder()(input_ids=ids, **{CACHE_NAME: cache}, use_cache=True)
    everything = [weight[: len(target)] for weight in probe.weights]

    # The first tokens hold the attention sink: they are anchors in any case.
    before = len(target) - tail
    anchors = torch.tensor(sorted({*range(4), *range(0, before, ANCHOR_STEP)}), device=device)
    small = DynamicCache()
    for number, (keys, values) in enumerate(model.layer_states(entries)):
        small.update(keys[None][:, :, anchors], values[None][:, :, anchors], number)
    keys_of = [keys[None] for keys, _ in model.layer_states(entries)]
    with AnchorProbe(tail, keys_of) as anchored:
        model.model.get_decoder()(
            input_ids=ids[:, before:],
            position_ids=torch.arange(before, len(target), device=device)[None],
            **{CACHE_NAME: small},
            use_cache=True,
        )
    worth = torch.from_numpy(surroundings_of(target, donors, donor_map).worth).to(device)
    return everything, anchored.weights, worth, tail


# --- order ---


def order(bench: TrialBench, trial: "TrialCase") -> Rows:
    """Passages sorted by the question's attention to them, the most relevant next to it.

    The blend is compared with full computation in its order; `against sent` compares full
    computation in that order with that in the order that was sent.
    """
    case, texts = trial.reference.case, trial.texts
    attention, _, _, tail = trial.attentions(bench)
    last_third = torch.stack(attention[len(attention) * 2 // 3 :]).sum(0)
    relevance: list[float] = []
    for ids in case.donors:
        _, begin, length = longest_run(ids, case.target)
        stop = min(begin + length, len(case.target) - tail)
        relevance.append(float(last_third[begin:stop].mean()))

    by_relevance = np.argsort(relevance, kind="stable").tolist()
    passages = [texts.passages[place] for place in by_relevance]
    ids = bench.encode(prompt(texts.instruction, passages, texts.question, texts.begins))
    other = bench.reference(replace(case, target=ids), SHORT_ANSWER)
    against_sent = trial.reference.row(other.full, 1.0)
    return {
        "relevant last, full, against sent": against_sent,
        "relevant last": bench.blend_from(other, case.donors, trial.states),
    }


# --- repair ---


def repair(bench: TrialBench, trial: "TrialCase") -> Rows:
    """How long answers stay full computation's: of the default, and at twice its share."""
    donors, states = trial.reference.case.donors, trial.states
    return {
        name: bench.blend_from(
            trial.reference, donors, states, BlendConfig(share=share, max_share=1.0), long=True
        )
        for name, share in (("default, 64 tokens", 0.2), ("strict, 64 tokens", 0.4))
    }


TRIALS: dict[str, Callable[[TrialBench, "TrialCase"], Rows]] = {
    "corrections": corrections,
    "selection": selection,
    "order": order,
    "repair": repair,
}
"""Trials that share their cases."""


@dataclass
class TrialCase:
    """A case with what all trials of it need."""

    kind: str
    number: int
    seed: int
    reference: Reference
    states: list[RawTensor]
    _attentions: Any = None

    @property
    def texts(self) -> Texts:
        """The prompt's parts as text."""
        return texts_of(self.kind, self.number, self.seed)

    def attentions(self, bench: TrialBench) -> tuple[list[Tensor], list[Tensor], Tensor, int]:
        """Return what `question_attentions` does, computed once."""
        if self._attentions is None:
            self._attentions = question_attentions(bench, self.reference.case, self.states)
        return self._attentions


def measure(
    bench: TrialBench, kind: str, number: int, seed: int, trials: Sequence[str], rounding: bool
) -> Line:
    """Blend a case as today, and in the ways of the trials."""
    case = bench.case_of(kind, number, seed)
    reference = bench.reference(case, LONG_ANSWER if "repair" in trials else SHORT_ANSWER)
    states = [bench.state(ids) for ids in case.donors]
    trial, rows = TrialCase(kind, number, seed, reference, states), Rows()
    if "repair" not in trials:
        rows["default"] = bench.blend_from(reference, case.donors, states)
    for name in trials:
        rows |= TRIALS[name](bench, trial)
    if rounding:
        rows[NOISE] = bench.rounded(reference)
    return {"kind": kind, "number": number, "tokens": len(case.target), "rows": rows}
