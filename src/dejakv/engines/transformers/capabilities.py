"""What of DejaKV holds for a model, and what its work is.

Both are read from its configuration when it is loaded, and then tried.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from PIL import Image
from transformers.cache_utils import DynamicCache

from dejakv.decide.costs import MASKED, ReuseCosts
from dejakv.engines.base import Prepared
from dejakv.engines.transformers.kv import empty_cache, filled_cache, plain_cache, stacked_state
from dejakv.engines.transformers.model_settings import setting, text_config, text_setting
from dejakv.engines.transformers.prompts import image_text_ids, vision_base
from dejakv.engines.transformers.state_layout import StateLayout, planned_layout
from dejakv.engines.transformers.vision import VisionModel, feature_override
from dejakv.errors import ModelError
from dejakv.models.cache_name import CACHE_NAME
from dejakv.models.layout import layout_of
from dejakv.pictures import decode_picture
from dejakv.request import Media, Request

ATTENTION = ("sdpa", "eager")
_PLAIN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_TOKENS, _SPLIT = 24, 13
"""Of the check at loading: the length of the prompt, and the number of its tokens that are reused.
"""
UNCHECKED = "the layout of its state is read by the check at loading, which was left out"
"""Why nothing is reused of a model with a state layout that was loaded without the check."""
_LONGEST_WINDOW = 8192
"""Largest sliding window for which the check at loading fills a cache beyond it."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}


@dataclass(frozen=True)
class ModelCapabilities:
    """What of DejaKV works for a model.

    Attributes
    ----------
    reuse : bool
        State can be taken from the model, and it can start from state.
    images : bool
        It takes pictures.
    padding : bool
        The rows of a left-padded batch can be answered one by one.
    reasons : Mapping[str, str]
        Why a capability is missing, by its name.
    state_layout : StateLayout or None
        What the layers keep; None for keys and values of one shape in every layer.
    """

    reuse: bool = True
    images: bool = False
    padding: bool = True
    state_layout: StateLayout | None = None
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])

    def without(self, name: str, reason: str) -> "ModelCapabilities":
        """Return a copy without a capability, for a reason; with it, for an empty reason."""
        return replace(
            self,
            **{name: not reason},
            reasons={**self.reasons, name: reason} if reason else self.reasons,
        )


def without_adapter_wrapper(model: Any) -> Any:
    """Return the transformers model inside a PEFT wrapper; LoRA layers stay in place.

    Raises
    ------
    ModelError
        The adapter is one of prompt learning.
    """
    if not hasattr(model, "peft_config"):
        return model
    if (
        getattr(model, "active_peft_config", None) is not None
        and model.active_peft_config.is_prompt_learning
    ):
        raise ModelError(
            "prompt-learning adapters put virtual tokens before the prompt: merge the adapter or "
            "use LoRA"
        )
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_attention(model: Any) -> str:
    """Return the attention implementation; empty for one that cannot be read.

    Raises
    ------
    ModelError
        The implementation cannot continue from arbitrary state.
    """
    configs = (text_config(model), model.config)
    implementation = next(
        filter(None, (setting(config, "_attn_implementation") for config in configs)), ""
    )
    if implementation and implementation not in ATTENTION:
        raise ModelError(
            f"attention implementation {implementation!r} is not supported: load the model with "
            f"attn_implementation='sdpa' or 'eager'"
        )
    return str(implementation)


def from_config(model: Any) -> ModelCapabilities:
    """Return the capabilities that the configuration does not rule out.

    Raises
    ------
    ModelError
        The model is no decoder.
    """
    if setting(model.config, "is_encoder_decoder"):
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder: only decoder language models are "
            "supported"
        )

    reason, layout = "", None
    if set(text_setting(model, "layer_types") or ()) - _PLAIN_LAYERS:
        try:
            layout = planned_layout(model)
        except ModelError as error:
            reason = str(error)

    if reason:
        pass
    elif not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        reason = f"{type(model).__name__} does not use a dynamic KV cache"
    elif not check_attention(model):
        reason = "its attention implementation cannot be read from its configuration"
    return ModelCapabilities(state_layout=layout).without("reuse", reason)


