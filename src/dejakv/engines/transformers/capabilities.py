"""What of DejaKV holds for a model, and what its work is, found out when it is loaded: from its configuration, then by trying."""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image
from transformers.cache_utils import DynamicCache

from dejakv.decide.costs import MASKED, ReuseCosts
from dejakv.engines.base import Prepared
from dejakv.engines.transformers.kv import captured, empty_cache, filled_cache, plain_cache
from dejakv.engines.transformers.model_settings import setting, text_config, text_setting
from dejakv.engines.transformers.prompts import image_text_ids, vision_base
from dejakv.engines.transformers.vision import VisionModel, given_features
from dejakv.errors import ModelError
from dejakv.models.lckv.layout import layout_of
from dejakv.pictures import decoded
from dejakv.request import Media, Request
from dejakv.store.base import Tensor

ATTENTION = ("sdpa", "eager")
_PLAIN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_TOKENS, _SPLIT = 24, 13
"""Of the check at loading: the length of the prompt, and the number of its tokens that are reused."""
_LONGEST_WINDOW = 8192
"""Largest sliding window for which the check at loading fills a cache beyond it."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}


@dataclass(frozen=True)
class ModelCapabilities:
    """reuse: hand state out and start from it; images: take pictures; padding: answer the rows of a left-padded batch one by
    one. `reasons` says why not."""

    reuse: bool = True
    images: bool = False
    padding: bool = True
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])

    def without(self, name: str, reason: str) -> "ModelCapabilities":
        """The same without capability `name`, and with the reason; itself for an empty reason."""
        return replace(self, **{name: not reason}, reasons={**self.reasons, name: reason} if reason else self.reasons)


def without_adapter_wrapper(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper: LoRA layers stay in place. Raises: ModelError for prompt learning."""
    if not hasattr(model, "peft_config"):
        return model
    if getattr(model, "active_peft_config", None) is not None and model.active_peft_config.is_prompt_learning:
        raise ModelError("prompt-learning adapters put virtual tokens before the prompt: merge the adapter or use LoRA")
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_attention(model: Any) -> str:
    """Return the attention implementation; empty for one that cannot be read.

    Raises: ModelError if it cannot continue from arbitrary state.
    """
    configs = (text_config(model), model.config)
    implementation = next(filter(None, (setting(config, "_attn_implementation") for config in configs)), "")
    if implementation and implementation not in ATTENTION:
        raise ModelError(
            f"attention implementation {implementation!r} is not supported: load the model with "
            f"attn_implementation='sdpa' or 'eager'"
        )
    return str(implementation)


def from_config(model: Any) -> ModelCapabilities:
    """The capabilities that the configuration does not rule out. Raises: ModelError for a model that is no decoder."""
    if setting(model.config, "is_encoder_decoder"):
        raise ModelError(f"{type(model).__name__} is an encoder-decoder: only decoder language models are supported")

    kinds = set(text_setting(model, "layer_types") or ()) - _PLAIN_LAYERS
    reason = ""
    if kinds:
        reason = f"layers of type {', '.join(sorted(kinds))} keep a state that is no per-token KV"
    elif not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        reason = f"{type(model).__name__} does not use a dynamic KV cache"
    elif not check_attention(model):
        reason = "its attention implementation cannot be read from its configuration"
    return ModelCapabilities().without("reuse", reason)


@torch.inference_mode()
def self_check(model: Any, capabilities: ModelCapabilities) -> ModelCapabilities:
    """Compare the last logits of a short run with those of the same run resumed from captured state.

    Returns the capabilities, without reuse and with the reason if the two disagree or the model fails.
    """
    if not capabilities.reuse:
        return capabilities
    ids = some_tokens(model, _TOKENS)
    try:
        cache = empty_cache(layout_of(model))
        whole = _last_logits(model, ids, cache, 0)
        state = captured(cache, _TOKENS)
        if state is None:
            return capabilities.without("reuse", "its layers differ in shape, so no single tensor holds its KV")
        resumed_cache = filled_cache([state], _SPLIT, ids.device, model.dtype, empty_cache(layout_of(model)))
        resumed = _last_logits(model, ids, resumed_cache, _SPLIT)
        reason = disagreement(whole, resumed, model.dtype, "logits from reused state")
        reason = reason or _forgetting(model, state)
    except Exception as error:  # a model's own code may raise anything
        return capabilities.without("reuse", f"the load-time self-check failed: {type(error).__name__}: {error}")
    return capabilities.without("reuse", reason).without("padding", _padding(model, ids))


