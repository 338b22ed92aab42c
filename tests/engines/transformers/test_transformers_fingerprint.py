"""Whatever changes what a model computes must change its epoch, and nothing else may."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.services import python
from tests.tiny_models import PLACEHOLDER, image_model, picture, request, text_model, tokenizer

from dejakv.build import build_cache
from dejakv.config import SemanticCacheConfig
from dejakv.encoder_cache import VisualKVCache
from dejakv.engines.transformers import TransformersEngine
from dejakv.engines.transformers.fingerprint.weights import TURNS
from dejakv.pipeline import Pipeline

PROMPT = "three green balls, two red cones and one cube: what colour is the cube beside the red cone"
EXACT = SemanticCacheConfig(semantic_text=False)


def epoch(model: Any, words: Any = None, processor: Any = None) -> str:
    return TransformersEngine(model, words or tokenizer(), processor, check=False).epoch


def prepared() -> Any:
    """A model with values of several kinds."""
    model = text_model("llama")
    layer = model.model.layers[0]
    layer.holders, layer.shares = [SimpleNamespace(strength=1)], [1, 2]
    return model


VALUES: dict[str, Callable[[Any, Any], object]] = {
    "weight": lambda model, layer: layer.mlp.down_proj.weight[3].add_(1e-6),
    "order of rows": lambda model, layer: layer.mlp.down_proj.weight[:2].copy_(layer.mlp.down_proj.weight[:2].flip(0)),
    "shared weight": lambda model, layer: setattr(layer.mlp.up_proj, "weight", layer.mlp.gate_proj.weight),
    "buffer": lambda model, layer: model.model.rotary_emb.inv_freq[3:].mul_(2),  # not persistent: no checkpoint tells
    "epsilon": lambda model, layer: setattr(layer.input_layernorm, "variance_epsilon", 0.5),
    "configuration": lambda model, layer: setattr(model.config, "rms_norm_eps", 0.5),
    "inside the configuration": lambda model, layer: model.config.rope_parameters.update(rope_theta=77.0),
    "new in the configuration": lambda model, layer: setattr(model.config, "window", 3),
    "object in a list": lambda model, layer: setattr(layer.holders[0], "strength", 3),
    "new attribute": lambda model, layer: setattr(layer, "mode", "fast"),
    "attribute gone": lambda model, layer: delattr(layer, "shares"),
    "new parameter": lambda model, layer: layer.register_parameter("more", torch.nn.Parameter(torch.ones(2))),
    "new buffer": lambda model, layer: layer.register_buffer("more", torch.ones(2), persistent=False),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_anywhere_makes_another_epoch_at_once_and_in_another_process(name: str) -> None:
    model = prepared()
    engine = TransformersEngine(model, tokenizer())
    asked, before = engine.prepare(request(PROMPT)), engine.epoch
    engine.run(asked)
    assert engine.epoch == before
    with torch.no_grad():
        VALUES[name](model, model.model.layers[0])
    for _ in range(TURNS):  # one weight among many is looked at in its turn
        engine.run(asked)
        if engine.epoch != before:
            break
    assert engine.epoch not in (before, "")
    assert engine.epoch == TransformersEngine(model, tokenizer()).epoch


def test_kinds_of_models_and_of_tokenizers_have_epochs_of_their_own() -> None:
    named, templated = tokenizer(), tokenizer()
    named.add_tokens(["newword"])
    templated.chat_template = "{{ messages[0]['content'] }}"
    engines = [
        (text_model("llama"), None), (text_model("llama", torch.bfloat16), None), (text_model("llama", attn="eager"), None),
        (text_model("mistral"), None), (text_model("llama"), named), (text_model("llama"), templated),
    ]  # fmt: skip
    assert len({epoch(*each) for each in engines}) == len(engines)


def test_where_a_model_was_loaded_from_and_how_it_decodes_do_not_count() -> None:
    model = text_model("llama")
    before = epoch(model)
    model.name_or_path = model.config._name_or_path = "elsewhere"
    model.generation_config.temperature = 0.3
    model.requires_grad_(False)
    assert epoch(model) == before


def test_another_process_finds_the_same_epoch(tmp_path: Path) -> None:
    model = text_model("gemma2")
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    code = (
        "import sys; from dejakv.engines.transformers import TransformersEngine as engine;"
        "print(engine.from_pretrained(sys.argv[1], dtype='fp32', device='cpu', check=False).epoch)"
    )
    done = python("-c", code, tmp_path)  # its strings have other hashes
    assert done.stdout.strip() == TransformersEngine.from_pretrained(str(tmp_path), dtype="fp32", device="cpu").epoch


HISTORIES = """
import copy, io, logging, sys, torch, transformers
from torch import nn
from dejakv.engines.transformers import TransformersEngine

