"""Under `exact` every answer is the one that a model which was never attached gives, whatever the caller does between.

Random sequences of: asking, changing the returned cache, changing the model in one of many ways and putting it back.
`DEJAKV_SOAK_ROUNDS=1000 pytest -m soak tests/reliability/test_reliability_exact.py` runs more of them with other seeds.
"""

import copy
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

import dejakv
from dejakv.config import SemanticCacheConfig
from dejakv.models import load
from dejakv.records import Record
from dejakv_models.docs import DocsDataset, prompt

OPTIONS = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
RETURNED = {"return_dict_in_generate": True}
Undo = Callable[[], object]


def docs_lm() -> tuple[Any, Any]:
    model, words = load("docs-lm")[:2]
    return model.float(), words


def random_llama() -> tuple[Any, Any]:
    _, words = load("docs-lm")[:2]
    torch.manual_seed(3)
    config = hf.LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    model = hf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
    return model, words


class Life:
    """One served model, and what is done to it. Every way of changing it returns how to put it back."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.rng = model, random.Random(seed)
        self.noise = torch.Generator().manual_seed(seed)
        self.told = False

    def layer(self) -> Any:
        return self.rng.choice(list(self.model.model.layers))

    def weight(self) -> torch.nn.Parameter:
        return self.rng.choice([parameter for parameter in self.model.parameters() if parameter.dim() > 1])

    def random_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=self.noise) * tensor.std()

    def step(self) -> Undo:
        weight = self.weight()
        kept = weight.detach().clone()
        optimizer = torch.optim.SGD([weight], lr=1.0)
        weight.grad = self.random_like(weight.detach())
        optimizer.step()
        optimizer.zero_grad()
        return lambda: weight.data.copy_(kept)

    def average_swapped_in(self) -> Undo:
        weights = list(self.model.parameters())
        kept = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.data.copy_(weight.data + self.random_like(weight.data))

        def undo() -> None:
            for weight, was in zip(weights, kept, strict=True):
                weight.data.copy_(was)

        return undo

    def one_matrix(self) -> Undo:
        weight = self.weight()
        kept = weight.detach().clone()
        weight.data.add_(self.random_like(weight.data))
        return lambda: weight.data.copy_(kept)

    def replaced(self) -> Undo:
        weight = self.weight()
        kept = weight.data
        weight.data = weight.data + self.random_like(weight.data)

        def undo() -> None:
            weight.data = kept

        return undo

    def one_weight_told(self) -> Undo:
        weight = self.layer().self_attn.k_proj.weight
        place = self.rng.randrange(weight.numel())
        kept = weight.data.view(-1)[place].clone()
        weight.data.view(-1)[place] += 50
        self.told = True

        def undo() -> None:
            weight.data.view(-1)[place] = kept
            self.told = True

        return undo

    def rope(self) -> Undo:
        buffer = self.model.model.rotary_emb.inv_freq
        kept = buffer.clone()
        buffer.mul_(self.rng.uniform(0.3, 0.9))
        return lambda: buffer.copy_(kept)

    def epsilon(self) -> Undo:
        norm = self.layer().input_layernorm
        kept, norm.variance_epsilon = norm.variance_epsilon, 10.0
        return lambda: setattr(norm, "variance_epsilon", kept)

    def scaling(self) -> Undo:
        attention = self.layer().self_attn
        kept = attention.scaling
        attention.scaling = kept * 4
        return lambda: setattr(attention, "scaling", kept)

    def hook(self) -> Undo:
        direction = 5 * torch.randn(self.model.config.hidden_size, generator=self.noise)
        return self.layer().register_forward_hook(lambda module, given, out: out + direction).remove

    def swapped_layer(self) -> Undo:
        layers = self.model.model.layers
        index = self.rng.randrange(len(layers))
        kept = layers[index]
        layers[index] = copy.deepcopy(kept)
        with torch.no_grad():
            for parameter in layers[index].parameters():
                parameter.add_(self.random_like(parameter) if parameter.dim() > 1 else 0.5)
        return lambda: layers.__setitem__(index, kept)


WAYS = (
    Life.step, Life.average_swapped_in, Life.one_matrix, Life.replaced, Life.one_weight_told, Life.rope, Life.epsilon,
    Life.scaling, Life.hook, Life.swapped_layer,
)  # fmt: skip


def spoil(state: Any, rng: random.Random) -> None:
    """What a caller may do with the cache that it was given."""
    way = rng.randrange(4)
    if way == 0:
        state.crop(3 - state.get_seq_length())
    elif way == 1:
        for layer in state.layers:
            layer.keys.mul_(-2)
            layer.values.data.fill_(3)
    elif way == 2:
        state.batch_repeat_interleave(2)
        state.reorder_cache(torch.arange(state.layers[0].keys.shape[0]).flip(0))
    else:
        state.reset()


def live(make: Callable[[], tuple[Any, Any]], seed: int, actions: int) -> tuple[int, list[Record]]:
    """How many answers differed from the model's own, and the records of all."""
    model, words = make()
    rng, life = random.Random(seed), Life(model, seed)
    texts = [prompt(sample) for sample in DocsDataset(seed=seed, samples=3, facts=4)]
    asked = [words(text, return_tensors="pt", add_special_tokens=False) for text in [*texts, texts[0] + " " + texts[1]]]
    wrong, records, undone = 0, list[Record](), list[Undo]()
    config = SemanticCacheConfig(semantic_text=False)
    with dejakv.attach(model, words, config, on_record=records.append) as cache:
        for _ in range(actions):
            act = rng.random()
            if act < 0.12 and len(undone) < 3:
                undone.append(rng.choice(WAYS)(life))
            elif act < 0.22 and undone:
                undone.pop()()
            if life.told:
                cache.weights_changed()
                life.told = False
            inputs = rng.choice(asked)
            beams = rng.choice([1, 1, 1, 2])
            more = rng.choice([RETURNED, {}])
            got = model.generate(**inputs, **OPTIONS, **more, num_beams=beams)
            expected = type(model).generate(model, **inputs, **OPTIONS, num_beams=beams)
            wrong += not torch.equal(got.sequences if more else got, expected)
            if more:
                spoil(got.past_key_values, rng)
            if rng.random() < 0.5:
                cache.flush()
    return wrong, records


@pytest.mark.parametrize("make", [docs_lm, random_llama], ids=lambda make: make.__name__)
def test_every_answer_is_the_one_of_a_model_that_was_never_attached(make: Any) -> None:
    wrong, records = live(make, 0, 40)
    assert not wrong
    methods = [record.method for record in records]
    assert {"none", "prefix", "exact"} <= set(methods)
    assert methods.count("exact") > 5, "the cache served too little for this to show anything"


@pytest.mark.soak
@pytest.mark.skipif("DEJAKV_SOAK_ROUNDS" not in os.environ, reason="set DEJAKV_SOAK_ROUNDS to a number of rounds")
def test_it_stays_so_over_many_rounds() -> None:
    first = random.SystemRandom().randrange(1 << 30)
    for seed in range(first, first + int(os.environ.get("DEJAKV_SOAK_ROUNDS", "0"))):
        for make in (docs_lm, random_llama):
            wrong, _ = live(make, seed, 40)
            assert not wrong, f"{make.__name__}, seed {seed}"
