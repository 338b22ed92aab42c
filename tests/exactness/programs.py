"""Random programs: a model that is changed while it is served, in many ways, and PEFT adapters of 18 kinds.

A program is a sequence of changes and of prompts that come again. Each answer must be what the model answers alone at
that moment. A test of other arguments of `generate` gives its own `options`.
"""

import contextlib
import copy
import functools
import random
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from tiny import Numbers, alone, asked, prompt, tiny
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import dejakv
from dejakv.records import Record

Options = Callable[[random.Random], dict[str, Any]]


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


def removed(model: Any, dice: random.Random) -> None:
    layers(model, lambda held: held[:-1] if len(held) > 2 else held)


def hooked(model: Any, dice: random.Random) -> None:
    direction = noise(torch.empty(32), dice, 3.0)
    layer(model, dice).mlp.register_forward_hook(lambda _module, _given, out: out + direction.to(out.dtype))


def wrapped_hook(model: Any, dice: random.Random) -> None:
    scale = dice.choice([0.2, 3.0])

    @functools.wraps(nn.Module.forward)
    def hook(_module: Any, _given: Any, out: Any) -> Any:
        return out * scale

    layer(model, dice).mlp.register_forward_hook(hook)


def pre_hooked(model: Any, dice: random.Random) -> None:
    layer(model, dice).mlp.register_forward_pre_hook(lambda _module, given: (2 * given[0], *given[1:]))


def unhooked(model: Any, dice: random.Random) -> None:
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


def wrapped_forward(model: Any, dice: random.Random) -> None:
    mlp, scale = layer(model, dice).mlp, dice.choice([0.3, 2.0])
    own = type(mlp).forward

    @functools.wraps(own)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return scale * own(mlp, x)

    mlp.forward = forward


def own_forward(model: Any, dice: random.Random) -> None:
    for module in model.modules():
        vars(module).pop("forward", None)


def subclassed(model: Any, dice: random.Random) -> None:
    mlp, scale = layer(model, dice).mlp, dice.choice([0.3, 2.0])
    kind = type(mlp)
    mlp.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, x: scale * kind.forward(self, x)})


def own_class(model: Any, dice: random.Random) -> None:
    for one in model.model.layers:
        if type(one.mlp) not in (Scaled, nn.Identity) and type(one.mlp).__bases__ != (nn.Module,):
            one.mlp.__class__ = type(one.mlp).__bases__[-1]


def scaled(model: Any, dice: random.Random) -> None:
    one = layer(model, dice)
    one.mlp = Scaled(one.mlp, 2.0)


def rescaled(model: Any, dice: random.Random) -> None:
    for module in model.modules():
        if isinstance(module, Scaled):
            module.scale = dice.choice([0.5, 1.5, 3.0])


def unscaled(model: Any, dice: random.Random) -> None:
    for one in model.model.layers:
        while isinstance(one.mlp, Scaled):
            one.mlp = one.mlp.inner


def there_and_back(model: Any, dice: random.Random) -> None:
    model.to(torch.bfloat16)
    model.to(torch.float32)


def resized(model: Any, dice: random.Random) -> None:
    model.resize_token_embeddings(model.config.vocab_size + 1, mean_resizing=False)


def tied(model: Any, dice: random.Random) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def untied(model: Any, dice: random.Random) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + noise(model.lm_head.weight, dice))


def plain_weight(module: Any) -> bool:
    return isinstance(vars(module)["_parameters"].get("weight"), nn.Parameter)


def parametrized(model: Any, dice: random.Random, how: Callable[[Any], None]) -> None:
    if plain_weight(module := matrix(model, dice)):
        how(module)


def unparametrized(model: Any, dice: random.Random) -> None:
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")


def unpruned(model: Any, dice: random.Random) -> None:
    for module in model.modules():
        if hasattr(module, "weight_mask"):
            prune.remove(module, "weight")


def hung(model: Any, dice: random.Random, value: Any) -> None:
    layer(model, dice).held = value


def hung_changed(model: Any, dice: random.Random) -> None:
    for one in model.model.layers:
        held = getattr(one, "held", None)
        if isinstance(held, dict):
            held["a"]["b"] = torch.tensor(dice.random())
        elif isinstance(held, list):
            held[0] = [dice.random()]
        elif isinstance(held, np.ndarray):
            held[0] = dice.random()


def attention(model: Any, dice: random.Random) -> None:
    model.set_attn_implementation(dice.choice(["sdpa", "eager"]))


