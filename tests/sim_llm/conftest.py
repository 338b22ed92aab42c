"""A small random LCKV model with a tokenizer of words, and ordinary models beside it."""

import pytest
import torch
from tests.models.lckv.conftest import tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dejakv.prototypes.sim_llm.inference import SimLLMInference
from dejakv.prototypes.sim_llm.model import LlamaForCausalLMWithKVReuse

WORDS = [f"w{i}" for i in range(47)]


@pytest.fixture
def tokenizer():
    vocabulary = {"<pad>": 0, ".": 1, "<unk>": 2} | {word: i + 3 for i, word in enumerate(WORDS)}
    plain = Tokenizer(WordLevel(vocabulary, "<unk>"))
    plain.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>")


@pytest.fixture(params=["0_1_4_4_4", "0_3_3_3_4"])
def lckv(request):
    """Iterations enough for prompts of 60 tokens to be exact."""
    return tiny(request.param, forward_passes=60, max_position_embeddings=128)


@pytest.fixture
def llama():
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None}
    config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=3, **heads)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def inference(lckv, tokenizer):
    return SimLLMInference(LlamaForCausalLMWithKVReuse(lckv, tokenizer, tail=4), similarity_threshold=0.9)


def prompt(*changes, length=40):
    """`length` words; `changes` maps places to other words."""
    words = [WORDS[(7 * i + i * i) % 47] for i in range(length)]
    for place, word in changes:
        words[place] = word
    return " ".join(words)
