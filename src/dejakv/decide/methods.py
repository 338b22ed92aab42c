"""The core's methods of reuse: `exact`, `adopt` and `blend`, with their plans."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dejakv.config import SemanticCacheConfig
from dejakv.decide.answers import stored_answer
from dejakv.decide.copied.fingerprints import SHORTEST_COPIED_RUN
from dejakv.decide.method import PlanInputs, ReuseMethod
from dejakv.decide.plan import FULL, PiecewisePlan, Plan, PrefixPlan
from dejakv.request import reusable_tokens
from dejakv.store.base import StateInfo


class ExactPlan(Plan):
    """The prompt's own state, or its own stored answer."""

    method = "exact"


class AdoptPlan(Plan):
    """A similar prompt in this one's place: its own prompt runs, from its own state."""

    method = "adopt"


class BlendPlan(PiecewisePlan):
    """KV entries of donors, token by token, with a share of the tokens recomputed."""

    method = "blend"

    @property
    def name(self) -> str:
        """Name of the method for readers."""
        return "blend behind the exact prefix" if self.prefix_tokens else "blend"

    def loaded(self, tokens: int) -> int:
        """Return the tokens of state to load: only the rows that a blend uses.

        Parameters
        ----------
        tokens : int
            Tokens of the prompt.

        Returns
        -------
        int
            Tokens of all donors, at most `tokens`.
        """
        return min(super().loaded(tokens), tokens)


class ExactReuse(ReuseMethod):
    """Reuse that cannot change an answer: full computation, exact prefixes, the prompt's state."""

    name = "exact"

    def needs_similar_text(self, config: SemanticCacheConfig) -> bool:
        """Return False: no similar prompt is used."""
        return False

    def computations(self, inputs: PlanInputs) -> list[Plan]:
        """Return full computation and, if there is one, the plan behind the exact prefix."""
        tokens, costs = inputs.tokens, inputs.costs
        behind: list[Plan] = []
        if inputs.donor_search.prefix is not None:
            hit, meta = inputs.donor_search.prefix

            reused_tokens = reusable_tokens(hit.tokens, tokens, inputs.prefill_unit, meta.spans)
            if reused_tokens:
                seconds = costs.prefix(reused_tokens, tokens) if costs else None
                behind.append(PrefixPlan((meta,), None, reused_tokens, seconds=seconds))
        return [replace(FULL, seconds=costs.full(tokens) if costs else None), *behind]

    def declined(self, inputs: PlanInputs) -> str:
        """Return that the donor's tokens differ."""
        match = inputs.donor_search.match
        return (
            f"not asked for: {match.level if match else 'a level'} found a donor whose tokens "
            "differ, and reuse is exact (--reuse adopt would use it)"
        )

    def plans(self, inputs: PlanInputs) -> Iterator[Plan]:
        """Yield nothing: donors of other tokens are not used (see `declined`)."""
        yield from ()


class AdoptReuse(ReuseMethod):
    """Adoption: a similar prompt's answer, computed from its own state, or stored with it."""

    name = "adopt"

    def plans(self, inputs: PlanInputs) -> Iterator[Plan]:
        """Yield the plan that runs the first donor's own prompt, or returns its stored answer."""
        tokens, search = inputs.tokens, inputs.donor_search
        donor = search.donors[0]
        answer = stored_answer(donor, inputs.ask.answers)
        if answer is not None:
            yield AdoptPlan(
                search.donors, search.match, tokens, seconds=inputs.no_seconds, answer=answer
            )
            return

        length = donor.num_tokens
        reused_tokens = reusable_tokens(length, length, inputs.prefill_unit, donor.spans)
        seconds = inputs.costs.prefix(reused_tokens, length) if inputs.costs else None

        # The donor's own last tokens are computed, and count as computed of this prompt.
        yield AdoptPlan(
            search.donors, search.match, tokens - (length - reused_tokens), seconds=seconds
        )


class BlendReuse(ReuseMethod):
    """Blending: donors' KV entries where their text stands in the prompt, the rest recomputed."""

    name = "blend"
    piecewise = True
    takes_rows = True
    keeps_rows = True

    def needs_similar_text(self, config: SemanticCacheConfig) -> bool:
        """Return whether copied text, which needs no encoder, is not searched."""
        return not config.copied_text

    def shortest_run(self, config: SemanticCacheConfig) -> int | None:
        """Return the shortest copied run; None for a token map that does not go by runs."""
        return SHORTEST_COPIED_RUN if config.blend_map == SemanticCacheConfig.blend_map else None

    def evidence_terms(self, config: SemanticCacheConfig) -> list[str]:
        """Return token map, quality and depth, and the bound on donors' context if there is one."""
        terms = [config.blend_map, config.blend.label, f"generation {config.max_generation}"]
        if config.foreign_context is not None:
            terms.append(f"foreign context {config.foreign_context}")
        return terms

    def plans(self, inputs: PlanInputs) -> Iterator[Plan]:
        """Yield the blend of the donors, and the one behind an exact prefix of another prompt."""
        search, max_donors = inputs.donor_search, inputs.ask.max_donors(inputs.config)
        donors = search.donors
        prefix_tokens, prefix = (
            (search.prefix[0].tokens, search.prefix[1])
            if search.prefix is not None
            else (0, donors[0])
        )

        prefix_is_donor = prefix.id in [donor.id for donor in donors]
        yield self._plan(inputs, donors, prefix_tokens if prefix_is_donor else 0)

        # An engine without costs has its prefixes itself.
        if not prefix_is_donor and inputs.costs is not None and max_donors > 1:
            yield self._plan(inputs, (*donors[: max_donors - 1], prefix), prefix_tokens)

    def _plan(self, inputs: PlanInputs, donors: Sequence[StateInfo], prefix_tokens: int) -> Plan:
        tokens, search = inputs.tokens, inputs.donor_search
        # At least one row: the last one gives the answer.
        rows = max(
            1,
            round((tokens - prefix_tokens) * inputs.config.blend.share),
            search.new_tokens(tokens, prefix_tokens),
        )
        return inputs.priced(
            BlendPlan(tuple(donors), search.match, tokens - rows, prefix_tokens=prefix_tokens)
        )


EXACT, ADOPT, BLEND = ExactReuse(), AdoptReuse(), BlendReuse()