def _forgetting(model: Any, state: Tensor) -> str:
    """Tell why the model's own cache is not like one that keeps all tokens; empty if it is.

    The default cache of a model with a sliding window drops what left the window. That is the same only where the model's mask
    hides it, too, so a token behind a full window must see the same in both.
    """
    model_cache = DynamicCache(config=text_config(model))
    windows = [int(size) for layer in model_cache.layers if (size := getattr(layer, "sliding_window", None))]
    if not windows or layout_of(model) is not None or min(windows) > _LONGEST_WINDOW:
        return ""
    # A few tokens more than the window, so that the first ones have left it.
    tokens, ids = min(windows) + 8, some_tokens(model, 1)
    position_ids = torch.tensor([[tokens]], device=ids.device)
    _, layers, heads, _, dim = state.data.shape
    generator, whole = torch.Generator().manual_seed(0), plain_cache()

    try:
        for layer in range(layers):
            keys, values = torch.randn(2, 1, heads, tokens, dim, generator=generator).to(ids.device, model.dtype)
            model_cache.update(keys, values, layer)
            whole.update(keys, values, layer)
        expected, got = (
            model(
                input_ids=ids, past_key_values=cache, position_ids=position_ids, use_cache=True, return_dict=True
            ).logits[0, -1]
            for cache in (model_cache, whole)
        )
    except torch.OutOfMemoryError:  # no room for two full windows says nothing about the model
        return ""
    subject = "answers beyond its window, which its own cache forgets and no mask hides,"
    return disagreement(expected.float(), got.float(), model.dtype, subject)


def _padding(model: Any, ids: torch.Tensor) -> str:
    """Tell why the rows of a left-padded batch cannot be answered one by one; empty if they can.

    Some models count the padding in their positions, or let tokens see it: a row alone is then another prompt.
    """
    padded = torch.cat([ids[:, :4], ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :4] = 0
    # A fixed number of tokens: answers of two lengths could not be compared.
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}

    try:
        with _same_memory(vision_base(model)):
            expected, got = (
                torch.cat(type(model).generate(model, input_ids=row, attention_mask=seen, **options).logits).float()
                for row, seen in ((padded, mask), (ids, torch.ones_like(ids)))
            )
    except Exception as error:  # a model's own code may raise anything
        return f"a padded prompt failed: {type(error).__name__}: {error}"

    reason = disagreement(expected, got, model.dtype, "logits behind padding")
    return f"its answers depend on padding ({reason})" if reason else ""


@contextmanager
def _same_memory(base: Any) -> Iterator[None]:
    """Leave what a model remembers of its last prompt's positions as it was: its owner's own decoding may go on from there."""
    attributes = getattr(base, "__dict__", {})
    before = {name: attributes[name] for name in ("rope_deltas",) if name in attributes}
    try:
        yield
    finally:
        attributes.pop("rope_deltas", None)
        attributes.update(before)


def disagreement(expected: torch.Tensor, got: torch.Tensor, dtype: torch.dtype, subject: str) -> str:
    """Why logits do not agree, empty if they do. Rounding is allowed for: bfloat16 differs by some percent of the
    spread between equally valid ways to compute the same prompt."""
    difference = float((expected - got).abs().max())
    allowed = _TOLERANCE.get(dtype, 1e-3) * max(1.0, float(expected.std()))
    if difference <= allowed:
        return ""
    return f"the load-time self-check failed: {subject} differ by {difference:.3g} (allowed {allowed:.3g})"


def _last_logits(
    model: Any, ids: torch.Tensor, cache: Any, start: int, position_ids: Any = None, **features: Any
) -> torch.Tensor:
    """Of a prompt `[1, n]` whose first `start` tokens the cache holds."""
    if position_ids is None:
        position_ids = torch.arange(ids.shape[1], device=ids.device)[None]
    out = model(
        input_ids=ids[:, start:], past_key_values=cache, position_ids=position_ids[..., start:], use_cache=True, return_dict=True,
        **features,
    )  # fmt: skip
    return out.logits[0, -1].float()


def some_tokens(model: Any, count: int) -> torch.Tensor:
    """Token ids `[1, count]` that stand for plain text in whatever vocabulary the model has."""
    vocabulary = int(text_setting(model, "vocab_size") or model.get_input_embeddings().weight.shape[0])
    special = {
        value
        for name in ("image_token_id", "video_token_id", "audio_token_id")
        if (value := setting(model.config, name)) is not None
    }

    plain = [token for token in range(min(vocabulary, 4 * count + 16)) if token not in special]
    # Different tokens: repetitions would hide wrong positions.
    chosen = [plain[(7 * index + 3) % len(plain)] for index in range(count)]
    return torch.tensor([chosen], device=model.get_input_embeddings().weight.device)


