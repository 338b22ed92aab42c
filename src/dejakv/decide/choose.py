"""Choice between the plans for a prompt.

Approximate plans must be asked for. Without measured costs, an approximate plan that saves enough
comes before the exact prefix, and the exact prefix before full computation.
"""

from collections.abc import Sequence
from dataclasses import replace

from dejakv.decide.answers import stored_answer
from dejakv.decide.costs import ReuseCosts
from dejakv.decide.method import PlanInputs, method_named
from dejakv.decide.methods import EXACT, ExactPlan
from dejakv.decide.plan import (
    COSTS,
    FULL,
    NO_DONOR,
    NO_PREFIX,
    PiecewisePlan,
    Plan,
    ReadSeconds,
)
from dejakv.identity import BLOCK_TOKENS
from dejakv.store.base import PrefixHit

Choice = tuple[tuple[Plan, ...], tuple[Plan, ...]]
"""Plans that may run, best first, and all that were considered."""


def choose_plans(
    inputs: PlanInputs, *, same: bool = False, read_seconds: ReadSeconds = lambda id, rows: 0.0
) -> Choice:
    """Choose the plans for a prompt, from those of the method that is asked for.

    Parameters
    ----------
    inputs : PlanInputs
        Prompt, donors, settings and costs.
    same : bool
        Whether the first donor's token ids and media equal the request's, so that exact reuse is
        possible in any mode.
    read_seconds : ReadSeconds
        Time to read rows from a bucket.

    Returns
    -------
    tuple[Plan, ...]
        Plans that may run, best first. The last is full computation.
    tuple[Plan, ...]
        All plans that were considered.

    Raises
    ------
    ConfigError
        If there are donors and the method that is asked for is unknown.
    """
    exact_plans = _with_deadlines(
        [_with_read_time(plan, plan.reused, read_seconds) for plan in EXACT.computations(inputs)]
    )
    if not inputs.donor_search.donors or inputs.donor_search.match is None:
        return _exact_choice(inputs, exact_plans, inputs.donor_search.refused)
    if same:
        return _own_choice(inputs, exact_plans, read_seconds)

    method, exact = method_named(inputs.ask.method), _cheapest(exact_plans)
    plans = [_with_read_time(plan, inputs.tokens, read_seconds) for plan in method.plans(inputs)]
    judged = [replace(plan, refused=_refusal(plan, inputs, exact)) for plan in plans]
    # With the exact plans, since a deadline follows from what they would cost.
    candidates = _with_deadlines([*exact_plans, *judged])[len(exact_plans) :]

    admitted = [plan for plan in candidates if not plan.refused]
    best = _cheapest([*exact_plans, *admitted])
    if best.approximate:
        chosen = _with_settings(best, inputs, exact)
        considered = (chosen if plan is best else plan for plan in candidates)
        return (chosen, exact, *_fallbacks(exact)), (*exact_plans, *considered)

    if admitted:
        reason = _costs_reason([*exact_plans, *candidates], best)
    else:
        reason = candidates[0].refused if candidates else method.declined(inputs)
    return _exact_choice(inputs, exact_plans, reason, candidates)


def _own_choice(
    inputs: PlanInputs, exact_plans: Sequence[Plan], read_seconds: ReadSeconds
) -> Choice:
    """Choose between the prompt's own state and the other exact plans."""
    exact, own = _cheapest(exact_plans), _own_plan(inputs, exact_plans, read_seconds)
    if reason := _own_refusal(own, exact_plans, inputs.prefill_unit):
        return _exact_choice(inputs, exact_plans, reason, same=True)

    # What came too late is not read once more.
    again = own.read_seconds > 0 and exact.donors == own.donors
    own = own.changed_to(ExactPlan, match=inputs.donor_search.match)
    return (own, *(() if again else (exact,)), *_fallbacks(exact)), (*exact_plans, own)


