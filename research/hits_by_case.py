"""How often exact reuse hits, by what the model is made of.

Prompts repeat at once, with a change of the model between them.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import dejakv
from dejakv.models import load

REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


def plain() -> Any:
    return load("docs-lm")[0].float().eval()


def with_lora() -> Any:
    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(plain(), settings, adapter_name="one")
    model.add_adapter("two", settings)
    return model.eval()


def of_own_code() -> Any:
    """docs-lm as `trust_remote_code` loads a model that brings its own classes."""
    folder = Path(tempfile.mkdtemp())
    plain().save_pretrained(folder)
    (folder / "modeling_mine.py").write_text(REMOTE)
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "mine",
        "auto_map": {
            "AutoConfig": "modeling_mine.MineConfig",
            "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    ).eval()


def compiled() -> Any:
    model = plain()
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager")
    return model


def switch(model: Any) -> None:
    for name in ("two", "one"):
        model.set_adapter(name)


def merge(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def scale(model: Any) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["one"] *= 2


def nothing(_: Any) -> None:
    """Leaves the model as it is."""


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "plain": (plain, nothing),
    "LoRA": (with_lora, nothing),
    "LoRA, switched": (with_lora, switch),
    "LoRA, merged": (with_lora, merge),
    "LoRA, scaled": (with_lora, scale),
    "torch.compile of modules": (compiled, nothing),
    "trust_remote_code": (of_own_code, nothing),
}


def hits(make: Callable[[], Any], change: Callable[[Any], None], prompts: int) -> dict[str, int]:
    model, tokenizer = make(), load("docs-lm")[1]
    records: list[Any] = []
    wrong = 0
    with dejakv.attach(model, tokenizer, on_record=records.append) as cache:
        for number in range(prompts):
            change(model)
            text = (
                f"<s> ann lives in rome . bob likes {number} cats . <q> where does ann live ? <a>"
            )
            inputs = tokenizer(text, return_tensors="pt")
            answers = []
            for _ in range(2):
                answers.append(model.generate(**inputs, max_new_tokens=4))
                cache.flush()
            wrong += not torch.equal(*answers)
    return {
        "repeats": prompts,
        "hits": sum(record.method != "none" for record in records[1::2]),
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    cases: dict[str, dict[str, int]] = {}
    for name, (make, change) in CASES.items():
        cases[name] = hits(make, change, options.prompts)
        print(name, cases[name], flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
