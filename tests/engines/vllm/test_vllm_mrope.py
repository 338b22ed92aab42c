"""Pictures that shape the positions of the tokens behind them (M-RoPE), through a real engine on small random models of Qwen's types: a hit
is exact, and no blend has a picture on either side."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from tests.tiny_models import NAMED, tokenizer
from vllm_harness import BLENDING, EXTENSION, Output, recompute_all, running, tokens, worker_side

from dejakv.engines.vllm.request import MEDIA_DONORS

SIZE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
PATCHES = {"patch_size": 4, "temporal_patch_size": 2}
TOWER = {**PATCHES, "depth": 2, "num_heads": 2, "spatial_merge_size": 2}
WIDE = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, {}),
    "qwen2_5_vl": ("Qwen2_5_VL", {**WIDE, "window_size": 16, "fullatt_block_indexes": [1]}, {}),
    "qwen3_vl": (
        "Qwen3VL",
        {**WIDE, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        {"mrope_interleaved": True},
    ),
}
START, PICTURE, END = (
    tokenizer().convert_tokens_to_ids(NAMED[f"{name}_token"]) for name in ("vision_start", "image", "vision_end")
)


def tiny_model(name: str, folder: Path) -> Path:
    """Saves the model and its processor, and returns its folder."""
    kind, tower, rope = MODELS[name]
    words = tokenizer()
    config = getattr(transformers, f"{kind}Config")(
        vision_config=TOWER | tower,
        text_config={**SIZE, "vocab_size": len(words), "rope_parameters": ROPE | rope},
        image_token_id=PICTURE,
        video_token_id=words.convert_tokens_to_ids(NAMED["video_token"]),
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in parameter_name:
                parameter.mul_(6.0)  # else answers hardly depend on what stands far back
    model.save_pretrained(folder)
    sizes = {**PATCHES, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 128 * 128}}
    video = transformers.Qwen3VLVideoProcessor if name == "qwen3_vl" else transformers.Qwen2VLVideoProcessor
    getattr(transformers, f"{kind}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes), tokenizer=words, video_processor=video(**sizes)
    ).save_pretrained(folder)
    return folder


def noise(seed: int, width: int, height: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 255, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())


def ids(count: int, seed: int) -> list[int]:
    """Random tokens of text."""
    return [10 + token % 300 for token in tokens(count, seed)]


def asked(*parts: list[int] | Image.Image) -> dict[str, Any]:
    """A prompt of texts and pictures in this order."""
    prompt: list[int] = []
    for part in parts:
        prompt += part if isinstance(part, list) else [START, PICTURE, END]
    pictures = [part for part in parts if not isinstance(part, list)]
    return {"prompt_token_ids": prompt} | ({"multi_modal_data": {"image": pictures}} if pictures else {})


SYSTEM, QUESTION, NEXT = ids(50, 1), ids(40, 2), ids(25, 3)
FLAT, UPRIGHT, SQUARE, OTHER = noise(1, 96, 48), noise(2, 48, 96), noise(3, 40, 40), noise(4, 96, 48)
GREY_FLAT, GREY_LONG = (Image.new("RGB", size, (90, 90, 90)) for size in ((96, 48), (144, 32)))
"""Their patches are equal byte for byte, and so are the prompts' tokens: only the positions differ."""
CASES = {
    "flat": asked(SYSTEM, FLAT, QUESTION),
    "upright": asked(SYSTEM, UPRIGHT, QUESTION),
    "square": asked(SYSTEM, SQUARE, QUESTION),
    "other": asked(SYSTEM, OTHER, QUESTION),
    "grey flat": asked(SYSTEM, GREY_FLAT, QUESTION),
    "grey long": asked(SYSTEM, GREY_LONG, QUESTION),
    "two": asked(SYSTEM, FLAT, SQUARE, QUESTION),
    "swapped": asked(SYSTEM, SQUARE, FLAT, QUESTION),
    "three": asked(FLAT, QUESTION, UPRIGHT, NEXT, SQUARE, SYSTEM),
}
KNOWN = {"two": len(SYSTEM) + 2 + 72, "swapped": len(SYSTEM) + 2 + 25}
"""Tokens up to the end of the first picture, where an earlier case has it there."""
OPTIONS: dict[str, Any] = {
    "limit_mm_per_prompt": {"image": 3, "video": 0},
    "worker_extension_cls": EXTENSION,
    "max_num_batched_tokens": 512,
}