model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])

def epoch():
    return TransformersEngine(model, tokenizer, check=False).epoch

def parted():
    config = transformers.LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    part = transformers.AutoModel.from_config(config)
    part.set_attn_implementation("eager")
    transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(
        text_config=config, vision_config=transformers.CLIPVisionConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2),
    ))

def compiled():
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(2))

def trained():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2)).sum().backward()
    optimizer.step()

def traced():
    torch.fx.symbolic_trace(nn.Linear(2, 2))
    torch.jit.trace(nn.Linear(2, 2), torch.ones(2))
    torch.export.export(nn.Linear(2, 2), (torch.ones(2),))

def adapted():
    import peft
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).unload()

def profiled():
    with torch.profiler.profile(), torch.autocast("cpu"):
        nn.Linear(2, 2)(torch.ones(2))

def saved():
    copy.deepcopy(nn.Linear(2, 2))
    file = io.BytesIO()
    torch.save(nn.Linear(2, 2).state_dict(), file)
    file.seek(0)
    torch.load(file, weights_only=True)

def switched():
    torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)

def generated():
    ids = torch.tensor([[5, 6, 7]])
    for how in ({"num_beams": 2}, {"do_sample": True, "top_k": 3}, {"return_dict_in_generate": True, "output_scores": True}):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, pad_token_id=0, **how)

def told():
    transformers.logging.set_verbosity_debug()
    logging.getLogger("transformers").warning("told")
    transformers.set_seed(1)

first = epoch()
for history in (trained, profiled, saved, switched, generated, told, adapted, parted, traced, compiled):
    history()
    print(history.__name__, epoch() == first, flush=True)
"""


def test_what_else_a_process_did_does_not_count(tmp_path: Path) -> None:
    text_model("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    done = python("-c", HISTORIES, tmp_path)
    lines = done.stdout.splitlines()
    assert len(lines) == 10, done.stderr
    assert [line for line in lines if not line.endswith(" True")] == []


def test_a_function_that_a_library_calls_for_a_model_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    engine = TransformersEngine(text_model("llama"), tokenizer())
    before = engine.epoch
    masks = masking_utils.and_masks
    monkeypatch.setattr(masking_utils, "and_masks", lambda *given: masks(*given))
    engine.run(engine.prepare(request(PROMPT)))
    assert engine.epoch not in (before, "")
    monkeypatch.undo()
    engine.run(engine.prepare(request(PROMPT)))
    assert engine.epoch == before


def test_a_hook_for_the_whole_process_counts_too() -> None:
    engine = TransformersEngine(text_model("llama"), tokenizer())
    before = engine.epoch
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, given, out: out)
    try:
        engine.run(engine.prepare(request(PROMPT)))
        assert engine.epoch not in (before, "")
    finally:
        handle.remove()
    engine.run(engine.prepare(request(PROMPT)))
    assert engine.epoch == before


def test_weights_that_are_not_in_memory_are_not_identified() -> None:
    engine = TransformersEngine(text_model("llama"), tokenizer())
    engine.model.lm_head.weight = torch.nn.Parameter(engine.model.lm_head.weight.to("meta"), requires_grad=False)
    assert engine.weights_changed() == ""
    assert "offloaded" in engine.unidentified


def test_the_processor_counts_for_pictures_already_seen() -> None:
    model, processor = image_model("qwen2_5_vl")
    engine = TransformersEngine(model, processor.tokenizer, processor, encoder_cache=VisualKVCache())
    pipeline = Pipeline(engine, build_cache(EXACT, engine, background=False))
    asked = request(f"how many {PLACEHOLDER['qwen2_5_vl']} cubes are there left of it", (picture(1, 64, 64),))
    first = pipeline.answer(asked)
    assert pipeline.answer(asked).record.method == "exact"
    before = engine.epoch
    processor.image_processor.image_mean = [0.9, 0.1, 0.9]
    assert engine.weights_changed() != before
    processor.image_processor.size = {"shortest_edge": 64, "longest_edge": 32 * 32}
    changed = pipeline.answer(asked)
    assert changed.record.method != "exact"
    assert changed.record.encoder_runs == 1
    fresh = TransformersEngine(model, processor.tokenizer, processor)
    assert changed.token_ids == Pipeline(fresh).answer(asked).token_ids
    assert changed.record.prompt_tokens <= first.record.prompt_tokens
