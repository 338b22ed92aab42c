"""The seam of methods of reuse: one object says how a method plans, prices, runs and stores.

`exact`, `adopt` and `blend` stand behind it in `decide.methods`; `dejakv.plugins` finds every
method by its name.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dejakv import plugins
from dejakv.config import SemanticCacheConfig
from dejakv.decide.costs import ReuseCosts
from dejakv.decide.plan import DonorSearch, Plan, ReuseRequest

P = TypeVar("P", bound=Plan)


@dataclass(frozen=True)
class PlanInputs:
    """What a method makes its plans from.

    Attributes
    ----------
    tokens : int
        Tokens of the prompt.
    donor_search : DonorSearch
        Donors and exact prefix of the prompt.
    ask : ReuseRequest
        Reuse that is allowed.
    config : SemanticCacheConfig
        Settings of the cache.
    costs : ReuseCosts, optional
        Costs of rows, bytes and blends in the engine. None if unknown.
    prefill_unit : int
        Tokens of a prefill unit (see `Prepared`).
    """

    tokens: int
    donor_search: DonorSearch
    ask: ReuseRequest
    config: SemanticCacheConfig
    costs: ReuseCosts | None = None
    prefill_unit: int = 1

    @property
    def no_seconds(self) -> float | None:
        """Seconds of a plan that runs nothing; None if costs are unknown."""
        return None if self.costs is None else 0.0

    def priced(self, plan: P) -> P:
        """Return a piecewise plan with its seconds, from the rows that it computes and loads.

        Parameters
        ----------
        plan : Plan
            Plan without its seconds.

        Returns
        -------
        Plan
            The plan with its seconds; unchanged if costs are unknown.
        """
        if self.costs is None:
            return plan
        rows = self.tokens - plan.reused
        return replace(
            plan, seconds=self.costs.blending(rows, self.tokens, plan.loaded(self.tokens))
        )


class ReuseMethod:
    """A method of reuse: how its plans are made and priced, how they run, and what is stored.

    The defaults are those of a method that takes one similar prompt as a whole. Subclass it, give
    a `name`, write `plans`, and where the engine does not know the plan also `run`; then pass an
    object to `register`. `examples/own_method.py` is one.

    Every method but `exact` is approximate: its plans run only for requests that ask for it, their
    answers are labelled, and their state is never stored as exact.

    Attributes
    ----------
    name : str
        Name in settings (`reuse`), requests, plans and records.
    piecewise : bool
        Whether state is taken token by token from several donors. Then copied text is searched
        first, and plans are `PiecewisePlan`.
    takes_rows : bool
        Whether rows that an earlier blend computed may be donors.
    keeps_rows : bool
        Whether the rows that a run computed in every layer are stored for later blends.
    engines : tuple[str, ...], optional
        Names of the engines that run the method; None for all.
    remedy : str
        What to do where engine or model do not support the method; a sentence.
    """

    name: str = ""
    piecewise: bool = False
    takes_rows: bool = False
    keeps_rows: bool = False
    engines: tuple[str, ...] | None = None
    remedy: str = "Choose another method of reuse"

    def register(self) -> None:
        """Make the method known by its name, in this process.

        A package does the same with an entry point of the group `dejakv.methods`.

        Raises
        ------
        ConfigError
            For the name of one of the core's methods.
        """
        plugins.register(plugins.METHODS, self.name, self)

    def check(self, config: SemanticCacheConfig) -> None:
        """Check the settings of a cache with this method.

        Parameters
        ----------
        config : SemanticCacheConfig
            Settings of the cache.

        Raises
        ------
        ConfigError
            Settings exclude each other.
        """

    def unsupported(self, engine: Any) -> str:
        """Return why an engine or its model does not support the method; empty if it does.

        Parameters
        ----------
        engine : Engine
            Engine that would run the plans.

        Returns
        -------
        str
            The reason; empty without one.
        """
        if self.engines is None or engine.name in self.engines:
            return ""
        return (
            f"the engine {engine.name} has no {self.name}: use the {' or '.join(self.engines)} "
            "engine"
        )

    def needs_similar_text(self, config: SemanticCacheConfig) -> bool:
        """Return whether the cache should search similar text if its settings do not say.

        Parameters
        ----------
        config : SemanticCacheConfig
            Settings of the cache.

        Returns
        -------
        bool
            True by default.
        """
        return True

    def shortest_run(self, config: SemanticCacheConfig) -> int | None:
        """Return the tokens of the shortest run of equal tokens that a piecewise plan reuses.

        Parameters
        ----------
        config : SemanticCacheConfig
            Settings of the cache.

        Returns
        -------
        int or None
            Plans are estimated with such runs (`DonorSearch.short_runs`); None for a method that
            does not go by runs, the default.
        """
        return None

    def evidence_terms(self, config: SemanticCacheConfig) -> list[str]:
        """Return the settings that decide what the method's answers are like, as texts.

        Evidence of an error bound on one setting says nothing about another.

        Parameters
        ----------
        config : SemanticCacheConfig
            Settings of the cache.

        Returns
        -------
        list[str]
            By default whatever decides which similar prompts are found.
        """
        return [
            config.index_encoder,
            f"score {config.similarity_threshold:g}",
            f"media {config.media}",
            *config.embedding_layers,
            *config.levels,
            "words" if config.lexical_guard else "no words",
        ]

    def declined(self, inputs: PlanInputs) -> str:
        """Return why the method makes no plan with the donors, where it makes none.

        Parameters
        ----------
        inputs : PlanInputs
            Prompt, donors, settings and costs.

        Returns
        -------
        str
            The reason, in a few words.
        """
        return f"{self.name} makes no plan with the donor"

    def plans(self, inputs: PlanInputs) -> Iterable[Plan]:
        """Make the plans with the donors, each with its costs.

        Parameters
        ----------
        inputs : PlanInputs
            Prompt, donors (at least one), settings and costs.

        Returns
        -------
        Iterable[Plan]
            Plans with `reused` and, where costs are known, `seconds`. The cheapest runs if it is
            cheaper than exact computation and saves at least `min_gain` tokens.
        """
        raise NotImplementedError(f"the method {self.name} has no plans: yield a Plan")

    def run(
        self, engine: Any, prepared: Any, plan: Plan, store: Any, *, on_token: Any = None
    ) -> Any:
        """Run a plan of this method on an engine.

        Parameters
        ----------
        engine : Engine
            Engine that runs the plan.
        prepared : Prepared
            The tokenized request.
        plan : Plan
            A plan of `plans`.
        store : Store
            Store with the state of the plan's donors.
        on_token : OnToken or None
            Called with each token.

        Returns
        -------
        Completion or Refusal
            A refusal before the first token lets the next plan run. By default what the engine's
            own `run` returns, which knows the plans of `exact`, `adopt` and `blend`.
        """
        return engine.run(prepared, plan, store, on_token=on_token)


def method_named(name: str) -> ReuseMethod:
    """Return the method of a name.

    Raises
    ------
    ConfigError
        For an unknown name, and for a method whose module is missing.
    """
    return plugins.load(plugins.METHODS, name)


def method_of(plan: Plan) -> ReuseMethod:
    """Return the method that a plan is of: `exact` for full computation and an exact prefix."""
    return method_named("exact" if plan.method in ("none", "prefix") else plan.method)
