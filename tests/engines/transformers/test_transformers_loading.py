"""Loading, capabilities and bad input: every refusal names its remedy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tests.tiny_models import (
    IMAGES,
    PLACEHOLDER,
    image_model,
    picture,
    request,
    text_engine,
    text_model,
    tokenizer,
)

from dejakv.engines.transformers import TransformersEngine
from dejakv.errors import ConfigError, InputError, ModelError
from dejakv.models.loading import load_processor
from dejakv.request import Sampling


@pytest.fixture
def saved(tmp_path: Path) -> str:
    text_model("qwen3").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("auto", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_folder_loads_in_the_dtype_asked_for(saved: str, dtype: str, kind: torch.dtype) -> None:
    engine = TransformersEngine.from_pretrained(saved, dtype=dtype, device="cpu")
    assert engine.model.dtype == kind
    assert not engine.model.training
    assert engine.capabilities.reuse, engine.capabilities.reasons
    run = engine.run(engine.prepare(request("what colour is the cube")))
    state = run.capture()
    assert state is not None
    assert state.dtype == {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[kind]


@pytest.mark.parametrize("name", IMAGES)
def test_image_text_folders_load_with_their_processor(name: str, tmp_path: Path) -> None:
    model, processor = image_model(name)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    asked = request(f"how {PLACEHOLDER[name]} what", (picture(1),))
    own = TransformersEngine(model, processor.tokenizer, processor)
    engine = TransformersEngine.from_pretrained(str(tmp_path), device="cpu")
    assert engine.prepare(asked).token_ids == own.prepare(asked).token_ids
    assert engine.run(engine.prepare(asked)).token_ids == own.run(own.prepare(asked)).token_ids
    assert type(load_processor(str(tmp_path))).__name__ == type(processor).__name__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn": "flash_attention_2"}, "sdpa or eager"),
        ({"dtype": "int4"}, "auto, fp32, bf16, fp16"),
        ({"device": "toaster"}, "auto, cpu, cuda"),
    ],
)
def test_wrong_options_name_the_right_ones(saved: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransformersEngine.from_pretrained(saved, **options)


def test_models_that_cannot_be_loaded_say_why(saved: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        TransformersEngine.from_pretrained(str(empty))
    (empty / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match="neither a causal language model nor an image-text model"):
        TransformersEngine.from_pretrained(str(empty))
    (empty / "config.json").write_text('{"model_type": "internvl_chat"}')
    with pytest.raises(ModelError):
        TransformersEngine.from_pretrained(str(empty))
    (Path(saved) / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ModelError, match="does not load"):
        TransformersEngine.from_pretrained(saved)
    with pytest.raises(ModelError, match="hub id"):
        TransformersEngine.from_pretrained("nobody/has-this-model")


def test_a_model_that_fails_the_self_check_is_served_without_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    import dejakv.engines.transformers.capabilities as found

    monkeypatch.setattr(found, "filled_cache", lambda *given: given[-1])
    engine = TransformersEngine(text_model("llama"), tokenizer())
    assert not engine.capabilities.reuse
    assert "self-check" in engine.capabilities.reasons["reuse"]
    assert engine.run(engine.prepare(request("what colour"))).capture() is None


def test_encoder_decoders_and_other_attention_are_refused() -> None:
    t5 = hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=64, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    )
    with pytest.raises(ModelError, match="encoder-decoder"):
        TransformersEngine(t5, tokenizer())
    model = text_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError, match="attn_implementation='sdpa'"):
        TransformersEngine(model, tokenizer())


def test_prompts_that_cannot_be_served_say_how_to_help() -> None:
    engine = text_engine("opt")
    for empty in ("", "   \n"):
        with pytest.raises(InputError, match="empty"):
            engine.prepare(request(empty))
    with pytest.raises(InputError, match="shorten the prompt"):
        engine.prepare(request("cube " * 600))
    with pytest.raises(InputError, match="empty text"):
        engine.embed_text("")
    almost = engine.prepare(request("is " * 505))
    assert 512 - 8 < len(almost.token_ids) < 512
    room = 512 - len(almost.token_ids)
    assert len(engine.full(almost.sampled(Sampling(max_new_tokens=50))).token_ids) <= room


def test_a_template_that_writes_the_first_token_gets_it_once() -> None:
    words = tokenizer()
    words._tokenizer.post_processor = __import__("tokenizers").processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    engine = TransformersEngine(text_model("llama"), words, check=False)
    assert engine.prepare(request("<s>cube")).token_ids == engine.prepare(request("cube")).token_ids


def test_embeddings_of_text_are_the_mean_of_the_input_embeddings() -> None:
    engine = text_engine("qwen2")
    ids = tuple(tokenizer()("what colour")["input_ids"])
    rows = engine.embed_tokens(ids)
    assert rows.shape == (len(ids), 32)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, engine.model.get_input_embeddings().weight.detach().numpy()[list(ids)])
    vector = engine.embed_text("what colour")
    np.testing.assert_allclose(vector, rows.mean(0) / np.linalg.norm(rows.mean(0)), atol=1e-6)
