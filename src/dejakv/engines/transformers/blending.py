"""A blend of the transformers engine: whether a prompt can be blended, and the cache that does it."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dejakv.engines.base import UNREADABLE, Prepared
from dejakv.engines.transformers.blend import PlannedBlend, plan_cache
from dejakv.engines.transformers.blend_check import seams_of
from dejakv.engines.transformers.blend_rows import MadeOf
from dejakv.errors import ModelError
from dejakv.reuse.blend import BlendConfig, BlendReport, find, not_worth
from dejakv.reuse.selector import Selector
from dejakv.reuse.sentences import sentence_ends
from dejakv.reuse.slices import ranges_of
from dejakv.reuse.token_map import Donors, TokenMap
from dejakv.store.base import Chunk
from dejakv.store.donors import Donor
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
        parts = _read(usable, held, found)
        if isinstance(parts, int):
            del usable[parts]  # the map is made again without it
            continue
        report = replace(report, read_s=time.perf_counter() - mapped, read_bytes=_bytes_taken(parts, held, found))
        states = [[(part.meta.rows_from, part.tensor) for part in own] for own in parts]
        planned = plan_cache(
            engine.model, prepared.token_ids, states, held,
            found, needed, config.schedule_for(layers), Selector(config.selector, config.seed),
            threshold=config.threshold if config.by_need else None, offsets=config.offsets,
            surroundings=config.surroundings,
        )  # fmt: skip
        if seams.fixed:  # else a key's rotation depends on its prompt's length as well, which a run does not know
            planned.made_of = MadeOf(target, held, found, metas)
        return planned, report
    return None, BlendReport(tokens, reason=UNREADABLE)


def _read(donors: Sequence[Donor], held: Donors, found: TokenMap) -> list[Sequence[Chunk]] | int:
    """What holds the rows that the map takes of each donor, nothing of one of which it takes none; or the number of a donor that
    cannot be read."""
    parts: list[Sequence[Chunk]] = [()] * len(donors)
    for number, _, places in held.parts(found.source):
        own = donors[number].read(ranges_of(places))
        if own is None:
            return number
        parts[number] = own
    return parts


def _bytes_taken(parts: Sequence[Sequence[Chunk]], held: Donors, found: TokenMap) -> int:
    taken = 0.0
    for number, _, places in held.parts(found.source):
        rows = sum(stop - start for start, stop in ranges_of(places))
        one = parts[number][0]
        taken += rows * one.tensor.nbytes / max(1, one.meta.num_tokens - one.meta.rows_from)
    return round(taken)


def places_by_picture(model: Any) -> bool:
    """Whether a picture shapes the positions of the tokens behind it (M-RoPE)."""
    text = model.config.get_text_config()
    return "mrope_section" in str(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or "")