def grown(answer: Output) -> dict[str, Any]:
    """The next turn behind the first case's answer, with a picture of its own."""
    return asked(SYSTEM, FLAT, [*QUESTION, *answer.tokens, *NEXT], UPRIGHT, NEXT)


def plain_answers(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of an engine that shares nothing between prompts."""
    with running(folder, connector=False, enable_prefix_caching=False, mm_processor_cache_gb=0, **OPTIONS) as engine:
        answers = {name: engine.ask([case])[0] for name, case in CASES.items()}
        answers["grown"] = engine.ask([grown(answers["flat"])])[0]
        answers["text"] = engine.ask([TEXT])[0]
    return {name: answer.tokens for name, answer in answers.items()}


LONG = ids(200, 7)
DONOR, TEXT_DONOR = asked(ids(20, 8), FLAT, LONG), asked(ids(90, 11) + LONG)
TEXT = asked(ids(30, 9) + LONG + ids(16, 10))


@pytest.mark.shows("exact", "pictures")
@pytest.mark.parametrize("name", MODELS)
def test_pictures_that_shape_positions_are_exact(name: str, tmp_path: Path) -> None:
    folder = tiny_model(name, tmp_path / "model")
    plain = plain_answers(folder)
    assert plain["grey flat"] != plain["grey long"], "positions must show in the answers"
    assert len({plain[case] for case in CASES}) > len(CASES) // 2, "pictures must show in the answers"

    extra = {**BLENDING, "store_dir": str(tmp_path / "store")}
    with running(folder, extra, **OPTIONS) as engine:
        # Nothing of a picture is another's: what is reused ends before the first one that is new.
        for case, prompt in CASES.items():
            (answer,) = engine.ask([prompt])
            assert answer.tokens == plain[case], case
            assert answer.told["tokens_reused"] <= KNOWN.get(case, len(SYSTEM) + 1), case
            engine.settle()
            engine.reset_prefix_cache()
        for case, prompt in CASES.items():
            (answer,) = engine.ask([prompt])
            assert (answer.tokens, answer.told["method"], answer.computed) == (plain[case], "exact", 1), case
            engine.reset_prefix_cache()
        batch = engine.ask(list(CASES.values()))
        assert {case: answer.tokens for case, answer in zip(CASES, batch, strict=True)} == {
            case: plain[case] for case in CASES
        }
        engine.reset_prefix_cache()
        (first,) = engine.ask([CASES["flat"]])
        engine.reset_prefix_cache()
        (turn,) = engine.ask([grown(first)])
        assert turn.tokens == plain["grown"]
        assert turn.told["tokens_reused"] >= first.prompt_tokens
        engine.settle()

    with running(folder, extra, **OPTIONS) as engine:
        for case, prompt in {**CASES, "grown": grown(first)}.items():
            (answer,) = engine.ask([prompt])
            assert (answer.tokens, answer.told["method"], answer.computed) == (plain[case], "exact", 1), case
            engine.reset_prefix_cache()


@pytest.mark.shows("blend", model="qwen2_5_vl")
def test_no_blend_has_a_picture_on_either_side(tmp_path: Path) -> None:
    """Behind a picture a token's position is not its place in the prompt: moved as if it were, its state would be wrong. Text alone is
    blended, whatever was asked before."""
    folder = tiny_model("qwen2_5_vl", tmp_path)
    plain = plain_answers(folder)
    wish = {"mode": "blend", "no_store": True}
    with running(folder, BLENDING, **OPTIONS) as engine:
        recompute_all()
        engine.ask([DONOR, CASES["flat"]])
        engine.settle()
        engine.reset_prefix_cache()
        (moved,) = engine.ask([CASES["three"]], wish=wish)
        (behind,) = engine.ask([TEXT], wish=wish)
        assert worker_side().blend_runner.model_check.checked == 0
        engine.reset_prefix_cache()
        engine.ask([TEXT_DONOR])
        engine.settle()
        engine.reset_prefix_cache()
        (text,) = engine.ask([TEXT], wish=wish)
    assert (moved.told["method"], moved.told["reason"]) == ("none", "blend is for prompts without media")
    assert moved.tokens == plain["three"]
    assert (behind.told["method"], behind.told["reason"]) == ("none", MEDIA_DONORS)
    assert text.told["method"] == "blend", text.told["reason"]
    assert behind.tokens == text.tokens == plain["text"]
