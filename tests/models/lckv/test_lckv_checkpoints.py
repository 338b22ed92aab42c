"""Checkpoints: our own, and those in the layout that whyNLP/LCKV publishes."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tests.models.lckv.conftest import tiny
from tests.services import python
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from dejakv.prototypes import lckv
from dejakv.prototypes.lckv.modeling import LCKVLlamaForCausalLM

PUBLISHED = {
    "architectures": ["LCKVLlamaForCausalLM"],
    "backward_passes": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "forward_passes": 7,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_types": "0_3_3_3_4",
    "max_position_embeddings": 2048,
    "model_type": "lckv-llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.45.2",
    "use_cache": True,
    "use_sequential": False,
    "vocab_size": 50,
}
"""The fields of a published configuration (whyNLP/LCKV, configs/tinyllama_lckv.json), with small numbers."""


def published_weights() -> dict[str, torch.Tensor]:
    """The names of a published state dict: a Llama's, without key and value projections where no layer attends."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (50, 32), "model.norm.weight": (32,), "lm_head.weight": (50, 32)}
    for i in range(5):
        layer = f"model.layers.{i}."
        shapes |= {layer + "self_attn.q_proj.weight": (32, 32), layer + "self_attn.o_proj.weight": (32, 32)}
        if i in (0, 3, 4):
            shapes |= {layer + "self_attn.k_proj.weight": (16, 32), layer + "self_attn.v_proj.weight": (16, 32)}
        shapes |= {layer + f"mlp.{x}_proj.weight": (64, 32) for x in ("gate", "up")}
        shapes |= {layer + "mlp.down_proj.weight": (32, 64)}
        shapes |= {layer + f"{x}_layernorm.weight": (32,) for x in ("input", "post_attention")}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    save_file(published_weights(), tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_a_published_checkpoint_loads_by_the_auto_classes(folder):
    lckv.register()
    lckv.register()
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(model, LCKVLlamaForCausalLM)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert str(model.config.layout) == "0_3_3_3_4"
    for name, weight in published_weights().items():
        assert torch.equal(model.state_dict()[name], weight)


def test_a_saved_model_comes_back_the_same(tmp_path):
    lckv.register()
    model, ids = tiny("0_1_4_4_4", forward_passes=5), torch.arange(1, 13)[None]
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.forward_passes == 5
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_a_published_layout_that_does_not_fit_is_refused(folder):
    lckv.register()
    (folder / "config.json").write_text(json.dumps({**PUBLISHED, "layer_types": "0_3_3_3"}))
    with pytest.raises(Exception, match="names 4 layers, the model has 5"):
        AutoConfig.from_pretrained(folder)


def test_the_package_loads_them_by_itself(folder):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")))
    tokenizer.save_pretrained(folder)
    program = "import sys; from dejakv.models import load; print(type(load(sys.argv[1])[0]).__name__)"
    done = python("-c", program, folder)
    assert done.stdout.strip() == "LCKVLlamaForCausalLM", done.stderr
