"""The difference of a model from itself between fp32 and bf16: no method of reuse can be expected to do better."""

from collections.abc import Sequence
from typing import Any

from dejakv.experiments.fidelity import STEPS, Fidelity, fidelity, means
from dejakv.experiments.watch import Watch
from dejakv.request import Request


def noise_floor(engine: Any, requests: Sequence[Request], watch: Watch) -> dict[str, Any] | None:
    """Full computation in the engine's dtype against the other one of fp32 and bf16, along its own answers: `kl_mean`,
    `top1`, `samples` and `dtype` of the other. None for an engine without a twin."""
    from dejakv.engines.transformers.engine import TransformersEngine  # imports torch, only if needed
    from dejakv.engines.transformers.twin import twin_of

    if not requests or not isinstance(engine, TransformersEngine):
        return None
    watch.stage(f"noise floor over {len(requests)} prompts")
    plain = engine.for_arm("none")
    other = twin_of(plain)
    found: list[Fidelity] = []
    for request in requests:
        prepared = plain.prepare(request)
        full = plain.run(prepared)
        tokens = full.token_ids[:STEPS]
        value = fidelity(full.continued(tokens), other.run(other.prepare(request)).continued(tokens))
        if value is not None:
            found.append(value)
    return {**means(found), "samples": len(found), "dtype": str(other.model.dtype).removeprefix("torch.")}
