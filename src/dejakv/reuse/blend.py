"""Blend: take a similar donor's state token by token, and compute the rows that need it (SemShareKV, arXiv 2509.24832).

Settings, what it took, and the two steps that know tokens alone: the token map and what must be computed. An engine does the
rest (`engines.base.Blends`). The answer is approximate, so the state it leaves is never used as exact: rows that were computed in every layer may
serve later blends (`new_text`), the others nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dejakv.costs import MAX_SHARE
from dejakv.errors import ConfigError
from dejakv.reuse.exact_prefix import with_prefix
from dejakv.reuse.need import Need, Rule, need
from dejakv.reuse.quality import DEFAULT, MAP, QUALITIES
from dejakv.reuse.schedule import SCHEDULES, Schedule, parse, with_mean
from dejakv.reuse.selector import SELECTORS
from dejakv.reuse.token_map import MAPS, Donors, Embed, Ids, TokenMap, token_map
from dejakv.settings import Count, Positive, Share, check_fields


@dataclass(frozen=True)
class BlendConfig:
    """How to blend.

    map             token map: context, embedding, lsh, align
    selector        what ranks rows: value, kv, similarity, query, prophet, random
    share           share of rows in the layers that are not complete (their mean, if the schedule falls with depth)
    by_need         rows that changed, the rest of their sentences, and rows that deviate by more than `threshold` are
                    computed even beyond the share; without it as many of these sentences as the share pays for
    rule            overrides what is forced: `changed`, `edits`, `first` or `none` (see `need`)
    offsets         rows that are not computed move by what the computed ones near them show (`reuse.offsets`)
    surroundings    where little changed before a copied run, rows near the change come first, and offsets count less
                    (`reuse.surroundings`)
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
    offsets: bool = True
    surroundings: bool = True
    schedule: str = "constant"
    complete: Count | None = None
    tail: Positive | None = None
    min_similarity: Share = 0.2
    threshold: float | None = None
    max_share: Share = MAX_SHARE
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

    def varying(self) -> str:
        """Why not all layers compute the same rows, or not rows that are known before the model runs; empty if they do."""
        if self.selector in ("value", "kv"):
            return f"selector {self.selector!r} compares what the layers compute: choose prophet, query, similarity or random"
        if self.complete:
            return f"complete={self.complete}: some layers are computed completely"
        shares = () if self.schedule == "constant" else set(self.schedule_for(1 << 16).shares)
        return f"schedule {self.schedule!r} computes fewer rows in later layers" if len(shares) > 1 else ""

    def schedule_for(self, layers: int) -> Schedule:
        """The schedule of a model of so many layers. Raises: ConfigError if it names more layers than there are."""
        if self.schedule not in SCHEDULES:
            return parse(self.schedule, layers)
        complete = self.complete if self.complete is not None else int(self.selector in ("value", "kv"))
        complete = min(complete, layers)
        mean = (complete + self.share * (layers - complete)) / layers
        return with_mean(self.schedule, layers, mean, complete=complete)


def not_worth(config: BlendConfig, needed: Need, layers: int) -> str:
    """Why a prompt of which this must be computed is not blended, in words; empty if it is."""
    if needed.share > config.max_share:
        return f"too little is alike: {needed.share:.0%} of the prompt must be computed"
    tokens = len(needed.forced)
    schedule = config.schedule_for(layers)
    rows = sum(max(schedule.rows(i, tokens, needed.exact), needed.share * tokens) for i in range(layers)) / layers
    if rows > config.max_computed * tokens:
        return (
            f"the exact prefix is cheaper: blending would compute {rows / tokens:.0%} of the rows, and no more than "
            f"{config.max_computed:.0%} pay"
        )
    return ""


@dataclass(frozen=True)
class BlendReport:
    """What blending one prompt took. Seconds; `rows[i]` of layer i. Not `blended`: computed exactly, for `reason`.

    computed  mean rows over the layers, of an engine that tells no more than that
    active    which rows each layer computed, None for all
    read_s, read_bytes  what reading the donors' rows took
    asked     rows that a pass of the question alone computed, to choose the others: the mean over layers, not part of `rows`
    """

    tokens: int
    rows: tuple[int, ...] = ()
    computed: int | None = None
    active: tuple[tuple[int, ...] | None, ...] = field(default=(), repr=False)
    asked: float = 0.0
    forced_share: float = 0.0
    map_s: float = 0.0
    read_s: float = 0.0
    read_bytes: int = 0
    plan_s: float = 0.0
    reason: str = ""

    @property
    def share(self) -> float:
        """Mean share of rows computed over the layers, without the question's own pass."""
        if self.rows:
            return sum(self.rows) / (len(self.rows) * self.tokens)
        return 1.0 if self.computed is None else self.computed / self.tokens

    @property
    def blended(self) -> bool:
        return bool(self.rows) or self.computed is not None


def find(
    target: Ids,
    donors: Donors,
    embed: Embed,
    config: BlendConfig,
    ends: Ids | None,
    exact: Sequence[bool] = (),
    first: int = 0,
) -> tuple[TokenMap, Need]:
    """The token map and what must be computed, for one prompt.

    exact  of each donor, whether its state is that of full computation from its first token on: as far as its tokens are the
           prompt's from the beginning, it is this prompt's own state
    first  rows from the beginning that are exact already, whatever the donors hold
    """
    found = token_map(
        config.map, target, donors, embed, ends=ends, bits=config.bits, rope_weight=config.rope_weight, seed=config.seed
    )
    found, held = with_prefix(found, target, donors, exact)
    needed = need(
        target, donors, found, ends=ends, rule=config.forced(), tail=config.tail,
        min_similarity=config.min_similarity,
        budget=None if config.by_need and config.rule != "first" else config.share,
        exact=max(held, first),
    )  # fmt: skip
    return found, needed