def _exact_choice(
    inputs: PlanInputs,
    exact_plans: Sequence[Plan],
    reason: str,
    candidates: Sequence[Plan] = (),
    *,
    same: bool = False,
) -> Choice:
    """Choose the cheapest exact plan, with the reason why no donor is used."""
    exact = _cheapest(exact_plans)
    if not exact.donors:
        reason = _miss_reason(reason, inputs, exact_plans, same=same)
    return (replace(exact, reason=reason), *_fallbacks(exact)), (*exact_plans, *candidates)


def _fallbacks(exact: Plan) -> tuple[Plan, ...]:
    """Return full computation, unless the exact plan is that itself."""
    return (FULL,) if exact.donors else ()


def _own_plan(inputs: PlanInputs, exact_plans: Sequence[Plan], read_seconds: ReadSeconds) -> Plan:
    """Return the plan from the prompt's own state; full computation if that is too short."""
    tokens, search = inputs.tokens, inputs.donor_search
    donor = search.donors[0]
    answer = stored_answer(donor, inputs.ask.answers)
    if answer is not None:
        return ExactPlan((donor,), search.match, tokens, seconds=inputs.no_seconds, answer=answer)
    if search.prefix is not None and search.prefix[0].donor == donor.id:
        return exact_plans[-1]

    # The prefix stands for the prompt itself, which can be read whole.
    whole = replace(search, prefix=(PrefixHit(donor.id, tokens - 1), donor))
    plan = EXACT.computations(replace(inputs, donor_search=whole))[-1]
    return _with_deadlines([*exact_plans, _with_read_time(plan, tokens - 1, read_seconds)])[-1]


def _own_refusal(own: Plan, exact_plans: Sequence[Plan], prefill_unit: int) -> str:
    """Return why the prompt's own state is not used; empty if it is."""
    if not own.donors:
        return _too_short(prefill_unit, "the prompt")
    # State on this machine is used without a comparison. Only a bucket may be too slow.
    if own.read_seconds and _cheapest([*exact_plans, own]) is not own:
        return _costs_reason([*exact_plans, own], _cheapest(exact_plans))
    return ""


def _with_settings(plan: Plan, inputs: PlanInputs, exact: Plan) -> Plan:
    """Add the settings that an engine needs for a piecewise plan."""
    if not isinstance(plan, PiecewisePlan):
        return plan

    config = inputs.config
    least_gain = config.least_blend_gain(inputs.tokens - exact.reused)
    max_share = max_computed_share(inputs.tokens, plan, exact, least_gain, inputs.costs)

    return replace(plan, config=plan.config or config, max_row_share=max_share)


def _costs_reason(plans: Sequence[Plan], chosen: Plan) -> str:
    """Return the reason of a plan that was chosen by costs: all plans, and its name."""
    return f"{COSTS}: {', '.join(map(str, plans))}: {chosen.name}"


def _miss_reason(
    reason: str, inputs: PlanInputs, exact_plans: Sequence[Plan], *, same: bool
) -> str:
    """Return why a prompt is computed in full, where `reason` says why no donor is used."""
    ask, unit = inputs.ask, inputs.prefill_unit
    if inputs.donor_search.prefix is None and not same:
        return reason or (NO_PREFIX if ask.method == "exact" else NO_DONOR)
    if len(exact_plans) > 1:
        return reason or _costs_reason(exact_plans, _cheapest(exact_plans))
    # A donor that nobody asked for is no reason, but a prefix shorter than a unit is.
    if unit > 1 and (not reason or ask.method == "exact"):
        return _too_short(unit, "the prompt" if same else "the stored prefix")
    return reason


def _too_short(prefill_unit: int, subject: str) -> str:
    """Explain why exact state of a prompt or a prefix is not reused at all."""
    # A unit of one block comes from a prefix cache, and not from low precision.
    precision = " in low precision" if prefill_unit != BLOCK_TOKENS else ""
    return (
        f"{subject} is shorter than a prefill unit of {prefill_unit} tokens, which is the "
        f"least that is reused{precision}"
    )


