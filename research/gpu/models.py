"""Models with random weights, and texts of random words for them."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = 31_000
SENTENCE = 24
"""Words of a sentence."""
LENGTHS, TINY_LENGTHS = (1000, 2000, 4000, 8000, 16000, 32000), (400,)
"""Tokens of the prompts that are measured, and of those of a rehearsal."""

SHAPE_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
"""Llama-3.1-8B's, but for its vocabulary."""
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of words, each of one token."""
    vocabulary = {"<s>": 0, "</s>": 1, ".": 2}
    vocabulary |= {f"w{number}": number + 3 for number in range(WORDS)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=1 << 20, **ends)


def words(count: int, seed: int) -> str:
    """Return a text of so many tokens."""
    rng = random.Random(seed)
    return " ".join(
        "." if place % (SENTENCE + 1) == SENTENCE else f"w{rng.randrange(WORDS)}"
        for place in range(count)
    )


def random_llama(shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Make a Llama of a shape, with random weights, on the device."""
    config = LlamaConfig(
        **shape, vocab_size=WORDS + 3, bos_token_id=0, eos_token_id=1, pad_token_id=1
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    # An end of the answer would come by chance.
    model.generation_config.eos_token_id = None
    return model


def lengths_in_time(
    tiny: bool, has_time: Callable[[float, int], bool]
) -> Iterator[tuple[int, int]]:
    """Yield the number and length of each prompt to measure for which there is time.

    Parameters
    ----------
    tiny : bool
        Whether it is a rehearsal.
    has_time : Callable[[float, int], bool]
        Called with the seconds that a length needs, and the length.
    """
    needed, before = 5.0, 0
    for number, tokens in enumerate(TINY_LENGTHS if tiny else LENGTHS, 1):
        # A prompt of twice the length has taken at most three times as long.
        needed *= max(1.0, 1.5 * tokens / before) if before else 1.0
        if has_time(needed, tokens):
            start, before = time.monotonic(), tokens
            yield number, tokens
            needed = time.monotonic() - start