def shape_of(model: Any, attention: str) -> ReuseCosts:
    """A model's work in floating-point operations, without embeddings. On a GPU, and with eager attention, pairs are not counted: a prefix always pays there. A
    layer-condensed model attends to the whole prompt."""
    embeddings = model.get_input_embeddings().weight
    layers, heads = (int(text_setting(model, name) or 0) for name in ("num_hidden_layers", "num_attention_heads"))
    layout = layout_of(model)
    with_kv = len(layout.kv_layers) if layout is not None else layers
    width = text_setting(model, "head_dim") or int(text_setting(model, "hidden_size") or 0) // max(1, heads)
    # The vision tower is no work of a prompt's rows.
    named = [(name, p.numel()) for name, p in model.named_parameters() if "vision" not in name]
    weights = sum(size for name, size in named if "layers." in name)
    weights = weights or max(1, sum(size for _, size in named) - embeddings.numel())  # layers by another name

    token_bytes = (
        2 * with_kv * (text_setting(model, "num_key_value_heads") or heads) * width * embeddings.element_size()
    )
    masked = attention == "sdpa" and embeddings.device.type == "cpu"
    # Under a causal mask a whole prompt has half of all pairs.
    pair, whole = 4 * layers * heads * width if masked else 0, 0.5 if masked and layout is None else 1.0
    return ReuseCosts(2 * weights, pair, whole=whole, masked=MASKED, token_bytes=token_bytes)


def forward_of(model: Any) -> Callable[[int], object]:
    """Computes so many rows of a model, as an engine does, and waits for the device."""

    @torch.inference_mode()
    def forward(rows: int) -> object:
        return _last_logits(model, some_tokens(model, rows), empty_cache(layout_of(model)), 0).cpu()

    return forward


@torch.inference_mode()
def check_pictures(model: Any, vision: VisionModel, capabilities: ModelCapabilities) -> ModelCapabilities:
    """A small picture through the model's own path must give the logits of ours, whole and from reused state.

    Models that fail take no pictures here, and say why (for instance, attention in both directions between a picture's
    tokens, as in Gemma 3, cannot start inside a picture).
    """
    media = _some_picture()
    prompt = f"{vision.book.image_token} a"

    try:
        ids, spans = image_text_ids(vision.book, prompt, (media,))
        prepared = Prepared(Request("", prompt, prompt, (media,)), tuple(ids), spans)
        with _same_memory(vision.base):
            expected = _own_path(model, vision, prompt, media)
        device = model.get_input_embeddings().weight.device
        cache, state = plain_cache(), None
        # All rows, a start inside the picture, and the last row alone.
        for split in (0, spans[0].start + spans[0].length // 2, len(ids) - 1) if capabilities.reuse else (0,):
            split_cache = filled_cache([state], split, device, model.dtype) if state is not None else cache
            got = _our_path(model, vision, prepared, split_cache, split)
            if reason := disagreement(expected, got, model.dtype, f"logits from the state of {split} tokens"):
                break
            state = captured(cache, len(ids)) if state is None else state
            if state is None:
                break
    except Exception as error:  # a model's own code may raise anything
        reason = f"the load-time self-check with a picture failed: {type(error).__name__}: {error}"
    finally:
        # The check's own runs of the tower are no request's.
        vision.take_runs()
    return capabilities.without("images", reason)


def _own_path(model: Any, vision: VisionModel, prompt: str, media: Media) -> torch.Tensor:
    """What transformers itself makes of the picture."""
    device = model.get_input_embeddings().weight.device
    inputs = vision.book.processor(text=[prompt], images=[decoded(media)], return_tensors="pt")
    moved = {
        name: value.to(device, model.dtype) if value.is_floating_point() else value.to(device)
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    }

    if hasattr(vision.base, "get_rope_index"):
        moved.setdefault("mm_token_type_ids", (moved["input_ids"] == vision.book.image_token_id).int())
    return model(**moved, use_cache=False, return_dict=True).logits[0, -1].float()


def _our_path(model: Any, vision: VisionModel, prepared: Prepared, cache: Any, start: int) -> torch.Tensor:
    ids = torch.tensor([prepared.token_ids], device=model.get_input_embeddings().weight.device)
    # Nothing of the check may come into the registry.
    registry, vision.registry = vision.registry, None
    try:
        rows, _ = vision.rows(prepared, start)
    finally:
        vision.registry = registry
    with given_features(vision.base, rows) as features:
        return _last_logits(model, ids, cache, start, vision.positions(ids, prepared), **features)


def _some_picture() -> Media:
    pixels = torch.arange(40 * 64 * 3, dtype=torch.int32).mul(7).remainder(251).to(torch.uint8).reshape(40, 64, 3)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return Media(file.getvalue(), name="self-check")
