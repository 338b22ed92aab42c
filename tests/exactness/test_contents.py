"""A model is what its code, classes and values hold: nothing is believed for its name, and a change and its way back are seen."""

import gc
import random
import threading
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import peft
import pytest
import torch
from tests.conftest import soak_rounds, soak_seed
from tests.tiny_models import Numbers, generated, number_prompt, right, tiny_llama
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.llama import modeling_llama

import dejakv
from dejakv.records import Record

PROMPTS = [number_prompt(20, 0), number_prompt(14, 1)]
LlamaMLP, LlamaAttention = modeling_llama.LlamaMLP, modeling_llama.LlamaAttention


def compiled(source: str, where: Any = modeling_llama, file: str = "<string>") -> Any:
    """A function compiled from a string in a library's namespace."""
    names = dict[str, Any]()
    exec(compile(source, file, "exec"), vars(where), names)
    return next(iter(names.values()))


def mlp_forward(scale: float, file: str = "<string>") -> Any:
    return compiled(
        "def forward(self, x):\n"
        f"    return {scale} * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\n",
        file=file,
    )


def of_class(scale: float, module: str) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return scale * LlamaMLP.forward(self, x)

    return type("LlamaMLP", (LlamaMLP,), {"forward": forward, "__module__": module})


def on_instances(model: Any, forward: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = types.MethodType(forward, layer.mlp)


def classes(model: Any, kind: type) -> None:
    for layer in model.model.layers:
        layer.mlp.__class__ = kind


Patch = Callable[[Any, pytest.MonkeyPatch], object]
PATCHES: dict[str, Patch] = {
    "code from a string, on the class": lambda m, p: p.setattr(LlamaMLP, "forward", mlp_forward(3.0)),
    "code that names the library's file": lambda m, p: p.setattr(
        LlamaMLP, "forward", mlp_forward(3.0, modeling_llama.__file__)
    ),
    "code from a string, on instances": lambda m, p: on_instances(m, mlp_forward(3.0)),
    "code from a string, in the module": lambda m, p: p.setattr(
        modeling_llama, "rotate_half", compiled("def rotate_half(x):\n    return 0.5 * x\n")
    ),
    "code exchanged in a function": lambda m, p: p.setattr(LlamaMLP.forward, "__code__", mlp_forward(3.0).__code__),
    "a function of torch": lambda m, p: p.setattr(nn.functional, "silu", nn.functional.relu),
    "another function of torch": lambda m, p: p.setattr(
        nn.functional, "silu", compiled("def silu(x, inplace=False):\n    return x * 0.3\n", nn.functional)
    ),
    "a class of types": lambda m, p: classes(m, of_class(3.0, "types")),
    "a class of collections": lambda m, p: classes(m, of_class(3.0, "collections")),
    "a class of the library": lambda m, p: classes(m, of_class(3.0, LlamaMLP.__module__)),
    "a new class": lambda m, p: classes(
        m, types.new_class("Mine", (LlamaMLP,), {}, lambda names: names.update(forward=mlp_forward(3.0)))
    ),
    "a value on a library's class": lambda m, p: (
        [vars(layer.self_attn).pop("scaling") for layer in m.model.layers],
        p.setattr(LlamaAttention, "scaling", 0.9, raising=False),
    ),
    "a value on nn.Module": lambda m, p: (
        [vars(layer.self_attn).pop("scaling") for layer in m.model.layers],
        p.setattr(nn.Module, "scaling", 0.9, raising=False),
    ),
}


class Served:
    def __init__(self, model: Any, **options: Any) -> None:
        self.model, self.records = model, list[Record]()
        self.context = dejakv.attach(model, Numbers(), on_record=self.records.append, **options)

    def __enter__(self) -> "Served":
        self.cache = self.context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)

    def ask(self) -> tuple[int, int]:
        """Wrong answers, and hits."""
        self.records.clear()
        wrong = sum(not right(self.model, ids) for ids in PROMPTS)
        self.cache.flush()
        return wrong, sum(record.method == "exact" for record in self.records)


