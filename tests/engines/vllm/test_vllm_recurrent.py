"""Recurrent layers: a hit begins where both KV entries and the layers' state are stored, at the end of a block.

Mamba-1 has no kernel on vLLM's CPU backend. Mamba-2's cannot keep a state within a step there, so that a step is one
block here. LFM2's short convolutions give wrong answers there to several requests at a time, without us too.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_models import config_of
from transformers import AutoModelForCausalLM
from vllm_harness import DOCS, Engine, Output, running, segments, spoil, tokens

SIZES: dict[str, Any] = {
    "vocab_size": 512, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
HEADS = {"num_attention_heads": 2, "head_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    "lfm2": {
        **HEADS, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "block_dim": 64, "conv_dim": 64,
        "conv_dim_out": 64, "block_ff_dim": 96, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "mamba2": {},
    "falcon_h1": HEADS,
    "qwen3_next": {**HEADS, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
}  # fmt: skip
DTYPES = {name: torch.bfloat16 if name == "qwen3_next" else torch.float32 for name in MODELS}
"""The CPU's kernel for Qwen3-Next takes bf16 alone."""


def recurrent_model(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Saves a small random model; its folder and the engine's options."""
    dtype = DTYPES[name]
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config_of(name, **SIZES, **MODELS[name]), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    for file in DOCS.iterdir():
        if "token" in file.name:
            shutil.copy(file, folder)
    return folder, {"dtype": str(dtype).split(".")[1], "max_num_batched_tokens": 32}


def block_size(name: str, folder: Path, options: dict[str, Any]) -> int:
    """Tokens of a block: vLLM makes one as large as a state of Qwen3-Next, whose type depends on the processor."""
    if name != "qwen3_next":
        return 32
    with running(folder, connector=False, **options | {"max_num_batched_tokens": 1024}) as engine:
        return engine.core.scheduler.block_size


def in_full(engine: Engine, prompts: Sequence[list[int]], **options: Any) -> list[tuple[int, ...]]:
    """What full computation of each prompt alone answers: nothing is found under a salt that no other request has."""
    return [
        engine.ask([prompt], wish={"mode": "off", "no_store": True}, salt=f"full {prompt}", **options)[0].tokens
        for prompt in prompts
    ]


def told(output: Output) -> tuple[str, int]:
    return output.told["method"], output.told["tokens_reused"]


@pytest.mark.shows("exact")
@pytest.mark.parametrize(("name", "dtype"), list(DTYPES.items()))
def test_hits_are_exact(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """After a restart: equal, longer and parting prompts, and misses, several at a time.

    In bf16 an answer depends on where vLLM's steps end, which loads do not change.
    """
    folder, options = recurrent_model(name, tmp_path / "model")
    assert options["dtype"] == str(dtype).removeprefix("torch.")
    extra, block = {"store": str(tmp_path / "store")}, block_size(name, folder, options)
    options |= {"max_num_batched_tokens": block, "max_model_len": max(1024, 6 * block)}
    prompts = [tokens(4 * block + 7 + 3 * number, 50 + number) for number in range(3)]
    asked = [*prompts[:2], prompts[2] + tokens(block, 8), tokens(block - 3, 5), tokens(2 * block, 7)]
    parted = [prompts[0][: 2 * block + 5] + tokens(2 * block, 9 + number) for number in range(2)]
    with running(folder, extra, **options) as engine:
        computed = in_full(engine, [*asked, *parted])
        first = engine.ask([*prompts, asked[3]], max_tokens=6)
        assert [output.told["method"] for output in first] == ["none"] * 4
        engine.settle()

    with running(folder, extra, **options) as engine:
        batches = [[prompt] for prompt in asked] if name == "lfm2" else [asked]
        hits = [hit for batch in batches for hit in engine.ask(batch, max_tokens=6)]
        assert [told(hit) for hit in hits] == [*[("exact", 4 * block)] * 3, *[("none", 0)] * 2]
        # Where the first one parts no state stands; it leaves one to the second.
        partings: list[Output] = []
        for prompt in parted:
            engine.settle()
            engine.reset_prefix_cache()
            partings += engine.ask([prompt], max_tokens=6)
        assert engine.metrics()["vllm:dejakv_loads"] == 4
    assert [told(hit) for hit in partings] == [("none", 0), ("exact", 2 * block)]
    assert "no snapshot of it stands within the stored beginning" in partings[0].told["reason"]
    assert [hit.tokens for hit in [*hits, *partings]] == computed


@pytest.mark.shows("exact", "generated", model="falcon_h1")
def test_an_answer_is_taken_up_and_a_damaged_state_is_a_miss(tmp_path: Path) -> None:
    """A blend that is asked for is computed exactly, with the reason."""
    folder, options = recurrent_model("falcon_h1", tmp_path / "model")
    extra = {"store": str(tmp_path / "store"), "generated_text": "keep", "modes": ["off", "exact", "blend"]}
    prompt = tokens(70, 3)
    # Else vLLM keeps no state within an answer.
    options["prefix_cache_retention_interval"] = 32
    with running(folder, extra, **options) as engine:

        def again(asked: list[int], **wish: Any) -> Output:
            engine.settle()
            engine.reset_prefix_cache()
            return engine.ask([asked], wish=wish)[0]

        (first,) = engine.ask([prompt], max_tokens=70)
        turn = [*prompt, *first.tokens, *tokens(9, 4)]
        (computed,) = in_full(engine, [turn])
        hit = again(turn)
        assert (told(hit), hit.tokens) == (("exact", 128), computed)

        blend = again(turn, mode="blend")
        assert (told(blend), blend.tokens) == (("exact", 128), computed)
        assert "blend is not for recurrent layers" in blend.told["reason"]

        other = tokens(70, 6)
        (computed,) = in_full(engine, [other])
        before = set(segments(tmp_path / "store"))
        again(other)
        engine.settle()
        written = set(segments(tmp_path / "store")) - before
        [state] = [file for file in written if b"snapshot-64-" in file.read_bytes()]
        spoil(state, 0.999)
        misses = [again(other) for _ in range(2)]
        assert [(told(miss), miss.tokens) for miss in misses] == [(("none", 0), computed)] * 2
        hit = again(other)
        assert (told(hit), hit.tokens) == (("exact", 64), computed)


def test_without_prefix_caching_all_is_computed_in_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM keeps one state of a request then, that of its last token."""
    folder, options = recurrent_model("falcon_h1", tmp_path / "model")
    with running(folder, {"modes": ["exact", "blend"]}, enable_prefix_caching=False, **options) as engine:
        first, second = (engine.ask([tokens(100, 3)])[0] for _ in range(2))
        assert engine.llm.llm_engine.vllm_config.cache_config.mamba_cache_mode == "none"
    assert first.tokens == second.tokens
    assert told(second) == ("none", 0)
    assert "--enable-prefix-caching alone" in second.told["reason"]
    assert "every prompt is computed in full" in caplog.text
