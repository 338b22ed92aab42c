"""Small random models of every architecture and type, tokenizers for them, and runs of an engine on state that no pipeline chose."""

import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dejakv.blend.blend import BlendReport
from dejakv.decide.plan import PrefixPlan
from dejakv.engines.base import Completion, Prepared, Refusal
from dejakv.engines.transformers import TransformersEngine
from dejakv.engines.transformers.generate_call import GenerateCall
from dejakv.models.loading import pictures_only
from dejakv.request import Media, Request, Sampling
from dejakv.store.base import RawTensor, StateInfo, StoredState
from dejakv.store.open import open_store

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


def text_model(name: str, dtype: torch.dtype = torch.float32, attn: str | None = None) -> Any:
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
def text_engine(name: str, dtype: torch.dtype = torch.float32, attn: str | None = None) -> TransformersEngine:
    return TransformersEngine(text_model(name, dtype, attn), tokenizer())


def image_engine(name: str, registry: Any = None) -> TransformersEngine:
    model, processor = _shared_image_model(name)
    return TransformersEngine(model, processor.tokenizer, processor, encoder_cache=registry)


@cache
def _shared_image_model(name: str) -> tuple[Any, Any]:
    return image_model(name)


def state_of(
    engine: TransformersEngine, prepared: Prepared, run: Completion, tensor: RawTensor | None = None
) -> StoredState:
    state = tensor or run.capture()
    assert state is not None
    meta = StateInfo(
        "id", "default", engine.epoch, prepared.token_ids, prepared.request.prompt, "", spans=prepared.spans
    )
    return StoredState(meta, state)


ARCHITECTURE_SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD = {"head_dim": 8}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 512, "factor": 1.0,
}  # fmt: skip

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama+yarn": {"rope_parameters": YARN},
    "llama+dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 32},
    "mistral": {"sliding_window": None},
    "mistral+window": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": HEAD,
    "qwen3_moe": {**HEAD, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "phi3+longrope": {"rope_parameters": LONG, "original_max_position_embeddings": 512},
    "gemma": HEAD,
    "gemma2": {**HEAD, **WINDOWS, "query_pre_attn_scalar": 8},
    "gemma3_text": {**HEAD, **WINDOWS},
    "cohere": {},
    "cohere2": WINDOWS,
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "olmo2": {},
    "olmo3": WINDOWS,
    "glm": HEAD,
    "stablelm": {"partial_rotary_factor": 0.5},
    "mixtral": EXPERTS,
    "gpt_oss": {**HEAD, **EXPERTS, **WINDOWS, "rope_parameters": YARN, "attn": "eager"},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "llama+eager": {"attn": "eager"},
}