def _refusal(plan: Plan, inputs: PlanInputs, exact: Plan) -> str:
    """Return why an approximate plan may not run; empty if it may.

    It must save `min_gain` tokens beyond the exact plan, and a piecewise plan `min_gain_share` of
    what the exact plan would compute. For a whole donor it is enough to reuse `min_gain` tokens of
    the prompt and more than the exact plan does: a short question behind a picture would never
    qualify otherwise. A stored answer always saves enough.
    """
    tokens, config = inputs.tokens, inputs.config
    min_gain = config.least_blend_gain(tokens - exact.reused) if plan.piecewise else config.min_gain
    gain = plan.reused - exact.reused
    enough = gain >= min_gain or (not plan.piecewise and gain > 0 and plan.reused >= min_gain)
    # A stored answer is saved whole, whatever its prompt reuses.
    if not enough and plan.answer is None:
        saved = f"{gain} tokens" if gain > 0 else "nothing"
        return (
            f"min_gain: {plan.method} would save {saved} beyond the exact "
            f"prefix, {min_gain} tokens are asked for"
        )
    return ""


def max_computed_share(
    tokens: int, chosen: Plan, exact: Plan, least_gain: int, costs: ReuseCosts | None
) -> float:
    """Return the share of rows above which a piecewise plan does not pay, in [0, 1].

    Beyond it, as a mean over layers, the exact plan is cheaper or less than `least_gain` tokens are
    saved.

    Parameters
    ----------
    tokens : int
        Tokens of the prompt.
    chosen : Plan
        The piecewise plan.
    exact : Plan
        The exact plan that it must beat.
    least_gain : int
        Tokens to save beyond the exact plan.
    costs : ReuseCosts, optional
        Costs in the engine. With None `least_gain` alone counts.
    """
    rows = float(tokens - exact.reused - least_gain)
    if costs is not None:
        seconds = costs.prefix(exact.reused, tokens) if exact.donors else costs.full(tokens)
        rows = min(rows, costs.max_rows(seconds, tokens, chosen.loaded(tokens)))
    return min(1.0, max(0.0, rows / tokens))


def _with_read_time(plan: Plan, max_tokens: int, read_seconds: ReadSeconds) -> Plan:
    """Add the time to read state from a bucket, of at most `max_tokens` tokens of each donor."""
    if plan.seconds is None or not plan.donors:
        return plan

    extra_seconds = sum(read_seconds(donor.id, [(0, max_tokens)]) for donor in plan.donors)
    return (
        replace(plan, seconds=plan.seconds + extra_seconds, read_seconds=extra_seconds)
        if extra_seconds
        else plan
    )


def _with_deadlines(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Add deadlines for reading from a bucket.

    Copies on this machine get one too, since they may be evicted before they are read.
    """
    return tuple(
        replace(plan, max_read_seconds=_read_limit(plan, plans)) if plan.donors else plan
        for plan in plans
    )


def _read_limit(plan: Plan, plans: Sequence[Plan]) -> float | None:
    alternatives = [
        alternative
        for alternative in plans
        if alternative is not plan and not alternative.read_seconds and not alternative.approximate
    ]
    if plan.seconds is None or not alternatives:
        return None

    # The time that is left for reading until computing would have been as fast.
    return max(
        0.0,
        min(alternative.seconds or 0.0 for alternative in alternatives)
        - (plan.seconds - plan.read_seconds),
    )


def _cheapest(plans: Sequence[Plan]) -> Plan:
    """Return the plan with the fewest seconds, or with the most reuse if any seconds are unknown.

    Of equal plans it is the first.
    """
    # A single unknown time makes all of them incomparable.
    if any(plan.seconds is None for plan in plans):
        return max(plans, key=lambda plan: plan.reused)
    return min(plans, key=lambda plan: plan.seconds or 0.0)
