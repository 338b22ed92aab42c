"""The method `top_layer`: its plans, their costs, and how an engine runs them."""

from collections.abc import Iterator
from typing import Any

from dejakv.config import SemanticCacheConfig
from dejakv.decide.method import PlanInputs, ReuseMethod
from dejakv.decide.plan import PiecewisePlan, Plan
from dejakv.engines.base import Completion, OnToken, Refusal, blend_donors
from dejakv.errors import ConfigError
from dejakv.prototypes.lckv.layout import layout_of
from dejakv.prototypes.top_layer.rows import UNSOUND, TopLayerConfig

PAIR = 2
"""Tokens of the shortest run in estimates: any token is taken together with a neighbour."""


class TopLayerPlan(PiecewisePlan):
    """The top layer's KV of donors, token by token; the bottom layers run over the whole prompt."""

    method, label = "top_layer", "top layer"


class TopLayerReuse(ReuseMethod):
    """Reuse of the top layer's KV alone, in a layer-condensed model (Sim-LLM)."""

    name = "top_layer"
    piecewise = True
    engines = ("transformers",)
    remedy = "Use a layer-condensed model (docs-lckv is bundled), or reuse=blend for this one"

    def check(self, config: SemanticCacheConfig) -> None:
        """Refuse pruned state, from which rows of others would be missing.

        Raises
        ------
        ConfigError
            State is pruned.
        """
        if config.prune != "none":
            raise ConfigError(
                f"prune={config.prune} drops rows of the state that reuse=top_layer takes from "
                f"others: leave one of them out"
            )

    def unsupported(self, engine: Any) -> str:
        """Return why the engine, or its model, takes no top-layer state; empty if it does."""
        if reason := super().unsupported(engine):
            return reason
        if layout_of(engine.model) is None:
            kind = type(engine.model).__name__
            return f"{kind} cannot take the top layer's KV of others: {UNSOUND}"
        return "" if engine.capabilities.reuse else engine.capabilities.reasons["reuse"]

    def shortest_run(self, config: SemanticCacheConfig) -> int:
        """Return the tokens of a pair."""
        return PAIR

    def evidence_terms(self, config: SemanticCacheConfig) -> list[str]:
        """Return the computed tail and the number of donors."""
        return [f"tail {config.top_layer_tail}", f"donors {config.blend_donors}"]

    def plans(self, inputs: PlanInputs) -> Iterator[Plan]:
        """Yield one plan: behind an exact prefix too, the bottom layers run over the whole."""
        tokens, search = inputs.tokens, inputs.donor_search
        rows = min(tokens, max(inputs.config.top_layer_tail, search.new_tokens(tokens, 0)))
        yield inputs.priced(TopLayerPlan(search.donors, search.match, tokens - rows))

    def run(
        self, engine: Any, prepared: Any, plan: Plan, store: Any, *, on_token: OnToken | None = None
    ) -> Completion | Refusal:
        """Run a plan on an engine whose model is layer-condensed."""
        assert isinstance(plan, TopLayerPlan)
        if reason := self.unsupported(engine):
            return Refusal(reason)
        settings = plan.config or SemanticCacheConfig()
        config = TopLayerConfig(settings.top_layer_tail, max_computed=plan.max_row_share)
        return blend_donors(engine, prepared, plan, store, config, on_token=on_token)


TOP_LAYER = TopLayerReuse()