@torch.inference_mode()
def self_check(model: Any, capabilities: ModelCapabilities) -> ModelCapabilities:
    """Compare the last logits of a short run with those of the same run resumed from its state.

    Returns
    -------
    ModelCapabilities
        Without reuse and with the reason, if the two disagree or the model fails.
    """
    if not capabilities.reuse:
        return capabilities
    ids = some_tokens(model, _TOKENS)

    planned = capabilities.state_layout
    try:
        cache = _empty_cache_of(model, planned)
        whole = _last_logits(model, ids, cache, 0)
        layout = (planned or StateLayout()).read_from(cache)
        state = stacked_state(cache, _TOKENS) if planned is None else None

        # Layers of one shape, as most models have: one tensor holds their keys and values.
        if state is not None:
            resumed_cache = filled_cache(
                [state], _SPLIT, ids.device, model.dtype, empty_cache(layout_of(model))
            )
            resumed = _last_logits(model, ids, resumed_cache, _SPLIT)
            reason = disagreement(whole, resumed, model.dtype, "logits from reused state")
        elif layout_of(model) is not None:
            reason = "its layers differ in shape, so no single tensor holds its KV"
        else:
            layout, reason = _checked_layout(model, ids, layout, cache, whole)
            if layout.token_by_token and model.dtype != torch.float32:
                reason = reason or (
                    "its recurrent layers continue by one token at a time, and low precision is "
                    "prefilled in units of many: load it in float32"
                )
            capabilities = replace(capabilities, state_layout=layout)
        reason = reason or _why_forgetful(model, layout)
    except ModelError as error:
        return capabilities.without("reuse", str(error))
    # A model's own code may raise anything.
    except Exception as error:
        return capabilities.without(
            "reuse", f"the load-time self-check failed: {type(error).__name__}: {error}"
        )
    return capabilities.without("reuse", reason).without("padding", _padding_reason(model, ids))


def _checked_layout(
    model: Any, ids: torch.Tensor, layout: StateLayout, cache: Any, whole: torch.Tensor
) -> tuple[StateLayout, str]:
    """Compare logits from state that is stored by its layout with those of a whole run.

    Returns
    -------
    layout : StateLayout
        The layout, with whether the model continues by one token at a time.
    reason : str
        Why the state is not reused; empty if it is.
    """
    rows = layout.pack(cache, _TOKENS)
    if rows is None:
        return layout, "its layers keep state for fewer tokens than they have seen"

    # Behind some tokens, and behind all but the last: models compute a single token in another way.
    for split in (_SPLIT, _TOKENS - 1):
        snapshot = None
        if layout.fixed:
            first = layout.empty_cache()
            _last_logits(model, ids[:, :split], first, 0)
            snapshot = layout.snapshot(first)

        resumed_cache = partial(layout.filled_cache, [rows], split, ids.device, snapshot)
        if split == _SPLIT and _ignores_state(model, ids, split, resumed_cache):
            layout = replace(layout, token_by_token=True)

        cache, resumed = resumed_cache(), whole
        stops = range(split + 1, _TOKENS + 1) if layout.token_by_token else (_TOKENS,)
        for start, stop in zip((split, *stops), stops, strict=False):
            resumed = _last_logits(model, ids[:, :stop], cache, start)
        if reason := disagreement(whole, resumed, model.dtype, "logits from reused state"):
            return layout, reason
    return layout, ""


