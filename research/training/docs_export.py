"""Write docs-lm as transformers and vLLM load it: weights, config, generation settings, tokenizer."""

import shutil
from pathlib import Path

from transformers import GenerationConfig, LlamaForCausalLM

from research.training.docs_tokenizer import save_tokenizer


def export(model: LlamaForCausalLM, folder: Path) -> None:
    """Replace `folder`'s model by this one (fp32 safetensors), complete or not at all."""
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    c = model.config
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=8,
        bos_token_id=c.bos_token_id,
        eos_token_id=c.eos_token_id,
        pad_token_id=c.pad_token_id,
    )
    model.save_pretrained(new)
    save_tokenizer(new, c.max_position_embeddings)
    folder.mkdir(parents=True, exist_ok=True)
    for file in new.iterdir():
        file.chmod(0o644)
        file.replace(folder / file.name)
    new.rmdir()
