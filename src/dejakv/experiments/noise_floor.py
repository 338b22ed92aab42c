"""The difference of a model from itself, between fp32 and bf16 and alone against in a batch: no method of reuse can be expected to do
better. It stands beside the figures of the error bound, and is never subtracted from them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dejakv.experiments.fidelity import STEPS, Fidelity, fidelity, means
from dejakv.experiments.watch import Watch
from dejakv.labelling import seen
from dejakv.request import Request
from dejakv.trust.differs import Differs, divergence

BATCH = 4
"""Prompts that are computed together."""


def noise_floor(
    engine: Any, requests: Sequence[Request], watch: Watch, differs: Differs | None = None
) -> dict[str, Any] | None:
    """Full computation in the engine's dtype against the other one of fp32 and bf16, along its own answers: `kl_mean`,
    `top1`, `samples`, `dtype` of the other, and `wrong`, the share of answers that differ by `differs`. `batch`: `kl_mean` and `first`,
    the share of other first tokens, of `samples` text prompts in batches of at most four against each alone; None without such. None
    for an engine without a twin."""
    from dejakv.engines.transformers.engine import TransformersEngine  # imports torch, only if needed
    from dejakv.engines.transformers.twin import twin_of

    if not requests or not isinstance(engine, TransformersEngine):
        return None
    watch.stage(f"noise floor over {len(requests)} prompts")
    plain = engine.for_arm("none")
    other = twin_of(plain)
    found: list[Fidelity] = []
    wrong: list[bool] = []
    for request in requests:
        prepared = plain.prepare(request)
        full, twin = plain.run(prepared), other.run(other.prepare(request))
        tokens = full.token_ids[:STEPS]
        value = fidelity(full.continued(tokens), twin.continued(tokens))
        if value is not None:
            found.append(value)
        if differs is not None:
            wrong.append(differs.wrong(request, seen(full), seen(twin)))
    return {
        **means(found),
        "samples": len(found),
        "dtype": str(other.model.dtype).removeprefix("torch."),
        "wrong": float(np.mean(wrong)) if wrong else None,
        "batch": _in_batches(plain, requests),
    }


def _in_batches(engine: Any, requests: Sequence[Request]) -> dict[str, Any] | None:
    from dejakv.engines.transformers.together import first_logs

    prompts = [engine.prepare(request).token_ids for request in requests if not request.media]
    pairs: list[tuple[Any, Any]] = []
    for start in range(0, len(prompts) - 1, BATCH):
        group = prompts[start : start + BATCH]
        if len(group) > 1:
            alone = [first_logs(engine.model, [prompt])[0] for prompt in group]
            pairs += zip(alone, first_logs(engine.model, group), strict=True)
    if not pairs:
        return None
    return {
        "kl_mean": float(np.mean([divergence(one[None], other[None])[0] for one, other in pairs])),
        "first": float(np.mean([one.argmax() != other.argmax() for one, other in pairs])),
        "samples": len(pairs),
    }
