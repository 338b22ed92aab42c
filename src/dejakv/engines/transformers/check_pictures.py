"""Tries out, when a model is loaded, whether pictures may come from the registry and prompts start inside or after one."""

import io
from typing import Any

import torch
from PIL import Image

from dejakv.engines.base import Prepared
from dejakv.engines.transformers.capabilities import Capabilities, disagreement
from dejakv.engines.transformers.features import given_features
from dejakv.engines.transformers.kv import captured, filled_cache, plain_cache
from dejakv.engines.transformers.prompts import image_text_ids
from dejakv.engines.transformers.vision import Vision
from dejakv.errors import DejaKVError
from dejakv.pictures import decoded
from dejakv.request import Media, Request

_FAILURES = (DejaKVError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError)


@torch.inference_mode()
def check_pictures(model: Any, vision: Vision, found: Capabilities) -> Capabilities:
    """A small picture through the model's own path must give the logits of ours, whole and from reused state.

    Models that fail take no pictures here, and say why (for instance, attention in both directions between a picture's
    tokens, as in Gemma 3, cannot start inside a picture).
    """
    media = _some_picture()
    prompt = f"{vision.book.image_token} a"
    try:
        ids, spans = image_text_ids(vision.book, prompt, (media,))
        prepared = Prepared(Request("", prompt, prompt, (media,)), tuple(ids), spans)
        expected = _own_path(model, vision, prompt, media)
        cache = plain_cache()
        reason = disagreement(
            expected, _our_path(model, vision, prepared, cache, 0), model.dtype, "logits with given features"
        )
        if not reason and found.reuse:
            state = captured(cache, len(ids))
            for split in (spans[0].start + spans[0].length // 2, len(ids) - 1):
                if state is None or reason:
                    break
                resumed = filled_cache(state, split, model.get_input_embeddings().weight.device, model.dtype)
                got = _our_path(model, vision, prepared, resumed, split)
                reason = disagreement(expected, got, model.dtype, f"logits from the state of {split} tokens")
    except _FAILURES as error:
        reason = f"the load-time self-check with a picture failed: {type(error).__name__}: {error}"
    finally:
        vision.take_runs()
        getattr(vision.base, "__dict__", {}).pop("rope_deltas", None)
        if hasattr(vision.base, "get_rope_index"):
            vision.base.rope_deltas = None
    return found.without("images", reason) if reason else found.including("images")


def _own_path(model: Any, vision: Vision, prompt: str, media: Media) -> torch.Tensor:
    """What transformers itself makes of the picture."""
    device = model.get_input_embeddings().weight.device
    given = vision.book.processor(text=[prompt], images=[decoded(media)], return_tensors="pt")
    moved = {
        name: value.to(device, model.dtype) if value.is_floating_point() else value.to(device)
        for name, value in given.items()
        if isinstance(value, torch.Tensor)
    }
    if hasattr(vision.base, "get_rope_index"):
        moved.setdefault("mm_token_type_ids", (moved["input_ids"] == vision.book.image_token_id).int())
    return model(**moved, use_cache=False, return_dict=True).logits[0, -1].float()


def _our_path(model: Any, vision: Vision, prepared: Prepared, cache: Any, start: int) -> torch.Tensor:
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([prepared.token_ids], device=device)
    place = vision.positions(ids, prepared)
    if place is None:
        place = torch.arange(ids.shape[1], device=device)[None]
    registry, vision.registry = vision.registry, None
    try:
        rows, _ = vision.rows(prepared, start)
    finally:
        vision.registry = registry
    with given_features(vision.base, rows) as features:
        out = model(
            input_ids=ids[:, start:],
            past_key_values=cache,
            position_ids=place[..., start:],
            use_cache=True,
            return_dict=True,
            **features,
        )
    return out.logits[0, -1].float()


def _some_picture() -> Media:
    pixels = torch.arange(40 * 64 * 3, dtype=torch.int32).mul(7).remainder(251).to(torch.uint8).reshape(40, 64, 3)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return Media(file.getvalue(), name="self-check")
