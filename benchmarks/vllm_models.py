"""The models that the vLLM benchmarks run: the bundled documents model, SmolLM2 where it is installed, or the shape of a real one with
random weights.

What a connector costs and saves depends on a model's size, not on what it learned: KV bytes a token, work a token, layers.
"""

import shutil
import tempfile
from pathlib import Path

from dejakv.models import path, resolve

DOCS = "docs-lm"
SHAPES = {
    # Qwen2.5-0.5B's published configuration: 494 million parameters, 12 KiB of KV a token in bf16
    "qwen2.5-0.5b": {
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
    }
}
SMOLLM2 = "smollm2-135m"
NAMES = (DOCS, SMOLLM2, *SHAPES)


def folder_of(name: str) -> Path:
    """The model's folder; one with random weights is made in the system's folder for temporary files, and kept there."""
    docs = path(DOCS)
    if name == DOCS:
        return docs
    if name == SMOLLM2:
        return Path(resolve(name))
    folder = Path(tempfile.gettempdir()) / f"dejakv-benchmark-{name}"
    if not (folder / "config.json").is_file():
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(0)
        made = folder.with_suffix(".part")
        Qwen2ForCausalLM(Qwen2Config(**SHAPES[name])).to(torch.bfloat16).save_pretrained(made)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(docs / file, made / file)
        made.rename(folder)
    return folder


def dtype_of(name: str) -> str:
    return "bfloat16" if name in SHAPES else "float32"