def _ignores_state(
    model: Any, ids: torch.Tensor, split: int, resumed_cache: Callable[[], Any]
) -> bool:
    """Tell whether several tokens at once are computed as if there were no recurrent state.

    Such a model is right only where it continues by one token at a time, as in decoding.
    """
    cache, changed_cache = resumed_cache(), resumed_cache()
    recurrent_states = [
        tensor
        for layer in changed_cache.layers
        for tensor in getattr(layer, "recurrent_states", {}).values()
        if tensor is not None
    ]
    # The effect of the true state may be below rounding: that of such a one is not.
    for tensor in recurrent_states:
        tensor.mul_(-3).add_(5)
    return bool(recurrent_states) and torch.equal(
        _last_logits(model, ids, cache, split), _last_logits(model, ids, changed_cache, split)
    )


def _empty_cache_of(model: Any, layout: StateLayout | None) -> Any:
    """Return an empty cache for a prompt of a model."""
    return layout.empty_cache() if layout is not None else empty_cache(layout_of(model))


def _why_forgetful(model: Any, layout: StateLayout) -> str:
    """Tell why the model's own cache is not like one that keeps all tokens; empty if it is.

    The default cache of a model with a sliding window drops what left the window. That is the same
    only where the model's mask hides it, too, so a token behind a full window must see the same in
    both.
    """
    model_cache = DynamicCache(config=text_config(model))
    if layout_of(model) is None and len(model_cache.layers) < layout.layers:
        # A looping model adds a layer for each of its turns, at its first token.
        _last_logits(model, some_tokens(model, 1), model_cache, 0)
        model_cache.crop(-1)
    windows = [
        int(size)
        for layer in model_cache.layers
        if (size := getattr(layer, "sliding_window", None))
    ]
    if not windows or layout_of(model) is not None or min(windows) > _LONGEST_WINDOW:
        return ""

    # A few tokens more than the window, so that the first ones have left it.
    tokens, ids = min(windows) + 8, some_tokens(model, 1)
    position_ids = torch.tensor([[tokens]], device=ids.device)

    try:
        caches = [
            layout.random_cache(cache, tokens, ids.device)
            for cache in (model_cache, layout.empty_cache())
        ]
        expected, got = (
            model(
                input_ids=ids,
                position_ids=position_ids,
                use_cache=True,
                return_dict=True,
                **{CACHE_NAME: cache},
            ).logits[0, -1]
            for cache in caches
        )
    # No room for two full windows says nothing about the model.
    except torch.OutOfMemoryError:
        return ""
    subject = "answers beyond its window, which its own cache forgets and no mask hides,"
    return disagreement(expected.float(), got.float(), model.dtype, subject)


