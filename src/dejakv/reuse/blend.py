"""Blend: take a similar donor's state token by token, and compute the rows that need it (SemShareKV, arXiv 2509.24832).

    completion = run_blend(engine, prepared, donors, BlendConfig())
    completion.details["blend"].share     # mean share of rows that were computed

The answer is approximate, so the state it leaves is never captured and never a donor.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from dejakv.engines.base import Completion, Engine, Prepared
from dejakv.errors import ConfigError, ModelError
from dejakv.identity import Span
from dejakv.request import Sampling
from dejakv.reuse.need import Need, Rule, need
from dejakv.reuse.quality import DEFAULT, MAP, QUALITIES
from dejakv.reuse.schedule import SCHEDULES, Schedule, parse, with_mean
from dejakv.reuse.selector import SELECTORS
from dejakv.reuse.sentences import sentence_ends
from dejakv.reuse.token_map import MAPS, Donors, Embed, Ids, TokenMap, token_map
from dejakv.settings import Count, Positive, Share, check_fields
from dejakv.store.base import Chunk


@dataclass(frozen=True)
class BlendConfig:
    """How to blend.

    map             token map: context, embedding, lsh, align
    selector        what ranks rows: value, kv, similarity, query, random
    share           share of rows in the layers that are not complete (their mean, if the schedule falls with depth)
    by_need         rows that changed, the rest of their sentences, and rows that deviate by more than `threshold` are
                    computed even beyond the share; without it as many of these sentences as the share pays for
    rule            overrides what is forced: `changed`, `edits` or `none` (see `need`)
    schedule        constant, linear, exponential, or a list of shares such as `1,0.3,0.1`
    complete        layers computed completely at the beginning; None: one for the selectors that compare K or V (they see
                    nothing in the first layer, whose state depends on the token alone), else none
    tail            rows at the end that are always computed (the question); None: the last sentence
    min_similarity  a token that fits its donor token less is always computed
    threshold       of `by_need`: squared relative error of V (or K and V) above which a row is computed
    max_share       a prompt that needs more is computed in full instead
    max_computed    so is one that would compute more rows than this share, the mean over all layers: an exact prefix is cheaper
    bits, rope_weight, seed  of the maps `embedding` and `lsh` and the selector `random`
    """

    map: str = MAP
    selector: str = QUALITIES[DEFAULT].selector
    share: Share = QUALITIES[DEFAULT].share
    by_need: bool = True
    rule: Rule | None = None
    schedule: str = "constant"
    complete: Count | None = None
    tail: Positive | None = None
    min_similarity: Share = 0.2
    threshold: float | None = None
    max_share: Share = 0.8
    max_computed: Share = 1.0
    bits: Positive = 256
    rope_weight: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value, known in (("map", self.map, MAPS), ("selector", self.selector, SELECTORS)):
            if value not in known:
                raise ConfigError(f"blend {name} {value!r} is unknown: choose one of {', '.join(known)}")
        if self.schedule not in SCHEDULES:
            parse(self.schedule, 1 << 16)

    def forced(self) -> Rule:
        return self.rule or "changed"

    def schedule_for(self, layers: int) -> Schedule:
        """The schedule of a model of so many layers. Raises: ConfigError if it names more layers than there are."""
        if self.schedule not in SCHEDULES:
            return parse(self.schedule, layers)
        complete = self.complete if self.complete is not None else int(self.selector in ("value", "kv"))
        complete = min(complete, layers)
        mean = (complete + self.share * (layers - complete)) / layers
        return with_mean(self.schedule, layers, mean, complete=complete)


@dataclass(frozen=True)
class BlendReport:
    """What blending one prompt took. Seconds; `rows[i]` of layer i. Not `blended`: computed exactly, for `reason`.

    computed  mean rows over the layers, of an engine that tells no more than that
    active    which rows each layer computed, None for all
    """

    tokens: int
    rows: tuple[int, ...] = ()
    computed: int | None = None
    active: tuple[tuple[int, ...] | None, ...] = field(default=(), repr=False)
    forced_share: float = 0.0
    map_s: float = 0.0
    plan_s: float = 0.0
    reason: str = ""

    @property
    def share(self) -> float:
        """Mean share of rows computed over the layers."""
        if self.rows:
            return sum(self.rows) / (len(self.rows) * self.tokens)
        return 1.0 if self.computed is None else self.computed / self.tokens

    @property
    def blended(self) -> bool:
        return bool(self.rows) or self.computed is not None


class Blends(Protocol):
    """`engine.blend` of an engine that blends where its state is, instead of running what is planned here."""

    def __call__(
        self,
        prepared: Prepared,
        donors: Sequence[Chunk],
        config: BlendConfig,
        *,
        sampling: Sampling | None,
        on_token: Callable[[int, str], None] | None,
    ) -> Completion | str:
        """The completion with its report as `details["blend"]`, whether it was blended or not; a string if nothing was run,
        for that reason."""
        ...


def find(target: Ids, donors: Donors, embed: Embed, config: BlendConfig, ends: Ids | None) -> tuple[TokenMap, Need]:
    """The token map and what must be computed, for one prompt."""
    found = token_map(
        config.map, target, donors, embed, ends=ends, bits=config.bits, rope_weight=config.rope_weight, seed=config.seed
    )
    needed = need(
        target, donors, found, ends=ends, rule=config.forced(), tail=config.tail,
        min_similarity=config.min_similarity, budget=None if config.by_need else config.share,
    )  # fmt: skip
    return found, needed


def run_blend(
    engine: Engine,
    prepared: Prepared,
    donors: Sequence[Chunk],
    config: BlendConfig | None = None,
    *,
    sampling: Sampling | None = None,
    on_token: Callable[[int, str], None] | None = None,
    instead: Callable[[], Completion] | None = None,
) -> Completion:
    """Answers a prompt from the donors' state. `details["blend"]` is a `BlendReport`.

    instead  how to answer a prompt that is not blended; None: computed in full

    What cannot or should not be blended (an engine or model without it, positions that pictures make, a prompt that has too
    little in common with its donors) is computed in full, and the report says why.
    """
    config = config or BlendConfig()
    begun = time.perf_counter()
    own: Blends | None = getattr(engine, "blend", None)
    if own is not None:
        done = own(prepared, donors, config, sampling=sampling, on_token=on_token)
        if isinstance(done, Completion):
            return done
        planned, report = None, BlendReport(len(prepared.token_ids), reason=done)
    else:
        planned, report = plan_blend(engine, prepared, donors, config)
    planning = time.perf_counter() - begun
    if planned is None:
        completion = instead() if instead is not None else engine.run(prepared, sampling=sampling, on_token=on_token)
    else:
        run: Any = engine.run
        completion = run(prepared, sampling=sampling, on_token=on_token, planned=planned)
        trace = planned.cache.trace
        active = tuple(None if rows is None else tuple(rows.tolist()) for rows in trace.rows)
        report = replace(report, rows=tuple(trace.counts), active=active)
    report = replace(report, plan_s=planning)
    loaded = sum(chunk.tensor.nbytes for chunk in donors) if planned is not None else 0
    return replace(
        completion,
        ttft_s=completion.ttft_s + planning,
        latency_s=completion.latency_s + planning,
        inject_s=completion.inject_s + planning,
        bytes_loaded=completion.bytes_loaded + loaded,
        details={**completion.details, "blend": report},
    )


def plan_blend(
    engine: Any, prepared: Prepared, chunks: Sequence[Chunk], config: BlendConfig
) -> tuple[Any, BlendReport]:
    """The planned cache, or None with the reason in the report."""
    tokens = len(prepared.token_ids)
    if engine.name != "transformers":
        return None, BlendReport(tokens, reason=f"the engine {engine.name} cannot blend")
    if any(chunk.meta.epoch not in ("", engine.epoch) for chunk in chunks):
        return None, BlendReport(tokens, reason="a donor's state is of another model")
    if prepared.spans and _places_by_picture(engine.model):
        return None, BlendReport(tokens, reason="pictures change this model's positions: its keys cannot be moved")
    from dejakv.engines.transformers.blend import plan_cache
    from dejakv.engines.transformers.blend_check import seams_of
    from dejakv.reuse.selector import Selector

    try:
        layers = len(seams_of(engine.model).layers)
    except ModelError as error:
        return None, BlendReport(tokens, reason=str(error))
    target = with_media(prepared.token_ids, prepared.spans)
    held = Donors.of(*(with_media(chunk.meta.token_ids, chunk.meta.spans) for chunk in chunks))
    begun = time.perf_counter()
    found, needed = find(target, held, engine.embed_tokens, config, sentence_ends(engine.tokenizer))
    report = BlendReport(tokens, forced_share=needed.share, map_s=time.perf_counter() - begun)
    if needed.share > config.max_share:
        return None, replace(report, reason=f"{needed.share:.0%} of the prompt must be computed: too little is alike")
    schedule = config.schedule_for(layers)
    rows = sum(max(share, needed.share) for share in schedule.shares) / layers
    if rows > config.max_computed:
        return None, replace(
            report, reason=f"blending would compute {rows:.0%} of the rows: the exact prefix is cheaper"
        )
    states = [chunk.tensor for chunk in chunks]
    planned = plan_cache(
        engine.model, prepared.token_ids, states, held, found, needed,
        schedule, Selector(config.selector, config.seed),
        threshold=config.threshold if config.by_need else None,
    )  # fmt: skip
    return planned, report


def with_media(token_ids: Sequence[int], spans: Sequence[Span]) -> Ids:
    """Token ids in which a picture's placeholders have ids of their own (negative), from its digest and their order: so a
    placeholder fits only the same row of the same picture."""
    ids = np.asarray(token_ids, dtype=np.int64).copy()
    for span in spans:
        base = int(span.digest[:10], 16)
        ids[span.start : span.start + span.length] = -(base * (1 << 16) + np.arange(span.length) + 1)
    return ids


def _places_by_picture(model: Any) -> bool:
    text = model.config.get_text_config()
    return "mrope_section" in str(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or "")