def architecture_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with seeded random weights, in evaluation mode."""
    settings = {**ARCHITECTURE_SIZES, **ARCHITECTURES.get(name, {}), **changes}
    attention = settings.pop("attn", None)
    torch.manual_seed(5)
    config = CONFIG_MAPPING[name.split("+")[0]](**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval()
    with torch.no_grad():  # weights of .02 make states so alike that a wrong one would hardly show
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


CAUSAL = tuple(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGE_TEXT = tuple(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)

TYPE_VOCABULARY, LARGEST = 128, 40_000_000
"""Token ids; and the parameters beyond which a model is not small."""
_SIZE_NAMES: dict[int, str] = {
    1: "first_k_dense_replace mamba_n_groups mamba_ngroups n_group n_groups n_shared_experts "
    "num_shared_experts topk_group",
    2: "expand linear_num_key_heads mamba_expand moe_k moe_topk multi_query_group_num n_head_kv "
    "num_experts_per_tok num_experts_per_token num_key_value_heads num_kv_heads num_query_groups "
    "num_selected_experts swa_num_key_value_heads top_k_experts decoder_layers depth "
    "encoder_layers n_layer n_layers num_decoder_layers num_encoder_layers num_hidden_layers "
    "num_layers num_local_layers",
    4: "attention_heads decoder_attention_heads encoder_attention_heads index_n_heads index_topk "
    "linear_num_value_heads mamba_n_heads mamba_num_heads moe_num_experts n_experts n_head n_heads "
    "n_mamba_heads n_routed_experts num_attention_head num_attention_heads num_experts num_heads "
    "num_local_experts num_routed_experts swa_num_attention_heads",
    8: "hidden_size_per_layer_input patch_size qk_rope_head_dim rotary_dim",
    16: "attention_head_dim d_head d_kv dim_head global_head_dim head_dim index_head_dim "
    "key_value_proj_dim kv_channels kv_lora_rank linear_key_head_dim linear_value_head_dim "
    "mamba_d_head mamba_d_state mamba_head_dim mamba_headdim q_lora_rank qk_nope_head_dim "
    "ssm_state_size state_size swa_head_dim swa_v_head_dim v_head_dim",
    32: "expert_ffn_hidden_size image_size moe_intermediate_size "
    "moe_shared_expert_intermediate_size shared_expert_intermediate_size "
    "shared_intermediate_size",
    64: "attention_hidden_size cross_attention_hidden_size d_inner_model d_model decoder_hidden_size "
    "dim emb_dim embed_dim embedding_size hidden_dim hidden_size lru_width mamba_d_ssm n_embd "
    "out_hidden_size proj_dim proj_hidden_size projection_dim text_hidden_size width "
    "word_embed_proj_dim",
    96: "d_ff decoder_ffn_dim dense_intermediate_size encoder_ffn_dim feed_forward_size ffn_dim "
    "ffn_hidden_size intermediate_size intermediate_size_mlp n_inner",
    TYPE_VOCABULARY: "embedding_size_vocab hash_vocab_size padded_vocab_size vocab_size "
    "vocab_size_per_layer_input",
    256: "max_position_embeddings max_seq_len max_sequence_length max_source_positions "
    "max_target_positions model_max_length n_ctx n_positions seq_length",
}  # fmt: skip
_SIZES = {name: size for size, names in _SIZE_NAMES.items() for name in names.split()}
_LAYER_LISTS = frozenset(
    "attention_layers attention_types head_dims hybrid_layer_ids indexer_types layer_types "
    "layers_block_type mlp_layer mlp_layer_types moe_layers no_rope_layers per_layer_config".split()
)
"""Lists with an entry for each layer, which a configuration makes again for fewer layers."""
_PARTS = ("vq_config", "audio_encoder", "decoder", "encoder", "rope_parameters", "text_encoder")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1}
_ENDS = frozenset(
    "cls_token_id decoder_start_token_id eos_token_id forced_eos_token_id mask_token_id "
    "sep_token_id unk_token_id".split()
)

_SHARED = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
}
_LINEAR = {"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]}
_LAYER_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
_GEMMA4 = {**_LAYER_WINDOWS, "num_kv_shared_layers": 0}
_ASSISTANT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    **_LAYER_WINDOWS,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_COMPASS = {"rope_parameters": {"full_attention": None, "sliding_attention": _ROTARY}}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
_GEMMA3N = {
    **_LAYER_WINDOWS,
    "intermediate_size": 96,
    "num_kv_shared_layers": 0,
    "laurel_rank": 8,
    "activation_sparsity_pattern": None,
    "altup_num_inputs": 2,
}
NEEDS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "dots3_note": {"vision_config": {"mlp_layer_types": ["dense"] * 2, "adapter_in_dim": 64, "adapter_out_dim": 64}, "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "bailing_hybrid": {**_LINEAR, "num_expert_group": 1, "linear_head_dim": 16, "linear_num_heads": 4},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1, "layer_types": None},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 1},
    "gemma4_assistant": {"text_config": {**_ASSISTANT, "model_type": "gemma4_text"}},
    "gemma4_unified_assistant": {"text_config": {**_ASSISTANT, "model_type": "gemma4_unified_text"}},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "kimi_linear": {**_LINEAR, "linear_head_dim": 16, "linear_num_heads": 4},
    "xlstm": {"embedding_dim": 64, "qk_dim_factor": 1.0, "num_blocks": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_SHARED, "n_mamba_heads": 2},
    "zamba2": {**_SHARED, "n_mamba_heads": 8, "mamba_headdim": 16},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "emu3": {"vocabulary_map": {"<image>": 100}, "vq_config": {"codebook_size": 64, "base_channels": 32, "channel_multiplier": [1, 1], "attn_resolutions": []}},
    "qwen4_exp_text": {**_LINEAR, **_INDEXER}, "qwen4_exp": {"text_config": {**_LINEAR, **_INDEXER}},
    "chameleon": {"vocabulary_map": {"<image>": 100}},
    "glm5_next": {"text_config": {**_LINEAR, "index_topk": 16}},
    "granite4_vision": {"text_config": {"model_type": "granite"}, "deepstack_layer_map": [], "downsample_rate": "1/2"},
    "hunyuan_vl": {"text_config": {"head_dim": 16, "rope_parameters": {"mrope_section": [2, 3, 3]}}},
    "minicpmv4_6": {"text_config": _LINEAR},
    "minicpmv4_7": {"text_config": _LINEAR},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [32, 16], "rope_parameters": {"mrope_section": [3, 3, 2]}}},
    "minimax_m3_vl": {"projector_hidden_size": 64, "merged_hidden_size": 256},
    "janus": {"vq_config": {"num_embeddings": 64, "latent_channels": 32, "channel_multiplier": [1, 1], "image_token_embed_dim": 64, "base_channels": 32}},
    "florence2": {"vision_config": {"embed_dim": [16, 16, 32, 64], "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "num_groups": [2, 2, 2, 2]}},
    "step3p7": {"text_config": {"sliding_window": 16}},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 101},
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hy_v4_vl": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 2]}}},
    "inkling2": {"text_config": {"unpadded_vocab_size": 128}},
    "inkling2_loop": {"text_config": {"unpadded_vocab_size": 128}},
    "inkling2_loop_text": {"unpadded_vocab_size": 128},
    "inkling2_text": {"unpadded_vocab_size": 128},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "laguna": {"num_attention_heads_per_layer": None},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {**_LAYER_WINDOWS, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen3_5": {"text_config": _LINEAR},
    "qwen3_5_moe": {"text_config": _LINEAR},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "num_buckets": 4},
    "roc_bert": {"enable_pronunciation": False, "enable_shape": False},
}  # fmt: skip
for _kind in "glm4v glm46v glm_ocr glmga qwen2_5_vl qwen2_vl paddleocr_vl qwen2_5_omni_thinker".split():
    NEEDS[_kind] = {"text_config": {"rope_parameters": {"mrope_section": [2, 3, 3]}}}
NEEDS["qwen2_5_omni_thinker"]["vision_start_token_id"] = 101
NEEDS["glm4v_moe"] = {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 2]}}}
"""Of a type: what is set after shrinking; `...` takes a field away."""


def config_of(kind: str, **settings: Any) -> Any:
    made = CONFIG_MAPPING[kind]
    values = _shrunk(made().to_dict())
    return made.from_dict(_changed(values, copy.deepcopy(NEEDS.get(kind, {})) | settings))


def small_model(kind: str, image_text: bool, **settings: Any) -> Any:
    """Raises: whatever the type raises; MemoryError for a model that is not small."""
    auto = hf.AutoModelForImageTextToText if image_text else hf.AutoModelForCausalLM
    config = config_of(kind, **settings)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if size > LARGEST:
        raise MemoryError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(3.0)  # else all logits are alike, and any state gives the same tokens
    return model


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, value in values.items():
        if name == "layer_types" and value and 1 < len(set(value)) < 5 and "num_hidden_layers" in values:
            small[name] = list(dict.fromkeys(value))  # a layer of each kind
            small["num_hidden_layers"] = len(small[name])
        elif name in _LAYER_LISTS or name in ("_name_or_path", "output_attentions"):
            continue
        elif name == "mrope_section":
            small[name] = [2, 3, 3]
        elif isinstance(value, dict) and (name in _PARTS or name.endswith("_config")):
            small[name] = _shrunk(value)
        elif name == "num_hidden_layers" and name in small:
            continue
        elif name in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            small[name] = _SIZES[name] if name == "head_dim" else min(value, _SIZES[name])
        elif name in _TOKENS or name in _ENDS:
            small[name] = _TOKENS.get(name, 2)
        elif name.endswith("token_id") and isinstance(value, int):
            small[name] = 100 + len(name) % 25
        else:
            small[name] = value
    if "kv_lora_rank" in small and "num_key_value_heads" in small:  # latent rows: no groups of heads
        small["num_key_value_heads"] = small.get("num_attention_heads", 4)
    if "qk_rope_head_dim" in small:
        small.update({name: 8 for name in ("head_dim",) if name in small})
        small.update({name: 24 for name in ("qk_head_dim",) if name in small})
        for name, size in (("topk_group", 1), ("n_group", 1), ("num_experts_per_tok", 2)):
            if small.get(name, 0) is None:
                small[name] = size
    return small


def _changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _changed(values[name], value)
        elif value is ...:
            values.pop(name, None)
        else:
            values[name] = value
    return values


def pixels_of(kind: str) -> dict[str, Any]:
    """A picture, for the types that generate nothing without one."""
    if kind != "blip":
        return {}
    return {"pixel_values": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))}


NUMBERS = 97


class Numbers:
    """A tokenizer of nothing but numbers."""

    eos_token_id = pad_token_id = chat_template = None
    special_tokens_map: dict[str, str] = {}  # noqa: RUF012

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(NUMBERS)}

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(str(int(number)) for number in ids)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) % NUMBERS for word in text.split()]}


LLAMA_SHAPE: dict[str, Any] = {
    "vocab_size": NUMBERS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.4, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def tiny_llama(seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA_SHAPE, **settings})).eval()


def number_prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, NUMBERS, (1, tokens), generator=generator)


GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def alone(attached: Any, call: Callable[[], Any]) -> Any:
    """What a call gives without DejaKV, on the same model."""
    ours = vars(attached).pop("generate", None)
    try:
        return call()
    finally:
        if ours is not None:
            vars(attached)["generate"] = ours


def generated(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **{**GREEDY, **options})


def right(attached: Any, ids: torch.Tensor, through: Any = None, **options: Any) -> bool:
    """Whether a call answers what the model answers alone; `through`: a wrapper that calls the attached model."""
    through = attached if through is None else through
    got = generated(through, ids, **options)
    want = alone(attached, lambda: generated(through, ids, **options))
    return got.shape == want.shape and bool((got == want).all())


def begun(engine: Any, prepared: Prepared, stored_state: StoredState, held: int, **more: Any) -> Completion | Refusal:
    """From the stored state's first `held` tokens, as an exact prefix."""
    store = open_store()
    store.put(stored_state)
    return engine.run(prepared, PrefixPlan((stored_state.meta,), None, held), store, **more)


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