def precision(model: Any, dice: random.Random) -> None:
    torch.set_float32_matmul_precision(dice.choice(["highest", "medium"]))


def transposed(model: Any, dice: random.Random) -> None:
    weight = layer(model, dice).mlp.up_proj
    square = layer(model, dice).self_attn.q_proj
    if plain_weight(square) and plain_weight(weight):
        square.weight.data = square.weight.data.T


def exchanged(model: Any, dice: random.Random) -> None:
    one, other = dice.sample(list(model.model.layers), 2)
    one.mlp, other.mlp = other.mlp, one.mlp


def compiled(model: Any, dice: random.Random) -> None:
    layer(model, dice).input_layernorm.compile(backend="eager")


def uncompiled(model: Any, dice: random.Random) -> None:
    for module in model.modules():
        vars(module).pop("_compiled_call_impl", None)


def functions(model: Any, dice: random.Random) -> None:
    for one in model.model.layers:
        if not isinstance(one.mlp, Scaled):
            one.mlp.act_fn = dice.choice([nn.ReLU(), nn.GELU(), nn.SiLU(), nn.LeakyReLU(dice.random())])


def window(model: Any, dice: random.Random) -> None:
    for one in model.model.layers:
        one.self_attn.sliding_window = dice.choice([None, 8])


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
    "state loaded": lambda m, d: state(m, d, False),
    "state assigned": lambda m, d: state(m, d, True),
    "data added": write("data added", lambda p, d: p.data.add_(noise(p, d))),
    "data copied": write("data copied", lambda p, d: p.data.copy_(noise(p, d))),
    "data replaced": write("data replaced", lambda p, d: setattr(p, "data", p.data + noise(p, d))),
    "numpy": write("numpy", lambda p, d: p.detach().numpy().__iadd__(noise(p, d).numpy())),
    "negated": write("negated", lambda p, d: p.neg_()),
    "rows": write("rows", lambda p, d: p[: len(p) // 2].mul_(2)),
    "rolled": write("rolled", lambda p, d: p.copy_(p.roll(1, 0))),
    "frozen": lambda m, d: (m.requires_grad_(d.random() < 0.5), None)[1],
    "transposed": transposed,
    "swapped": exchanged,
    "shuffled": shuffled,
    "replaced": replaced,
    "doubled": doubled,
    "removed": removed,
    "hook": hooked,
    "wrapped hook": wrapped_hook,
    "pre-hook": pre_hooked,
    "unhooked": unhooked,
    "plain forward": lambda m, d: setattr(
        layer(m, d).self_attn, "forward", lambda hidden_states, **_: (hidden_states, None)
    ),
    "wrapped forward": wrapped_forward,
    "own forward": own_forward,
    "subclass": subclassed,
    "own class": own_class,
    "scaled": scaled,
    "rescaled": rescaled,
    "unscaled": unscaled,
    "bf16 and back": there_and_back,
    "resized": resized,
    "tied": tied,
    "untied": untied,
    "weight norm": lambda m, d: parametrized(m, d, parametrizations.weight_norm),
    "spectral norm": lambda m, d: parametrized(m, d, parametrizations.spectral_norm),
    "own parametrization": lambda m, d: parametrized(
        m, d, lambda module: parametrize.register_parametrization(module, "weight", Negated())
    ),
    "unparametrized": unparametrized,
    "pruned": lambda m, d: parametrized(m, d, lambda module: prune.l1_unstructured(module, "weight", 0.4)),
    "pruned at random": lambda m, d: parametrized(
        m, d, lambda module: prune.random_unstructured(module, "weight", 0.4)
    ),
    "unpruned": unpruned,
    "rotary buffer": lambda m, d: (m.model.rotary_emb.inv_freq.mul_(d.choice([0.5, 2.0])), None)[1],
    "rotary replaced": lambda m, d: m.model.rotary_emb.register_buffer(
        "inv_freq", m.model.rotary_emb.inv_freq * d.choice([0.5, 2.0]), persistent=False
    ),
    "rotary scaling": lambda m, d: setattr(m.model.rotary_emb, "attention_scaling", d.choice([0.5, 1.0, 2.0])),
    "epsilon": lambda m, d: setattr(layer(m, d).input_layernorm, "variance_epsilon", d.choice([1e-6, 0.5])),
    "scaling": lambda m, d: setattr(layer(m, d).self_attn, "scaling", d.choice([0.1, 0.3, 1.0])),
    "activation": functions,
    "window": window,
    "attention": attention,
    "precision": precision,
    "dictionary": lambda m, d: hung(m, d, {"a": {"b": torch.tensor(1.0)}}),
    "list": lambda m, d: hung(m, d, [[1.0]]),
    "array": lambda m, d: hung(m, d, np.zeros(3)),
    "namespace": lambda m, d: hung(m, d, types.SimpleNamespace(a=d.random())),
    "below a container": hung_changed,
    "generation config": lambda m, d: setattr(m.generation_config, "temperature", d.choice([None, 1.0])),
    "train and back": lambda m, d: (m.train(), m.eval(), None)[2],
    "compiled": compiled,
    "uncompiled": uncompiled,
}
AFTER = {
    "unhooked": "hook", "own forward": "wrapped forward", "own class": "subclass", "rescaled": "scaled", "unscaled": "scaled",
    "untied": "tied", "unparametrized": "weight norm", "unpruned": "pruned", "below a container": "dictionary",
    "uncompiled": "compiled",
}  # fmt: skip
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


class Tally:
    """Answers, hits and wrong answers of programs."""

    def __init__(self) -> None:
        self.answers = self.hits = 0
        self.wrong: list[str] = []
        self.hits_of: Counter[str] = Counter()

    def __str__(self) -> str:
        return f"{self.answers:,} answers, {self.hits:,} hits, {len(self.wrong)} wrong"


def greedy(_: random.Random) -> dict[str, Any]:
    return {}


def compare(tally: Tally, attached: Any, through: Any, dice: random.Random, done: str, options: Options) -> None:
    """Asks one of a few prompts, as it is and longer, of the attached model and of the model alone."""
    ids = prompt(12 + 4 * dice.randrange(4), dice.randrange(2))
    given = options(dice)
    try:
        want = alone(attached, lambda: asked(through, ids, **given))
    except Exception:
        with contextlib.suppress(Exception):
            asked(through, ids, **given)
            tally.wrong.append(f"{done}: the model alone fails")
        return
    got = asked(through, ids, **given)
    tally.answers += 1
    if got.shape != want.shape or not bool((got == want).all()):
        tally.wrong.append(done)


def changed_model(seed: int, tally: Tally, options: Options = greedy, changes: int = 8) -> None:
    """A tiny Llama and `changes` changes; four answers after each."""
    dice = random.Random(seed)
    model = tiny(seed)
    records: list[Record] = []
    done = f"seed {seed}"
    with settings_kept(), dejakv.attach(model, Numbers(), on_record=records.append) as cache:
        for _ in range(changes + 1):
            for _ in range(4):
                compare(tally, model, model, dice, done, options)
                if dice.random() < 0.7:
                    cache.flush()
            name = dice.choice(list(CHANGES))
            with contextlib.suppress(Exception):  # not every change can follow every other
                CHANGES[name](model, dice)
            done = f"{done}; {name}"
    tally.hits += sum(record.provenance.startswith("hit") for record in records)


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


def adapted_model(tuner: str, seed: int, tally: Tally, options: Options = greedy, changes: int = 6) -> None:
    """A tiny Llama with an adapter, attached as the wrapper or as the base model; four answers after each change."""
    dice = random.Random(f"{tuner}{seed}")
    make = TUNERS[tuner]
    records: list[Record] = []
    with settings_kept():
        base = tiny(seed)
        early = dice.random() < 0.5  # attached before the adapter is there
        model = None if early else peft.get_peft_model(base, make()).eval()
        wrapper = model is not None and tuner not in PROMPT_LEARNING and dice.random() < 0.5
        done = f"{tuner} {seed} {'wrapper' if wrapper else 'base'} {'early' if early else 'late'}"
        attached = model if wrapper else base
        with dejakv.attach(attached, Numbers(), on_record=records.append) as cache:
            if model is None:
                compare(tally, base, base, dice, done, options)
                cache.flush()
                model = peft.get_peft_model(base, make()).eval()
            for _ in range(changes + 1):
                for _ in range(4):
                    through = model if dice.random() < 0.8 else attached
                    compare(tally, attached, through, dice, done, options)
                    if dice.random() < 0.7:
                        cache.flush()
                name = dice.choice(list(STEPS))
                done = f"{done}; {name}"
                with contextlib.suppress(
                    Exception
                ):  # not every kind of adapter can be merged, scaled or joined by another
                    STEPS[name](model, dice)
                model.eval()
    hits = sum(record.provenance.startswith("hit") for record in records)
    tally.hits += hits
    tally.hits_of[tuner] += hits
