"""Every causal and image-text type of transformers, small and with random weights.

A configuration is its type's default with sizes shrunk by the names that transformers uses for them.
What a type needs besides stands in `NEEDS`.
"""

import copy
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CAUSAL = tuple(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
IMAGE_TEXT = tuple(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)

VOCABULARY, LARGEST = 128, 40_000_000
"""Token ids; and the parameters beyond which a model is not small."""
_NAMES: dict[int, str] = {
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
    VOCABULARY: "embedding_size_vocab hash_vocab_size padded_vocab_size vocab_size "
    "vocab_size_per_layer_input",
    256: "max_position_embeddings max_seq_len max_sequence_length max_source_positions "
    "max_target_positions model_max_length n_ctx n_positions seq_length",
}  # fmt: skip
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
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
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
_GEMMA4 = {**_WINDOWS, "num_kv_shared_layers": 0}
_ASSISTANT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    **_WINDOWS,
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
    **_WINDOWS,
    "intermediate_size": 96,
    "num_kv_shared_layers": 0,
    "laurel_rank": 8,
    "activation_sparsity_pattern": None,
    "altup_num_inputs": 2,
}
NEEDS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
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
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "laguna": {"num_attention_heads_per_layer": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {**_WINDOWS, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen3_5": {"text_config": _LINEAR},
    "qwen3_5_moe": {"text_config": _LINEAR},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
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
    auto = transformers.AutoModelForImageTextToText if image_text else transformers.AutoModelForCausalLM
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
        if name in _LAYER_LISTS or name in ("_name_or_path", "output_attentions"):
            continue
        if name == "mrope_section":
            small[name] = [2, 3, 3]
        elif isinstance(value, dict) and (name in _PARTS or name.endswith("_config")):
            small[name] = _shrunk(value)
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
