"""The log through the levels once for each setting: what would hit, and whether the donor has the same answer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dejakv.build import build_guards
from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.config.text import SIMILARITY_THRESHOLD
from dejakv.encoders.base import Vector
from dejakv.engines.base import NO_STATE, Completion, Prepared
from dejakv.experiments.scoring import same, wilson
from dejakv.levels.base import Level
from dejakv.levels.exact import ExactTextCache
from dejakv.levels.semantic import SemanticTextCache
from dejakv.store.memory import MemoryStore

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)


@dataclass(frozen=True)
class Asked:
    """A prompt as tokens, and its right answer if it is known."""

    prepared: Prepared
    answer: str | None


@dataclass(frozen=True)
class Setting:
    """One setting of the levels.

    level      `exact`: equal prompts and exact prefixes; `exact_text`: equal text as well; `semantic_text`: similar text as well
    threshold  least cosine of similar text
    """

    level: Literal["exact", "exact_text", "semantic_text"] = "exact"
    threshold: float | None = None
    lexical_guard: bool = True
    min_gain: int = SemanticCacheConfig.min_gain

    @property
    def config(self) -> SemanticCacheConfig:
        return SemanticCacheConfig(
            reuse="exact" if self.level == "exact" else "adopt",
            semantic_text=self.threshold is not None,
            similarity_threshold=SIMILARITY_THRESHOLD if self.threshold is None else self.threshold,
            lexical_guard=self.lexical_guard,
            min_gain=self.min_gain,
        )


class Remembering:
    """An encoder that encodes each text once."""

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        self._known: dict[str, Vector] = {}
        self.fingerprint: str = encoder.fingerprint

    @property
    def dim(self) -> int:
        return int(self._encoder.dim)

    def encode(self, text: str) -> Vector:
        if text not in self._known:
            self._known[text] = self._encoder.encode(text)
        return self._known[text]

    def encode_many(self, texts: Sequence[str]) -> list[Vector]:
        return [self.encode(text) for text in texts]


def settings_to_try(encoder: object | None, min_gain: int) -> Iterator[Setting]:
    """Exact reuse, equal text, then each threshold with and without the lexical guard; these only with an encoder."""
    yield Setting("exact", min_gain=min_gain)
    yield Setting("exact_text", min_gain=min_gain)
    for threshold in THRESHOLDS if encoder is not None else ():
        yield Setting("semantic_text", threshold, min_gain=min_gain)
        yield Setting("semantic_text", threshold, lexical_guard=False, min_gain=min_gain)


def measure(asked: Sequence[Asked], setting: Setting, encoder: Any = None) -> dict[str, Any]:
    """One row: the hits of a setting over the whole log, in its order, and how many were false.

    `exact` requests are equal to an earlier one and always right. `hits` are the approximate ones; of the `judged`, whose
    right answer and donor's answer are known, `false_hits` have another answer than their donor. `tokens_saved` counts exact
    prefixes and exact requests too. `not_worth` had a trusted donor, but would have saved less than `min_gain`.
    """
    config = setting.config
    levels: list[Level] = [ExactTextCache()]
    if setting.threshold is not None:
        levels.append(SemanticTextCache(encoder, setting.threshold))
    answers: dict[str, str | None] = {}
    cache = HierarchicalCache(MemoryStore(), levels, build_guards(config, levels), config, background=False)
    exact = hits = judged = wrong = saved = not_worth = 0
    for one in asked:
        decision = cache.find(one.prepared)
        plan = decision.plan
        saved += plan.reused
        exact += plan.method == "exact"
        not_worth += plan.reason.startswith("min_gain")
        if plan.method == "adopt":
            hits += 1
            right = answers[plan.donors[0].id]
            if right is not None and one.answer is not None:
                judged += 1
                wrong += not same(right, one.answer)
        done = Completion(one.answer or "", (), len(one.prepared.token_ids), 0, capture=lambda: NO_STATE)
        cache.record(one.prepared, decision, plan, done)
        answers.setdefault(decision.key, one.answer)
    cache.close()
    return {
        "level": setting.level,
        "threshold": setting.threshold,
        "lexical_guard": setting.lexical_guard,
        "exact": exact,
        "hits": hits,
        "hit_rate": hits / len(asked),
        "hit_interval": wilson(hits, len(asked)),
        "judged": judged,
        "false_hits": wrong if judged else None,
        "false_hit_rate": wrong / judged if judged else None,
        "false_hit_interval": wilson(wrong, judged) if judged else None,
        "tokens_saved": saved,
        "not_worth": not_worth,
    }