@pytest.mark.parametrize("name", PATCHES)
def test_code_and_classes_count_by_content(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Served(tiny_llama()) as served:
        assert [served.ask(), served.ask()] == [(0, 0), (0, 2)]
        PATCHES[name](served.model, monkeypatch)
        assert served.ask() == (0, 0)
        assert served.ask()[0] == 0


@pytest.mark.parametrize("name", PATCHES)
def test_they_count_after_a_restart(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    config = dejakv.SemanticCacheConfig(semantic_text=False, cache_dir=str(tmp_path))
    with Served(tiny_llama(), config=config) as served:
        served.ask()
    model = tiny_llama()
    PATCHES[name](model, monkeypatch)
    with Served(model, config=config) as served:
        assert served.ask() == (0, 0)
    monkeypatch.undo()
    with Served(tiny_llama(), config=config) as served:
        assert served.ask() == (0, 2)


SETTINGS: dict[str, Callable[[], Any]] = {
    "sdpa math": lambda: sdpa_kernel(SDPBackend.MATH),
    "no mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "no deterministic": lambda: Deterministic(),
}


class Deterministic:
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: Any) -> None:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_chooses_kernels_counts(name: str) -> None:
    with Served(tiny_llama()) as served:
        served.ask()
        with SETTINGS[name]():
            assert [served.ask(), served.ask()] == [(0, 0), (0, 2)]
        assert served.ask() == (0, 2)


def lora() -> Any:
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(tiny_llama(), settings).eval()


class Switches:
    """A streamer, logits processor or stopping criterion that switches the adapter off at its first call and on at the next."""

    def __init__(self, model: Any, off: Callable[[Any], None], on: Callable[[Any], None]) -> None:
        self.model, self.calls, self.off, self.on = model, 0, off, on

    def switch(self) -> None:
        self.calls += 1
        if self.calls <= 2:
            (self.off if self.calls == 1 else self.on)(self.model)

    def put(self, _: Any) -> None:
        self.switch()

    def end(self) -> None:
        pass

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.switch()
        return scores


def scaled(factor: float) -> Callable[[Any], None]:
    def scale(model: Any) -> None:
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] *= factor

    return scale


