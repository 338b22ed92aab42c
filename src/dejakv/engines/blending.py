"""A blend, or top-layer reuse, or whatever is run where there is none: what a pipeline needs of an engine that may or may not
have them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dejakv.engines.base import (
    UNREADABLE,
    Accept,
    Blends,
    Completion,
    Engine,
    OnToken,
    Prepared,
    TakesTopLayer,
    no_top_layer,
)
from dejakv.request import Sampling
from dejakv.reuse.blend import BlendConfig, BlendReport
from dejakv.reuse.top_layer import TopLayerConfig
from dejakv.store.donors import Donor


def run_blend(
    engine: Engine,
    prepared: Prepared,
    donors: Sequence[Donor],
    config: BlendConfig | TopLayerConfig | None = None,
    *,
    sampling: Sampling | None = None,
    on_token: OnToken | None = None,
    instead: Callable[[], Completion] | None = None,
    accept: Accept | None = None,
) -> Completion:
    """Answers a prompt from the donors' state. `details["blend"]` is a `BlendReport`.

    config   also says by which method: a `TopLayerConfig` takes the top layer's state
    accept   may decline the blend by its first token, in engines that tell it
    instead  how to answer a prompt that is not blended; None: computed in full

    What cannot or should not be blended (an engine or model without it, positions that pictures make, a prompt that has too
    little in common with its donors) is computed in full, and the report says why.
    """
    begun = time.perf_counter()
    given: dict[str, Any] = {"sampling": sampling, "on_token": on_token, "accept": accept}
    if isinstance(config, TopLayerConfig):
        if isinstance(engine, TakesTopLayer):
            chunks = [donor.whole() for donor in donors]
            held = [chunk for chunk in chunks if chunk is not None]
            unreadable = BlendReport(len(prepared.token_ids), reason=UNREADABLE)
            done = engine.top_layer(prepared, held, config, **given) if held else unreadable
        else:
            done = BlendReport(len(prepared.token_ids), reason=no_top_layer(engine))
    elif isinstance(engine, Blends):
        done = engine.blend(prepared, donors, config or BlendConfig(), **given)
    else:
        done = BlendReport(len(prepared.token_ids), reason=f"the engine {engine.name} cannot blend")
    if isinstance(done, Completion):
        return done
    tried = time.perf_counter() - begun
    ran = instead() if instead is not None else engine.run(prepared, sampling=sampling, on_token=on_token)
    return later(ran, tried, replace(done, plan_s=tried))


def later(completion: Completion, planning: float, report: BlendReport) -> Completion:
    """The completion with the time that went before it, seconds, and with the report."""
    return replace(
        completion,
        ttft_s=completion.ttft_s + planning,
        latency_s=completion.latency_s + planning,
        inject_s=completion.inject_s + planning,
        details={**completion.details, "blend": report},
    )
