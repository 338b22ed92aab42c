"""A blend of the transformers engine: whether a prompt can be blended, and the cache that does it."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dejakv.engines.base import Prepared
from dejakv.engines.transformers.blend import PlannedBlend, plan_cache
from dejakv.engines.transformers.blend_check import seams_of
from dejakv.engines.transformers.blend_rows import MadeOf
from dejakv.errors import ModelError
from dejakv.reuse.blend import BlendConfig, BlendReport, find, not_worth
from dejakv.reuse.selector import Selector
from dejakv.reuse.sentences import sentence_ends
from dejakv.reuse.token_map import Donors
from dejakv.store.base import Chunk
from dejakv.tokens import with_media


def plan_blend(
    engine: Any, prepared: Prepared, chunks: Sequence[Chunk], config: BlendConfig
) -> tuple[PlannedBlend | None, BlendReport]:
    """The planned cache, or None with the reason in the report."""
    tokens = len(prepared.token_ids)
    if any(chunk.meta.epoch not in ("", engine.epoch) for chunk in chunks):
        return None, BlendReport(tokens, reason="a donor's state is of another model")
    if prepared.spans and places_by_picture(engine.model):
        return None, BlendReport(tokens, reason="pictures change this model's positions: its keys cannot be moved")
    try:
        seams = seams_of(engine.model)
        layers = len(seams.layers)
    except ModelError as error:
        return None, BlendReport(tokens, reason=str(error))
    target = with_media(prepared.token_ids, prepared.spans)
    metas = [chunk.meta for chunk in chunks]
    held = Donors.of(
        *(with_media(meta.token_ids, meta.spans) for meta in metas), first=[meta.position for meta in metas]
    )
    begun = time.perf_counter()
    exact = [chunk.meta.generation == chunk.meta.position == 0 for chunk in chunks]
    found, needed = find(target, held, engine.embed_tokens, config, sentence_ends(engine.tokenizer), exact)
    report = BlendReport(tokens, forced_share=needed.share, map_s=time.perf_counter() - begun)
    reason = not_worth(config, needed, layers)
    if reason:
        return None, replace(report, reason=reason)
    states = [chunk.tensor for chunk in chunks]
    planned = plan_cache(
        engine.model, prepared.token_ids, states, held, found, needed,
        config.schedule_for(layers), Selector(config.selector, config.seed),
        threshold=config.threshold if config.by_need else None, offsets=config.offsets,
        surroundings=config.surroundings,
    )  # fmt: skip
    if seams.fixed:  # else a key's rotation depends on its prompt's length as well, which a run does not know
        planned.made_of = MadeOf(target, held, found, metas)
    return planned, report


def places_by_picture(model: Any) -> bool:
    """Whether a picture shapes the positions of the tokens behind it (M-RoPE)."""
    text = model.config.get_text_config()
    return "mrope_section" in str(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or "")
