"""The status table never says hit beside a miss: it is settled once the plan is known."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.documents import COSTS, EXACT, request

from dejakv.config import SemanticCacheConfig
from dejakv.decide.levels.base import Match
from dejakv.decide.methods import AdoptPlan, BlendPlan, ExactPlan
from dejakv.decide.plan import FullPlan, Plan, PrefixPlan, final_statuses
from dejakv.store.base import StateInfo

META = StateInfo("d", "default", "e", (1, 2), "p", "c")
MATCH = Match("d", "exact_text", 1.0)
COPIED = Match("d", "copied", 0.9)
PLANS = (
    FullPlan(),
    PrefixPlan((META,), reused=1),
    ExactPlan((META,), MATCH),
    AdoptPlan((META,), MATCH),
    BlendPlan((META,), MATCH),
    BlendPlan((META,), COPIED),
)
NAMES = st.sampled_from(["exact_text", "semantic_text", "embedding:vision", "copied"])


@given(st.dictionaries(NAMES, st.sampled_from(["hit", "miss", "skip"])), st.sampled_from(PLANS))
def test_a_level_is_a_hit_only_where_its_donor_is_used(statuses: Any, plan: Plan) -> None:
    rows = final_statuses(statuses, plan)
    assert set(rows) == {*statuses, "kv_cache"}
    assert rows["kv_cache"] == ("miss" if plan.method == "none" else "hit")
    copied_alone = plan.match is COPIED
    for name, status in statuses.items():
        used = plan.match is not None and (name == "copied" or not copied_alone)
        assert rows[name] == (status if used or status != "hit" else "miss")


def test_the_same_question_in_other_spacing_is_a_miss_with_the_reason_and_the_flag(served: Any) -> None:
    pipeline = served(EXACT)
    question = "Where does Ann live?"
    pipeline.answer(request(question))
    pipeline.cache.flush()
    asked = request(f"{question}.", chunk=f"  {question.upper()} ")
    record = pipeline.answer(asked).record
    assert record.statuses["exact_text"] == "miss"
    assert (record.statuses["kv_cache"] == "hit") == (record.method == "prefix") == record.provenance.startswith("hit")
    assert "exact_text found a donor" in record.reason
    assert "--reuse adopt would use it" in record.reason
    adopting = served(
        SemanticCacheConfig(reuse="adopt", index_encoder="model", min_gain=1, lexical_guard=False, costs=COSTS)
    )
    adopting.answer(request(question))
    adopting.cache.flush()
    used = adopting.answer(request(question, chunk=f"  {question.upper()} ")).record
    assert used.method == "exact"
    assert (used.statuses["exact_text"], used.statuses["kv_cache"]) == ("hit", "hit")