def _padding_reason(model: Any, ids: torch.Tensor) -> str:
    """Tell why the rows of a left-padded batch cannot be answered one by one; empty if they can.

    Some models count the padding in their positions, or let tokens see it: a row alone is then
    another prompt.
    """
    padded = torch.cat([ids[:, :4], ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :4] = 0
    # A fixed number of tokens: answers of two lengths could not be compared.
    options = {
        "max_new_tokens": 3,
        "min_new_tokens": 3,
        "do_sample": False,
        "num_beams": 1,
        "pad_token_id": 0,
    }
    options |= {"output_logits": True, "return_dict_in_generate": True}

    try:
        with _same_memory(vision_base(model)):
            expected, got = (
                torch.cat(
                    type(model)
                    .generate(model, input_ids=row, attention_mask=seen, **options)
                    .logits
                ).float()
                for row, seen in ((padded, mask), (ids, torch.ones_like(ids)))
            )
    except Exception as error:  # a model's own code may raise anything
        return f"a padded prompt failed: {type(error).__name__}: {error}"

    reason = disagreement(expected, got, model.dtype, "logits behind padding")
    return f"its answers depend on padding ({reason})" if reason else ""


@contextmanager
def _same_memory(base: Any) -> Iterator[None]:
    """Keep what a model remembers of its last prompt's positions.

    Its owner's own decoding may go on from there.
    """
    attributes = getattr(base, "__dict__", {})
    before = {name: attributes[name] for name in ("rope_deltas",) if name in attributes}
    try:
        yield
    finally:
        attributes.pop("rope_deltas", None)
        attributes.update(before)


def disagreement(
    expected: torch.Tensor, got: torch.Tensor, dtype: torch.dtype, subject: str
) -> str:
    """Return why logits do not agree; empty if they do.

    Rounding is allowed for: bfloat16 differs by some percent of the spread between equally valid
    ways to compute the same prompt.
    """
    difference = float((expected - got).abs().max())
    allowed = _TOLERANCE.get(dtype, 1e-3) * max(1.0, float(expected.std()))
    if difference <= allowed:
        return ""
    return (
        f"the load-time self-check failed: {subject} differ by {difference:.3g} (allowed "
        f"{allowed:.3g})"
    )


def _last_logits(
    model: Any, ids: torch.Tensor, cache: Any, start: int, position_ids: Any = None, **features: Any
) -> torch.Tensor:
    """Return the last logits of a prompt `[1, n]` whose first `start` tokens the cache holds."""
    if position_ids is None:
        position_ids = torch.arange(ids.shape[1], device=ids.device)[None]
    out = model(
        input_ids=ids[:, start:], position_ids=position_ids[..., start:],
        use_cache=True, return_dict=True, **{CACHE_NAME: cache}, **features,
    )  # fmt: skip
    return out.logits[0, -1].float()


def some_tokens(model: Any, count: int) -> torch.Tensor:
    """Return token ids `[1, count]` that stand for plain text in any model's vocabulary."""
    vocabulary = int(
        text_setting(model, "vocab_size") or model.get_input_embeddings().weight.shape[0]
    )
    special = {
        value
        for name in ("image_token_id", "video_token_id", "audio_token_id")
        if (value := setting(model.config, name)) is not None
    }

    plain = [token for token in range(min(vocabulary, 4 * count + 16)) if token not in special]
    # Different tokens: repetitions would hide wrong positions.
    chosen = [plain[(7 * index + 3) % len(plain)] for index in range(count)]
    return torch.tensor([chosen], device=model.get_input_embeddings().weight.device)


def count_costs(model: Any, attention: str, state_layout: StateLayout | None = None) -> ReuseCosts:
    """Count a model's work in floating-point operations, without embeddings.

    On a GPU, and with eager attention, pairs are not counted: a prefix always pays there. A
    layer-condensed model attends to the whole prompt.
    """
    embeddings = model.get_input_embeddings().weight
    layers, heads = (
        int(text_setting(model, name) or 0) for name in ("num_hidden_layers", "num_attention_heads")
    )
    layout = layout_of(model)
    with_kv = len(layout.kv_layers) if layout is not None else layers
    width = text_setting(model, "head_dim") or int(text_setting(model, "hidden_size") or 0) // max(
        1, heads
    )

    # The vision tower is no work of a prompt's rows.
    named = [(name, p.numel()) for name, p in model.named_parameters() if "vision" not in name]
    weights = sum(size for name, size in named if "layers." in name)
    # Else the layers have another name: all weights but the embeddings.
    weights = weights or max(1, sum(size for _, size in named) - embeddings.numel())

    token_bytes = (
        2
        * with_kv
        * (text_setting(model, "num_key_value_heads") or heads)
        * width
        * embeddings.element_size()
    )
    snapshot_bytes = 0
    if state_layout is not None:
        token_bytes, snapshot_bytes = state_layout.token_bytes, state_layout.snapshot_bytes
    masked = attention == "sdpa" and embeddings.device.type == "cpu"
    # Under a causal mask a whole prompt has half of all pairs.
    pair = 4 * layers * heads * width if masked else 0
    whole = 0.5 if masked and layout is None else 1.0
    return ReuseCosts(
        2 * weights, pair, whole=whole, masked=MASKED,
        token_bytes=token_bytes, snapshot_bytes=snapshot_bytes,
    )  # fmt: skip


