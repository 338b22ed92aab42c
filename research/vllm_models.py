"""The models that the vLLM benchmarks run: the bundled documents model, SmolLM2 where it is installed, or the shape of a real one with
random weights.

What a connector costs and saves depends on a model's size, not on what it learned: KV bytes a token, work a token, layers.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from dejakv.models import path, resolve

DOCS = "docs-lm"
SMOLLM2 = "smollm2-135m"
SHAPES: dict[str, dict[str, Any]] = {
    # Published configurations. Qwen2.5-0.5B: 494 million parameters, 12 KiB of KV a token in bf16
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    # Mistral-7B-v0.3: 128 KiB of KV a token
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32_768,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    # Llama-3.1-8B: 128 KiB of KV a token
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
LARGE = ("mistral-7b", "llama-3.1-8b")
"""Whose weights are drawn as vLLM starts: they would take 15 GB of disk each."""
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
         "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
"""What makes a shape small: the same kind of model, to try a script on."""
NAMES = (DOCS, SMOLLM2, *SHAPES, *(f"{name}-small" for name in LARGE))


def folder_of(name: str) -> Path:
    """The model's folder; one with random weights is made in the system's folder for temporary files, and kept there."""
    docs = path(DOCS)
    if name == DOCS:
        return docs
    if name == SMOLLM2:
        return Path(resolve(name))
    folder = Path(tempfile.gettempdir()) / f"dejakv-benchmark-{name}"
    if not (folder / "config.json").is_file():
        made = folder.with_suffix(".part")
        _make(name, made)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(docs / file, made / file)
        made.rename(folder)
    return folder


def _make(name: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = name.removesuffix("-small")
    values = SHAPES[shape] | (SMALL if name != shape else {})
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    if shape in LARGE:
        with torch.device("meta"):
            config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
        config.dtype = torch.bfloat16
        config.save_pretrained(folder)
        return
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)


def options_of(name: str) -> dict[str, Any]:
    """How vLLM is to load it."""
    if name in (DOCS, SMOLLM2):
        return {"dtype": "float32"}
    return {"dtype": "bfloat16"} | ({"load_format": "dummy"} if name.removesuffix("-small") in LARGE else {})
