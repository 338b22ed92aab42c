"""A prompt with one passage copied word for word and another one that is only like a stored one, through a real engine."""

from test_vllm_lookups_like import ASKED, HOLDS, LIKE
from vllm_harness import BLENDING, EXTENSION, running, tokens, worker_side

from dejakv.costs import SEEN
from dejakv.engines.vllm.pace import Pace

WISH = {"mode": "blend", "no_store": True}


def test_a_blend_takes_state_from_both_kinds_of_donors():
    """Once the engine's own steps have told what a row takes. Fewer rows are computed than from copied text alone."""
    with running(extra=BLENDING, worker_extension_cls=EXTENSION) as engine:
        lookups = engine.connector._scheduler.lookups
        engine.ask([HOLDS, LIKE, tokens(300, 9)], wish={"mode": "exact"})
        engine.settle()
        engine.reset_prefix_cache()
        held = {tuple(meta.token_ids): meta.id for meta in worker_side().store.metas()}
        holds, like = held[tuple(HOLDS)], held[tuple(LIKE)]
        costs = lookups.pace.costs
        assert costs is not None
        assert costs.row > 0

        lookups.pace = Pace()
        (copied,) = engine.ask([ASKED], wish=WISH)
        assert (copied.told["method"], copied.told["donors"]) == ("blend", [holds])
        for _ in range(SEEN):
            lookups.pace.seen(1.0)
        (both,) = engine.ask([ASKED], wish=WISH)
        assert (both.told["method"], both.told["level"]) == ("blend", "copied")
        assert set(both.told["donors"]) == {holds, like}
        assert both.told["tokens_recomputed"] < copied.told["tokens_recomputed"]
        assert engine.metrics()["vllm:dejakv_loaded_donors"] == 3