def forward_of(model: Any, layout: StateLayout | None) -> Callable[[int], object]:
    """Return a function that computes so many rows of a model and waits for the device."""

    @torch.inference_mode()
    def forward(rows: int) -> object:
        return _last_logits(
            model, some_tokens(model, rows), _empty_cache_of(model, layout), 0
        ).cpu()

    return forward


@torch.inference_mode()
def check_pictures(
    model: Any, vision: VisionModel, capabilities: ModelCapabilities
) -> ModelCapabilities:
    """Compare a small picture's logits on the model's own path with those on the engine's.

    The engine's are computed in full and from reused state. Models that fail take no pictures here,
    and say why: attention in both directions between a picture's tokens, as in Gemma 3, cannot
    start inside a picture.
    """
    media = _some_picture()
    prompt = f"{vision.book.image_token} a"

    try:
        ids, spans = image_text_ids(vision.book, prompt, (media,))
        prepared = Prepared(Request("", prompt, prompt, (media,)), tuple(ids), spans)
        with _same_memory(vision.base):
            expected = _model_logits(model, vision, prompt, media)

        device, layout = model.get_input_embeddings().weight.device, capabilities.state_layout
        cache, state = layout.empty_cache() if layout is not None else plain_cache(), None
        # No snapshot is taken of a prompt with pictures: it is computed in full.
        resumes = capabilities.reuse and not (layout is not None and layout.fixed)
        # All rows, a start inside the picture, and the last row alone.
        for split in (0, spans[0].start + spans[0].length // 2, len(ids) - 1) if resumes else (0,):
            split_cache = cache
            if state is not None and layout is not None:
                split_cache = layout.filled_cache([state], split, device)
            elif state is not None:
                split_cache = filled_cache([state], split, device, model.dtype)
            got = _engine_logits(model, vision, prepared, split_cache, split)
            if reason := disagreement(
                expected, got, model.dtype, f"logits from the state of {split} tokens"
            ):
                break
            if state is None and resumes:
                pack = layout.pack if layout is not None else stacked_state
                state = pack(cache, len(ids))
            if state is None:
                break
    except Exception as error:  # a model's own code may raise anything
        reason = f"the load-time self-check with a picture failed: {type(error).__name__}: {error}"
    finally:
        # The check's own runs of the tower are no request's.
        vision.take_runs()
    return capabilities.without("images", reason)


def _model_logits(model: Any, vision: VisionModel, prompt: str, media: Media) -> torch.Tensor:
    """Return the logits that transformers itself computes for the picture."""
    device = model.get_input_embeddings().weight.device
    inputs = vision.book.processor(
        text=[prompt], images=[decode_picture(media)], return_tensors="pt"
    )
    moved = {
        name: value.to(device, model.dtype) if value.is_floating_point() else value.to(device)
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    }

    if hasattr(vision.base, "get_rope_index"):
        moved.setdefault(
            "mm_token_type_ids", (moved["input_ids"] == vision.book.image_token_id).int()
        )
    return model(**moved, use_cache=False, return_dict=True).logits[0, -1].float()


def _engine_logits(
    model: Any, vision: VisionModel, prepared: Prepared, cache: Any, start: int
) -> torch.Tensor:
    """Return the logits that the engine computes for the picture."""
    ids = torch.tensor([prepared.token_ids], device=model.get_input_embeddings().weight.device)
    # Nothing of the check may come into the registry.
    registry, vision.registry = vision.registry, None
    try:
        rows, _ = vision.rows(prepared, start)
    finally:
        vision.registry = registry
    with feature_override(vision.base, rows) as features:
        return _last_logits(model, ids, cache, start, vision.positions(ids, prepared), **features)


def _some_picture() -> Media:
    pixels = (
        torch.arange(40 * 64 * 3, dtype=torch.int32)
        .mul(7)
        .remainder(251)
        .to(torch.uint8)
        .reshape(40, 64, 3)
    )
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return Media(file.getvalue(), name="self-check")
