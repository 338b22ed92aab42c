"""A blend of the transformers engine: whether a prompt can be blended, and the cache that does it."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dejakv.engines.base import NO_STATE, UNREADABLE, Prepared
from dejakv.engines.transformers.blend import PlannedBlend, plan_cache
from dejakv.engines.transformers.blend_check import seams_of
from dejakv.engines.transformers.blend_rows import MadeOf
from dejakv.errors import ModelError
from dejakv.reuse.blend import BlendConfig, BlendReport, find, not_worth
from dejakv.reuse.selector import Selector
from dejakv.reuse.sentences import sentence_ends
from dejakv.reuse.slices import ranges_of
from dejakv.reuse.token_map import Donors, TokenMap
from dejakv.store.base import Chunk, Donor
from dejakv.tokens import with_media


def plan_blend(
    engine: Any, prepared: Prepared, donors: Sequence[Donor], config: BlendConfig
) -> tuple[PlannedBlend | None, BlendReport]:
    """The planned cache, or None with the reason in the report."""
    tokens = len(prepared.token_ids)
    if any(donor.meta.epoch not in ("", engine.epoch) for donor in donors):
        return None, BlendReport(tokens, reason="a donor's state is of another model")
    if prepared.spans and places_by_picture(engine.model):
        return None, BlendReport(tokens, reason="pictures change this model's positions: its keys cannot be moved")
    try:
        seams = seams_of(engine.model)
        layers = len(seams.layers)
    except ModelError as error:
        return None, BlendReport(tokens, reason=str(error))
    target = with_media(prepared.token_ids, prepared.spans)
    ends, usable = sentence_ends(engine.tokenizer), list(donors)
    while usable:
        metas = [donor.meta for donor in usable]
        held = Donors.of(
            *(with_media(meta.token_ids, meta.spans) for meta in metas), first=[meta.position for meta in metas]
        )
        begun = time.perf_counter()
        exact = [meta.generation == meta.position == 0 for meta in metas]
        found, needed = find(target, held, engine.embed_tokens, config, ends, exact)
        mapped = time.perf_counter()
        report = BlendReport(tokens, forced_share=needed.share, map_s=mapped - begun)
        if reason := not_worth(config, needed, layers):
            return None, replace(report, reason=reason)
        chunks = _read(usable, held, found)
        if isinstance(chunks, int):
            del usable[chunks]  # the map is made again without it
            continue
        read_bytes = sum(_bytes_read(chunk) for chunk in chunks if chunk is not None)
        report = replace(report, read_s=time.perf_counter() - mapped, read_bytes=read_bytes)
        planned = plan_cache(
            engine.model, prepared.token_ids, [chunk.tensor if chunk is not None else NO_STATE for chunk in chunks], held,
            found, needed, config.schedule_for(layers), Selector(config.selector, config.seed),
            threshold=config.threshold if config.by_need else None, offsets=config.offsets,
            surroundings=config.surroundings,
        )  # fmt: skip
        if seams.fixed:  # else a key's rotation depends on its prompt's length as well, which a run does not know
            planned.made_of = MadeOf(target, held, found, metas)
        return planned, report
    return None, BlendReport(tokens, reason=UNREADABLE)


def _read(donors: Sequence[Donor], held: Donors, found: TokenMap) -> list[Chunk | None] | int:
    """The donors' rows that the map takes, None for a donor of which it takes none; or the number of a donor that cannot be read."""
    chunks: list[Chunk | None] = [None] * len(donors)
    for number, _, places in held.parts(found.source):
        chunks[number] = donors[number].read(ranges_of(places))
        if chunks[number] is None:
            return number
    return chunks


def _bytes_read(chunk: Chunk) -> int:
    if chunk.rows is None:
        return chunk.tensor.nbytes
    return sum(stop - start for start, stop in chunk.rows) * chunk.tensor.nbytes // chunk.meta.num_tokens


def places_by_picture(model: Any) -> bool:
    """Whether a picture shapes the positions of the tokens behind it (M-RoPE)."""
    text = model.config.get_text_config()
    return "mrope_section" in str(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or "")
