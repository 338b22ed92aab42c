from dejakv.engines.base import Prepared
from dejakv.find.found import Found
from dejakv.find.ways import Plan
from dejakv.guards.bounded import Bounded
from dejakv.levels.base import Match
from dejakv.request import Request
from dejakv.store.base import ChunkMeta
from dejakv.trust.gate import Gate
from dejakv.trust.settings import TrustSettings

DONOR = ChunkMeta("d", "tenant", "e", tuple(range(80)), "p", "p", generation=1)


def test_a_plan_is_drawn_for_under_its_own_class_and_features() -> None:
    guard = Bounded(Gate(TrustSettings(error_bound=0.1)))
    prepared = Prepared(Request(id="1", prompt="p", chunk="p", partition="tenant"), tuple(range(100)), epoch="e")
    plan = Plan("blend", (DONOR,), Match("d", "copied", 0.6), reused=70, kept=5)
    draw = guard.judge(plan, Found(plan.match, plan.donors, copied=60, runs=((0, 60),)), prepared, "strict")
    assert not draw.served
    assert draw.cls == ("e", "blend", "strict", guard.gate.settings.group_of("tenant"))
    assert (draw.features["seams"], draw.features["generation"], draw.features["copied"]) == (1, 1, 0.6)
    assert draw.features["longest_new"] == 0.4
    assert guard.gate.report("tenant").classes[0].counts.refused == 1
