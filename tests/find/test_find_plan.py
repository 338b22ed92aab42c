import pytest

from dejakv.find.ask import Ask, Mode
from dejakv.find.found import Found
from dejakv.find.plan import plan
from dejakv.find.prefix import PrefixHit
from dejakv.levels.base import Match
from dejakv.store.base import ChunkMeta


def meta(name: str, tokens: int = 100) -> ChunkMeta:
    return ChunkMeta(name, "p", "e", tuple(range(tokens)), "prompt", "chunk")


MATCH = Match("donor", "semantic_text", 0.9)
PREFIX = (PrefixHit("other", 70), meta("other"))


def test_nothing_found_runs_in_full() -> None:
    assert plan(100, Found(), Ask("adopt")).plan.method == "none"


def test_the_exact_prefix_is_always_there() -> None:
    found = plan(100, Found(prefix=PREFIX), Ask()).plan
    assert (found.method, found.reused, found.donors[0].id) == ("prefix", 70, "other")


def test_an_equal_prompt_is_exact_whatever_was_asked() -> None:
    found = Found(MATCH, (meta("donor"),), PREFIX)
    modes: tuple[Mode, ...] = ("off", "exact", "adopt", "blend")
    for mode in modes:
        chosen = plan(100, found, Ask(mode), same=True, min_gain=1000).plan
        assert (chosen.method, chosen.reused, chosen.approximate) == ("exact", 99, False)


def test_a_similar_prompt_is_never_served_to_who_asked_for_exact() -> None:
    found = plan(100, Found(MATCH, (meta("donor"),)), Ask()).plan
    assert found.method == "none"
    assert "not asked for" in found.reason


@pytest.mark.parametrize(("min_gain", "method"), [(29, "adopt"), (30, "prefix")])
def test_only_the_gain_beyond_the_exact_prefix_counts(min_gain: int, method: str) -> None:
    found = plan(100, Found(MATCH, (meta("donor"),), PREFIX), Ask("adopt"), min_gain=min_gain).plan
    assert found.method == method
    assert found.approximate == (method == "adopt")


def test_blend_must_beat_the_prefix_with_the_rows_it_computes() -> None:
    donors = (meta("donor"),)
    taken = plan(100, Found(MATCH, donors), Ask("blend"), min_gain=80, share=0.2).plan
    refused = plan(100, Found(MATCH, donors, PREFIX), Ask("blend"), min_gain=16, share=0.2).plan
    assert (taken.method, taken.reused) == ("blend", 80)
    assert (refused.method, "min_gain" in refused.reason) == ("prefix", True)
