"""Runs of an engine from a chunk that no pipeline found."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dejakv.blend.blend import BlendReport
from dejakv.engines.base import Completion, Plan, Prepared, Refusal
from dejakv.engines.transformers.generate_call import GenerateCall
from dejakv.request import Sampling
from dejakv.store.base import StoredState
from dejakv.store.open import open_store


def begun(engine: Any, prepared: Prepared, chunk: StoredState, held: int, **more: Any) -> Completion | Refusal:
    """From the chunk's first `held` tokens, as an exact prefix."""
    store = open_store()
    store.put(chunk)
    return engine.run(prepared, Plan("prefix", (chunk.meta,), None, held), store, **more)


def asking(prepared: Prepared, **arguments: Any) -> Prepared:
    """The prompt with `generate`'s own arguments, as an attached model asks for it."""
    request = prepared.request
    call = GenerateCall(
        request.id,
        request.prompt,
        request.chunk,
        request.media,
        token_ids=prepared.token_ids,
        spans=prepared.spans,
        arguments=arguments,
    )
    return replace(prepared, request=call)


def full(engine: Any, prepared: Prepared, sampling: Sampling | None = None) -> Completion:
    return engine.full(prepared if sampling is None else prepared.sampled(sampling))


def blended(
    engine: Any,
    prepared: Prepared,
    donors: Sequence[StoredState],
    config: Any = None,
    sampling: Sampling | None = None,
    **more: Any,
) -> Completion:
    """A blend, or full computation with the report that says why there was none."""
    prepared = prepared if sampling is None else prepared.sampled(sampling)
    ran = engine.blend(prepared, donors, config, **more)
    if isinstance(ran, Completion):
        return ran
    done = engine.full(prepared, on_token=more.get("on_token"))
    return replace(
        done, details={**done.details, "blend": BlendReport(len(prepared.token_ids), reason=ran.reason), **ran.details}
    )
