"""shapes-vlm before training: configuration, tokenizer, processor, writing of a checkpoint."""

import json
import re
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from dejakv_models import shapes_language as language
from dejakv_models.shapes_scene import COLORS, SHAPES, SIDE, SIZES

PATCH = 8
IMAGE_TOKENS = (SIDE // PATCH) ** 2
PAD, UNKNOWN, START, END, IMAGE, ANSWER = "<pad>", "<unk>", "<s>", "</s>", "<image>", "<|answer|>"
SPECIAL = (PAD, UNKNOWN, START, END, IMAGE, ANSWER)
MEAN, STD = 0.5, 0.25
# The picture comes first, whatever a system message says: so it was trained, and so its tokens are
# a shared prefix.
CHAT_TEMPLATE = (
    "{% set ns = namespace(system='') %}"
    "{% for message in messages %}"
    "{% set parts = message['content'] %}"
    "{% if parts is string %}{% set parts = [{'type': 'text', 'text': parts}] %}{% endif %}"
    "{% if message['role'] == 'system' %}"
    "{% for part in parts if part['type'] == 'text' %}"
    "{% set ns.system = ns.system + part['text'] + '\n' %}"
    "{% endfor %}"
    "{% else %}"
    "{% if message['role'] == 'assistant' %}<|answer|>{% endif %}"
    "{% for part in parts if part['type'] == 'image' %}<image>{% endfor %}"
    "{{ ns.system }}{% set ns.system = '' %}"
    "{% for part in parts if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}</s>{% endif %}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|answer|>{% endif %}"
)
ARCHITECTURE: dict[str, dict[str, Any]] = {
    "full": {
        "vision": {
            "hidden_size": 128,
            "intermediate_size": 320,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
        },
        "text": {
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
        },
    },
    "tiny": {
        "vision": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "text": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
    },
}
"""`full` is shapes-vlm; `tiny` is for the smoke run."""


def vocabulary() -> list[str]:
    """Special tokens, every word of the data set, then single ASCII characters as first and as
    inner pieces.
    """
    texts = [t for group in (language.SEEN, language.HELD_OUT) for ts in group.values() for t in ts]
    words = set(
        re.findall(r"[a-z]+", " ".join(texts).lower().replace("{a}", " ").replace("{b}", " "))
    )
    for shape in language.NOUNS:
        for synonym in (0, 1):
            words.add(language.noun_phrase(language.Reference(shape), synonym))
            words.add(language.noun_phrase(language.Reference(shape), synonym, plural=True))
    words |= {w for pair in language.SYNONYMS.values() for w in pair}
    words |= {*COLORS, *SIZES, *SHAPES, "yes", "no", "a", "an"}
    characters = sorted(set(string.printable.lower()) - set(string.whitespace))
    inner = ["##" + c for c in string.ascii_lowercase + string.digits]
    return [*SPECIAL, *sorted(words - set(characters)), *characters, *inner]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A fast WordPiece tokenizer: whole words where known, else characters.

    Case and spacing make no difference.
    """
    pieces = vocabulary()
    model = WordPiece(
        {w: i for i, w in enumerate(pieces)}, unk_token=UNKNOWN, max_input_chars_per_word=32
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=True, lowercase=True
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.BertPreTokenizer(),
            # WordPiece gives up on very long words: cut them, so that any ASCII text has a
            # spelling.
            pre_tokenizers.Split(Regex(r"\w{1,24}"), behavior="isolated"),
            pre_tokenizers.Split("_", behavior="isolated"),
        ]
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=START,
        eos_token=END,
        additional_special_tokens=[IMAGE, ANSWER],
        padding_side="left",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def build_processor() -> LlavaProcessor:
    """Tokenizer and image processor. The PIL backend does without torchvision."""
    image_processor = CLIPImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        do_center_crop=False,
        image_mean=[MEAN] * 3,
        image_std=[STD] * 3,
    )
    # The tower has a class token, which the "default" strategy drops: exactly IMAGE_TOKENS are
    # left.
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=build_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, size: str = "full"
) -> LlavaForConditionalGeneration:
    """An untrained model, in fp32. Head size 32 is the smallest that vLLM's CPU attention takes."""
    shape = ARCHITECTURE[size]
    vision = CLIPVisionConfig(
        image_size=SIDE, patch_size=PATCH, projection_dim=64, **shape["vision"]
    )
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        **shape["text"],
        **ids,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=False,
        **ids,
    )
    return LlavaForConditionalGeneration(config).float()


def export(folder: Path, model: LlavaForConditionalGeneration, processor: LlavaProcessor) -> None:
    """Write config, weights, processor and tokenizer, loadable by transformers and by vLLM.

    transformers 5 drops `vision_model.` from the CLIP tower's weight names; vLLM expects it,
    transformers reads both.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processor.save_pretrained(folder)
    # Named plainly, transformers would look for torchvision first and warn without it: ask for the
    # PIL backend.
    settings = json.loads((folder / "processor_config.json").read_text())
    settings["image_processor"]["image_processor_type"] = CLIPImageProcessorPil.__name__
    (folder / "processor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    model.save_pretrained(
        folder
    )  # for config.json; the weights and the generation settings are written again below
    ids = (model.config.text_config.eos_token_id, model.config.text_config.pad_token_id)
    GenerationConfig(
        do_sample=False, max_new_tokens=16, eos_token_id=ids[0], pad_token_id=ids[1]
    ).save_pretrained(folder)
    weights = {
        _vllm_name(k): v.detach().float().cpu().contiguous()
        for k, v in named_weights(model).items()
    }
    partial = folder / "model.safetensors.partial"
    save_file(weights, str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlavaForConditionalGeneration"]
    config["text_config"]["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def named_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters by their name in the module tree.

    Such names are `model.vision_tower...` and `lm_head.weight`.
    """
    return dict(model.named_parameters())


def _vllm_name(name: str) -> str:
    """Name in the module tree of transformers 5 -> the name in LLaVA checkpoints on the hub."""
    if name.startswith("lm_head."):
        return "language_model." + name
    name = name.removeprefix("model.")
    if name.startswith("language_model."):
        return name.replace("language_model.", "language_model.model.", 1)
    if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    return name
