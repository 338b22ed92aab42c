"""What the error bound leaves of the plan that was chosen."""

from dataclasses import replace

from dejakv.config import SemanticCacheConfig
from dejakv.engines.base import Prepared
from dejakv.find.ask import Ask
from dejakv.find.decision import Trial
from dejakv.find.found import Found
from dejakv.find.plan import Planned
from dejakv.guards.bounded import Bounded
from dejakv.records import Method
from dejakv.trust.certainty import orders
from dejakv.trust.features import TIME_SHARE

BOUND = "error bound"
"""How the reason begins where the bound does not let an approximate plan run."""


def bound_by(
    bounded: Bounded | None, config: SemanticCacheConfig, prepared: Prepared, found: Found, ask: Ask, planned: Planned
) -> tuple[Planned, Trial | None]:
    """What runs, and the draw of an approximate plan. Without a bound, and for exact plans, what was planned.

    Of a request of which nothing may be kept, no label can be made: it is run exactly, and there is no draw.
    """
    chosen = planned.plan
    if bounded is None or not chosen.approximate:
        return planned, None
    if ask.no_store:
        return _held_back(planned, "nothing of this request is kept, so that its answer could not be checked"), None
    setting = setting_of(chosen.method, config)
    if not (ask.tells_first_token and chosen.method == "blend" and orders(config.differs)):
        draw = bounded.judge(chosen, found, prepared, setting)
        return planned if draw.served else _held_back(planned, draw.reason), Trial(chosen, draw)
    takes = {TIME_SHARE: _time_share(planned)}
    if not bounded.tries(prepared, setting, takes):
        draw = bounded.judge(chosen, found, prepared, setting, takes, late=True)
        return _held_back(planned, draw.reason), Trial(chosen, draw)
    return planned, Trial(
        chosen, judge=lambda tried: bounded.judge(chosen, found, prepared, setting, {**takes, **tried})
    )


def _time_share(planned: Planned) -> float:
    """What the plan takes, as a share of the exact plan's time; 0 without costs."""
    seconds = {id(way.plan): way.seconds for way in planned.candidates}
    tried, exact = seconds.get(id(planned.plan)), seconds.get(id(planned.exact))
    return tried / exact if tried is not None and exact else 0.0


def setting_of(method: Method, config: SemanticCacheConfig) -> str:
    """What makes approximate plans of a method what they are: evidence on one setting says nothing of another."""
    if method == "blend":
        made = [config.blend_map, config.blend.told, f"generation {config.max_generation}"]
    elif method == "top_layer":
        made = [f"tail {config.top_layer_tail}", f"donors {config.blend_donors}"]
    else:
        made = [config.index_encoder, f"score {config.similarity_threshold:g}", f"media {config.media}"]
        made += [*config.embedding_layers, *config.levels, "words" if config.lexical_guard else "no words"]
        if config.cross_encoder is not None:
            made.append(f"{config.cross_encoder} {config.paraphrase_threshold:g}")
    return ", ".join(made)


def _held_back(planned: Planned, why: str) -> Planned:
    reason = f"{BOUND}: {why}"
    ways = tuple(replace(way, refused=reason) if way.plan is planned.plan else way for way in planned.candidates)
    return Planned(replace(planned.exact, reason=reason), planned.exact, ways)
