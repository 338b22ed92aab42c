"""A model that changes while it is served, and its adapters: no answer differs from the model's own."""

import contextlib
import copy
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from tests.conftest import soak_rounds
from tests.tiny_models import Numbers, generated, number_prompt, right, tiny_llama
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import dejakv
from dejakv.models.cache_name import CACHE_NAME
from dejakv.records import Record


class Scaled(nn.Module):
    """A class of nobody's library."""

    def __init__(self, inner: nn.Module, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.inner(x)


class Negated(nn.Module):
    """A parametrization of one's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


def noise(tensor: torch.Tensor, dice: random.Random, scale: float = 0.3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dice.randrange(1 << 30))
    return (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.dtype)


def layer(model: Any, dice: random.Random) -> Any:
    return dice.choice(list(model.model.layers))


def matrix(model: Any, dice: random.Random) -> Any:
    """A linear layer with a weight of its own."""
    chosen = layer(model, dice)
    name = dice.choice(["q_proj", "k_proj", "v_proj"])
    return getattr(chosen.self_attn, name)


def every(model: Any, write: Callable[[Any], None]) -> None:
    for parameter in model.parameters():
        write(parameter)


@torch.no_grad()
def in_place(model: Any, dice: random.Random) -> None:
    every(model, lambda p: p.add_(noise(p, dice)))


def in_inference_mode(model: Any, dice: random.Random) -> None:
    with torch.inference_mode():
        every(model, lambda p: p.add_(noise(p, dice)))


def optimizer(model: Any, dice: random.Random) -> None:
    made = dice.choice([torch.optim.SGD, torch.optim.AdamW])(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = noise(parameter, dice, 1.0)
    made.step()
    made.zero_grad()


def state(model: Any, dice: random.Random, assign: bool) -> None:
    model.load_state_dict({k: v + noise(v, dice) for k, v in model.state_dict().items()}, assign=assign)


def layers(model: Any, order: Callable[[list[Any]], list[Any]]) -> None:
    model.model.layers = nn.ModuleList(order(list(model.model.layers)))
    for index, one in enumerate(model.model.layers):
        one.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(model.model.layers)
    model.config.layer_types = ["full_attention"] * len(model.model.layers)


def shuffled(model: Any, dice: random.Random) -> None:
    layers(model, lambda held: dice.sample(held, len(held)))


@torch.no_grad()
def replaced(model: Any, dice: random.Random) -> None:
    number = dice.randrange(len(model.model.layers))
    model.model.layers[number] = copy.deepcopy(model.model.layers[number])
    every(model.model.layers[number], lambda p: p.add_(noise(p, dice)))


def doubled(model: Any, dice: random.Random) -> None:
    layers(model, lambda held: [*held, copy.deepcopy(dice.choice(held))] if len(held) < 5 else held)


def hooked(model: Any, dice: random.Random) -> None:
    direction = noise(torch.empty(32), dice, 3.0)
    layer(model, dice).mlp.register_forward_hook(lambda _module, _given, out: out + direction.to(out.dtype))


def wrapped_hook(model: Any, dice: random.Random) -> None:
    scale = dice.choice([0.2, 3.0])

    @functools.wraps(nn.Module.forward)
    def hook(_module: Any, _given: Any, out: Any) -> Any:
        return out * scale

    layer(model, dice).mlp.register_forward_hook(hook)


def scaled(model: Any, dice: random.Random) -> None:
    one = layer(model, dice)
    one.mlp = Scaled(one.mlp, 2.0)


def resized(model: Any, dice: random.Random) -> None:
    model.resize_token_embeddings(model.config.vocab_size + 1, mean_resizing=False)


def tied(model: Any, dice: random.Random) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def plain_weight(module: Any) -> bool:
    return isinstance(vars(module)["_parameters"].get("weight"), nn.Parameter)


def parametrized(model: Any, dice: random.Random, how: Callable[[Any], None]) -> None:
    if plain_weight(module := matrix(model, dice)):
        how(module)


def unparametrized(model: Any, dice: random.Random) -> None:
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")


def attention(model: Any, dice: random.Random) -> None:
    model.set_attn_implementation(dice.choice(["sdpa", "eager"]))


def precision(model: Any, dice: random.Random) -> None:
    torch.set_float32_matmul_precision(dice.choice(["highest", "medium"]))


def exchanged(model: Any, dice: random.Random) -> None:
    one, other = dice.sample(list(model.model.layers), 2)
    one.mlp, other.mlp = other.mlp, one.mlp


def compiled(model: Any, dice: random.Random) -> None:
    layer(model, dice).input_layernorm.compile(backend="eager")


def functions(model: Any, dice: random.Random) -> None:
    for one in model.model.layers:
        if not isinstance(one.mlp, Scaled):
            one.mlp.act_fn = dice.choice([nn.ReLU(), nn.GELU(), nn.SiLU(), nn.LeakyReLU(dice.random())])


def write(name: str, by: Callable[[Any, random.Random], None]) -> Callable[[Any, random.Random], None]:
    """A change of one tensor, chosen at random."""

    @torch.no_grad()
    def change(model: Any, dice: random.Random) -> None:
        by(dice.choice([p for p in model.parameters() if p.dim() > 1]), dice)

    change.__name__ = name
    return change


CHANGES: dict[str, Callable[[Any, random.Random], None]] = {
    "in place": in_place,
    "in inference mode": in_inference_mode,
    "optimizer": optimizer,
    "state assigned": lambda m, d: state(m, d, True),
    "data added": write("data added", lambda p, d: p.data.add_(noise(p, d))),
    "data replaced": write("data replaced", lambda p, d: setattr(p, "data", p.data + noise(p, d))),
    "numpy": write("numpy", lambda p, d: p.detach().numpy().__iadd__(noise(p, d).numpy())),
    "swapped": exchanged,
    "shuffled": shuffled,
    "replaced": replaced,
    "doubled": doubled,
    "hook": hooked,
    "wrapped hook": wrapped_hook,
    "scaled": scaled,
    "resized": resized,
    "tied": tied,
    "weight norm": lambda m, d: parametrized(m, d, parametrizations.weight_norm),
    "own parametrization": lambda m, d: parametrized(
        m, d, lambda module: parametrize.register_parametrization(module, "weight", Negated())
    ),
    "unparametrized": unparametrized,
    "pruned": lambda m, d: parametrized(m, d, lambda module: prune.l1_unstructured(module, "weight", 0.4)),
    "rotary buffer": lambda m, d: (m.model.rotary_emb.inv_freq.mul_(d.choice([0.5, 2.0])), None)[1],
    "rotary scaling": lambda m, d: setattr(m.model.rotary_emb, "attention_scaling", d.choice([0.5, 1.0, 2.0])),
    "epsilon": lambda m, d: setattr(layer(m, d).input_layernorm, "variance_epsilon", d.choice([1e-6, 0.5])),
    "scaling": lambda m, d: setattr(layer(m, d).self_attn, "scaling", d.choice([0.1, 0.3, 1.0])),
    "activation": functions,
    "attention": attention,
    "precision": precision,
    "train and back": lambda m, d: (m.train(), m.eval(), None)[2],
    "compiled": compiled,
}
AFTER = {"unparametrized": "weight norm"}
"""What must have come before a change that takes something back."""


@contextmanager
def settings_kept() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_float32_matmul_precision(before)


QKV = ["q_proj", "k_proj", "v_proj"]
TASK = {"task_type": "CAUSAL_LM"}
TUNERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=QKV, init_lora_weights=False, **TASK),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=QKV, use_dora=True, init_lora_weights=False, **TASK),
    "rslora": lambda: peft.LoraConfig(r=4, target_modules=QKV, use_rslora=True, init_lora_weights=False, **TASK),
    "alora": lambda: peft.LoraConfig(
        r=4, target_modules=QKV, alora_invocation_tokens=[5], init_lora_weights=False, **TASK
    ),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **TASK),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=QKV, init_weights=False, **TASK),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=QKV, init_weights=False, **TASK),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules=QKV, init_weights=False, **TASK),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj"], init_weights=False, **TASK),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], init_weights=False, **TASK),
    "ln": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], **TASK),
    "hra": lambda: peft.HRAConfig(r=4, target_modules=QKV, init_weights=False, **TASK),
    "fourier": lambda: peft.FourierFTConfig(n_frequency=10, target_modules=["q_proj"], init_weights=False, **TASK),
    "vblora": lambda: peft.VBLoRAConfig(
        r=2, num_vectors=16, vector_length=8, topk=2, target_modules=["q_proj"], save_only_topk_weights=False, **TASK
    ),
    "llama-adapter": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, **TASK),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, prompt_tuning_init="RANDOM", **TASK),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **TASK),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, **TASK),
}
PROMPT_LEARNING = ("prompt tuning", "prefix tuning", "p-tuning")


def adapter_weights(model: Any, dice: random.Random) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad or "default" in name:
                weight.add_(noise(weight, dice, 0.5))


def scale(model: Any, dice: random.Random) -> None:
    for module in model.modules():
        if isinstance(module, BaseTunerLayer) and isinstance(getattr(module, "scaling", None), dict):
            for name in module.scaling:
                module.scaling[name] *= dice.choice([0.5, 3.0])


def rescaled_anew(model: Any, dice: random.Random) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling = {name: 5 * value for name, value in module.scaling.items()}


def second(model: Any, dice: random.Random) -> None:
    if "two" not in model.peft_config:
        model.add_adapter("two", model.peft_config["default"])
    model.set_adapter("two")


def loaded(model: Any, dice: random.Random) -> None:
    state = {name: value + noise(value, dice) for name, value in peft.get_peft_model_state_dict(model).items()}
    peft.set_peft_model_state_dict(model, state)


def deleted(model: Any, dice: random.Random) -> None:
    second(model, dice)
    model.delete_adapter("default")


STEPS: dict[str, Callable[[Any, random.Random], object]] = {
    "in place": adapter_weights,
    "loaded": loaded,
    "scale": scale,
    "scale anew": rescaled_anew,
    "merge": lambda m, d: m.merge_adapter(),
    "unmerge": lambda m, d: m.unmerge_adapter(),
    "first": lambda m, d: m.set_adapter("default"),
    "second": second,
    "deleted": deleted,
    "off": lambda m, d: m.base_model.disable_adapter_layers(),
    "on": lambda m, d: m.base_model.enable_adapter_layers(),
    "base": lambda m, d: in_place(m.get_base_model(), d),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_next_use_after_a_change_is_the_changed_models(name: str) -> None:
    dice, model, records = random.Random(1), tiny_llama(), list[Record]()
    with settings_kept():
        if name in AFTER:
            CHANGES[AFTER[name]](model, dice)
        with dejakv.attach(model, Numbers(), on_record=records.append) as cache:
            for change in (None, CHANGES[name]):
                if change is not None:
                    change(model, dice)
                for ids in [number_prompt(20, 0), number_prompt(14, 1)] * 2:
                    assert right(model, ids)
                    cache.flush()
    hits = [record.method == "exact" for record in records[:4]]
    assert hits == [False, False, True, True] or name in AFTER


@pytest.mark.parametrize("name", STEPS)
def test_the_next_use_after_a_change_of_an_adapter_is_the_changed_models(name: str) -> None:
    dice, records = random.Random(1), list[Record]()
    with settings_kept():
        model = peft.get_peft_model(tiny_llama(), TUNERS["lora"]()).eval()
        if name in ("unmerge", "on"):
            STEPS["merge" if name == "unmerge" else "off"](model, dice)
        with dejakv.attach(model, Numbers(), on_record=records.append) as cache:
            for change in (None, STEPS[name]):
                if change is not None:
                    change(model, dice)
                    model.eval()
                for _ in range(2):
                    assert right(model, number_prompt(20, 0))
                    cache.flush()
    methods = [record.method for record in records]
    assert methods == ["none", "exact"] * 2 or name == "first"


def spoil(returned: Any, dice: random.Random) -> None:
    """What a caller may do with the cache that it was given."""
    match dice.randrange(4):
        case 0:
            returned.crop(3 - returned.get_seq_length())
        case 1:
            for layer in returned.layers:
                layer.keys.mul_(-2)
                layer.values.data.fill_(3)
        case 2:
            returned.batch_repeat_interleave(2)
            returned.reorder_cache(torch.arange(returned.layers[0].keys.shape[0]).flip(0))
        case _:
            returned.reset()


def test_changes_one_after_another() -> None:
    """In an order drawn anew for each model; not every change can follow every other. The caller spoils what it is given."""
    for seed in range(soak_rounds()):
        dice, model = random.Random(seed), tiny_llama(seed)
        with settings_kept(), dejakv.attach(model, Numbers()) as cache:
            for name in dice.sample(list(CHANGES), len(CHANGES)):
                with contextlib.suppress(Exception):
                    CHANGES[name](model, dice)
                given = generated(model, number_prompt(16, 0), return_dict_in_generate=True)
                spoil(given[CACHE_NAME], dice)
                cache.flush()
                for beams in (1, dice.choice([1, 2])):
                    assert right(model, number_prompt(16, 0), num_beams=beams), name
                    cache.flush()


@pytest.mark.parametrize("tuner", TUNERS)
def test_an_adapter_of_any_kind_may_come_and_change(tuner: str) -> None:
    """Attached as the base model before the adapter is there; the wrapper and the base model generate in turns."""
    dice, base = random.Random(tuner), tiny_llama()
    with settings_kept(), dejakv.attach(base, Numbers()) as cache:
        model: Any = base
        for change in (None, "in place", dice.choice(["merge", "off", "scale"])):
            for through in (model, base):
                for _ in range(2):
                    assert right(base, number_prompt(16, 0), None if through is base else through)
                    cache.flush()
            if model is base:
                model = peft.get_peft_model(base, TUNERS[tuner]()).eval()
            elif change is not None:
                with contextlib.suppress(Exception):  # not every kind can be merged or scaled
                    STEPS[change](model, dice)
            model.eval()
        for through in (model, base):
            assert right(base, number_prompt(16, 0), None if through is base else through)