WAYS: dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]] = {
    "adapter": (
        lambda m: m.base_model.disable_adapter_layers(),
        lambda m: m.base_model.enable_adapter_layers(),
    ),
    "scale": (scaled(0.25), scaled(4.0)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["streamer", "logits_processor"])
def test_state_of_a_model_changed_and_changed_back_is_not_kept(kind: str, way: str) -> None:
    with Served(lora()) as served:
        caller: Any = Switches(served.model, *WAYS[way])
        generated(served.model, PROMPTS[0], **{kind: caller if kind == "streamer" else [caller]})
        assert caller.calls >= 2
        served.cache.flush()
        assert served.ask() == (0, 0) or kind == "logits_processor"
        assert served.ask() == (0, 2)


def test_state_of_a_model_that_a_thread_switches_is_not_kept() -> None:
    """The thread runs between two forwards, at a point that the test chooses."""
    with Served(lora()) as served:
        base = served.model.get_base_model()

        def elsewhere() -> None:
            with served.model.disable_adapter():
                pass

        class Between(Switches):
            def switch(self) -> None:
                thread = threading.Thread(target=elsewhere)
                thread.start()
                thread.join()

        generated(served.model, PROMPTS[0], streamer=Between(base, elsewhere, elsewhere))
        served.cache.flush()
        assert served.ask() == (0, 0)
        assert served.ask() == (0, 2)


SCALE = 1.0
TABLE = {"scale": 1.0}


class Values:
    scale = 1.0

    @staticmethod
    def of(x: Any) -> Any:
        return x * Values.scale


def helped(x: Any) -> Any:
    return x


def own_forward(scale: float) -> Any:
    def forward(self: Any, x: torch.Tensor, *, by: float = 1.0) -> torch.Tensor:
        return helped(Values.of(x)) * SCALE * TABLE["scale"] * scale * by * LlamaMLP.forward(self, x)

    return forward


Change = Callable[[Any, random.Random, pytest.MonkeyPatch], object]


def names(where: Any, name: str) -> Change:
    return lambda m, d, p: p.setattr(where, name, d.choice([0.5, 1.5, 2.5]))


def here() -> Any:
    import sys

    return sys.modules[__name__]


RANDOM: dict[str, Change] = {
    "global": lambda m, d, p: p.setattr(here(), "SCALE", d.choice([0.5, 1.5, 2.5])),
    "table": lambda m, d, p: p.setitem(TABLE, "scale", d.choice([0.5, 1.5, 2.5])),
    "class value": names(Values, "scale"),
    "class method": lambda m, d, p: p.setattr(Values, "of", staticmethod(lambda x, by=d.random(): x * by)),
    "helper": lambda m, d, p: p.setattr(here(), "helped", lambda x, by=d.random(): x + by),
    "helper's code": lambda m, d, p: p.setattr(
        helped, "__code__", compiled(f"def helped(x):\n    return x * {d.random()}\n").__code__
    ),
    "cell": lambda m, d, p: setattr(m.model.layers[0].mlp.forward.__func__.__closure__[0], "cell_contents", d.random()),
    "keyword default": lambda m, d, p: m.model.layers[0].mlp.forward.__func__.__kwdefaults__.update(by=d.random()),
    "own forward": lambda m, d, p: on_instances(m, own_forward(d.random())),
    "library forward": lambda m, d, p: p.setattr(LlamaMLP, "forward", mlp_forward(d.random())),
    "library function": lambda m, d, p: p.setattr(
        modeling_llama, "rotate_half", compiled(f"def rotate_half(x):\n    return x * {d.random()}\n")
    ),
    "silu": lambda m, d, p: p.setattr(
        nn.functional, "silu", compiled(f"def silu(x, inplace=False):\n    return x * {d.random()}\n", nn.functional)
    ),
    "class": lambda m, d, p: classes(m, of_class(d.random(), d.choice(["types", "builtins", "torch", __name__]))),
    "metaclass": lambda m, d, p: classes(
        m, type("Meta", (type,), {"by": d.random()})("Mine", (LlamaMLP,), {"forward": LlamaMLP.forward})
    ),
    "attribute": lambda m, d, p: setattr(m.model.layers[1].self_attn, "scaling", d.random()),
    "hook": lambda m, d, p: m.model.layers[2].register_forward_hook(
        lambda _module, _given, out, by=d.random(): out * by
    ),
    "nothing": lambda m, d, p: None,
}


def test_changes_drawn_at_random_are_seen_or_refused_or_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(soak_seed())
    for _ in range(4 * soak_rounds()):
        with monkeypatch.context() as patch:
            model = tiny_llama(dice.randrange(99))
            on_instances(model, own_forward(1.0))
            with Served(model) as served:
                assert served.ask()[0] == 0
                for name in dice.sample(list(RANDOM), 8):
                    if name in ("cell", "keyword default") and "forward" not in vars(model.model.layers[0].mlp):
                        continue
                    RANDOM[name](model, dice, patch)
                    assert served.ask()[0] == 0, name
                    assert served.ask()[0] == 0, name


def test_nn_module_has_its_methods_again_once_no_model_is_attached() -> None:
    """In a process of its own: other tests' engines may be alive in this one."""
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        assert pool.submit(module_methods_around_runs).result() == ["original", "theirs"]


def module_methods_around_runs() -> list[str]:
    """Whose method `nn.Module.__setattr__` is after a run, and after a run within which another library put one around ours."""
    original: Any = nn.Module.__setattr__
    owners = {original: "original"}

    def owner() -> str:
        gc.collect()
        return owners.get(nn.Module.__setattr__, "ours")

    with Served(tiny_llama(1)) as served:
        served.ask()
        assert owner() == "ours"
    del served
    after_a_run = owner()

    with Served(tiny_llama(2)) as served:
        served.ask()
        ours: Any = nn.Module.__setattr__

        def theirs(module: nn.Module, name: str, value: Any) -> None:
            ours(module, name, value)

        nn.Module.__setattr__ = theirs  # type: ignore[method-assign]
        owners[theirs] = "theirs"
        served.ask()
    del served
    return [after_a_run, owner()]
