"""Tiny random models of every architecture the presets name, with tokenizers and processors made here."""

import io
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dejakv.engines.base import Completion, Prepared
from dejakv.engines.transformers import TransformersEngine
from dejakv.models.loading import pictures_only
from dejakv.request import Media, Request, Sampling
from dejakv.store.base import ChunkMeta, StoredState, Tensor

WORDS = "what colour is the cube beside the red cone how many balls are there left of it yes no one two three green"
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
NAMED = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>", "start_image_token": "<img>", "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
}  # fmt: skip
SPECIAL = ["<s>", "</s>", "<image>", *NAMED.values()]


def tokenizer() -> Any:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False)
    raw.train_from_iterator([WORDS], trainer)
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=512, extra_special_tokens=NAMED, **ends)


def vocabulary() -> int:
    return len(tokenizer())


def text_configs() -> dict[str, Callable[[], Any]]:
    v = vocabulary()
    return {
        "llama": lambda: hf.LlamaConfig(vocab_size=v, **SMALL),
        "mistral": lambda: hf.MistralConfig(vocab_size=v, **SMALL, sliding_window=None),
        "mistral_window": lambda: hf.MistralConfig(vocab_size=v, **SMALL, sliding_window=6),
        "opt": lambda: hf.OPTConfig(
            vocab_size=v, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
            max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        ),
        "qwen2": lambda: hf.Qwen2Config(vocab_size=v, **SMALL),
        "qwen3": lambda: hf.Qwen3Config(vocab_size=v, **SMALL, head_dim=8),
        "gemma2": lambda: hf.Gemma2Config(vocab_size=v, **SMALL, head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
        "phi3": lambda: hf.Phi3Config(vocab_size=v, **SMALL),
    }  # fmt: skip


def _qwen_processor(kind: str, tok: Any) -> Any:
    images = hf.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=64 * 64
    )
    processor_of = {"qwen2_5_vl": hf.Qwen2_5_VLProcessor, "qwen3_vl": hf.Qwen3VLProcessor}[kind]
    return pictures_only(processor_of, image_processor=images, tokenizer=tok)


def image_models() -> dict[str, Callable[[], tuple[Any, Any]]]:
    tok = tokenizer()
    ids = {token: tok.convert_tokens_to_ids(token) for token in SPECIAL}
    v = len(tok)
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}

    def llava() -> tuple[Any, Any]:
        config = hf.LlavaConfig(
            vision_config={**TOWER, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 4, "projection_dim": 16},
            text_config={"model_type": "llama", "vocab_size": v, **SMALL},
            image_token_index=ids["<|image_pad|>"], vision_feature_layer=-1,
        )  # fmt: skip
        images = hf.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
        cut = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return hf.LlavaForConditionalGeneration(config), hf.LlavaProcessor(image_processor=images, tokenizer=tok, **cut)

    def qwen2_5_vl() -> tuple[Any, Any]:
        config = hf.Qwen2_5_VLConfig(
            vision_config={"hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1]},
            text_config={"vocab_size": v, **SMALL, "rope_parameters": rope},
            image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        )  # fmt: skip
        return hf.Qwen2_5_VLForConditionalGeneration(config), _qwen_processor("qwen2_5_vl", tok)

    def qwen3_vl() -> tuple[Any, Any]:
        config = hf.Qwen3VLConfig(
            vision_config={"hidden_size": 16, "intermediate_size": 24, "depth": 3, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
            text_config={"vocab_size": v, **SMALL, "head_dim": 8, "rope_parameters": {**rope, "mrope_interleaved": True}},
            image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        )  # fmt: skip
        return hf.Qwen3VLForConditionalGeneration(config), _qwen_processor("qwen3_vl", tok)

    def internvl() -> tuple[Any, Any]:
        config = hf.InternVLConfig(
            vision_config={**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
            text_config={"model_type": "qwen2", "vocab_size": v, **SMALL},
            image_token_id=ids["<IMG_CONTEXT>"], image_seq_length=4, downsample_ratio=0.5,
        )  # fmt: skip
        images = hf.GotOcr2ImageProcessorPil(
            size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=2
        )
        processor = pictures_only(hf.InternVLProcessor, image_processor=images, tokenizer=tok, image_seq_length=4)
        return hf.InternVLForConditionalGeneration(config), processor

    return {"llava": llava, "qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl, "internvl": internvl}


TEXT = tuple(text_configs())
IMAGES = tuple(image_models())


def text_model(name: str, dtype: torch.dtype = torch.float32, attn: str = "sdpa") -> Any:
    torch.manual_seed(5)
    model = hf.AutoModelForCausalLM.from_config(text_configs()[name](), attn_implementation=attn)
    return _spread(model).to(dtype).eval()


def image_model(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    torch.manual_seed(5)
    model, processor = image_models()[name]()
    return _spread(model).to(dtype).eval(), processor


def _spread(model: Any) -> Any:
    """Larger weights than at initialization, so that answers depend on every token."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() > 1 and "embed" not in name:
                tensor.mul_(6.0)
    return model


def picture(seed: int, width: int = 24, height: int = 16) -> Media:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 255, (height, width, 3), generator=generator, dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return Media(file.getvalue(), name=f"{seed}.png")


PLACEHOLDER = {
    "llava": "<|image_pad|>",
    "internvl": "<IMG_CONTEXT>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}


def request(prompt: str, media: tuple[Media, ...] = (), **sampling: Any) -> Request:
    return Request("r", prompt, prompt, media, sampling=Sampling(**{"max_new_tokens": 6, **sampling}))


WAYS = (
    Sampling(max_new_tokens=6),
    Sampling(max_new_tokens=6, num_beams=4),
    Sampling(max_new_tokens=6, temperature=0.9, top_p=0.9, seed=7),
)


@cache
def text_engine(name: str, dtype: torch.dtype = torch.float32, attn: str = "sdpa") -> TransformersEngine:
    return TransformersEngine(text_model(name, dtype, attn), tokenizer())


def image_engine(name: str, registry: Any = None) -> TransformersEngine:
    model, processor = _shared_image_model(name)
    return TransformersEngine(model, processor.tokenizer, processor, encoder_cache=registry)


@cache
def _shared_image_model(name: str) -> tuple[Any, Any]:
    return image_model(name)


def chunk_of(
    engine: TransformersEngine, prepared: Prepared, run: Completion, tensor: Tensor | None = None
) -> StoredState:
    state = tensor or run.capture()
    assert state is not None
    meta = ChunkMeta(
        "id", "default", engine.epoch, prepared.token_ids, prepared.request.prompt, "", spans=prepared.spans
    )
    return StoredState(meta, state)
