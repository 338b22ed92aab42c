"""Tiny Llamas with sharp logits, a tokenizer of numbers, and what a model answers without DejaKV."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 97


class Numbers:
    """A tokenizer of nothing but numbers."""

    eos_token_id = pad_token_id = chat_template = None
    special_tokens_map: dict[str, str] = {}  # noqa: RUF012

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(VOCABULARY)}

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(str(int(number)) for number in ids)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) % VOCABULARY for word in text.split()]}


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.4, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def tiny(seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **settings})).eval()


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, tokens), generator=generator)


GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def alone(attached: Any, call: Callable[[], Any]) -> Any:
    """What a call gives without DejaKV, on the same model."""
    ours = vars(attached).pop("generate", None)
    try:
        return call()
    finally:
        if ours is not None:
            vars(attached)["generate"] = ours


def asked(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **{**GREEDY, **options})


def right(attached: Any, ids: torch.Tensor, through: Any = None, **options: Any) -> bool:
    """Whether a call answers what the model answers alone; `through`: a wrapper that calls the attached model."""
    through = attached if through is None else through
    got = asked(through, ids, **options)
    want = alone(attached, lambda: asked(through, ids, **options))
    return got.shape == want.shape and bool((got == want).all())
