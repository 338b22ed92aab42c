"""A model is served from state where all of it can be described: its code, classes and values."""

import functools
import importlib
import logging
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from tests.services import python
from tests.tiny_models import LLAMA_SHAPE, Numbers, number_prompt, right, tiny_llama
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import dejakv
from dejakv.config import SemanticCacheConfig
from dejakv.records import Record

PROMPTS = [number_prompt(20, seed) for seed in range(6)]


class Steered:
    """Serves a model and asks the prompts, as often as wanted."""

    def __init__(self, model: Any, through: Any = None, **options: Any) -> None:
        self.model, self.through, self.records = model, through, list[Record]()
        self._context = dejakv.attach(model, Numbers(), on_record=self.records.append, **options)

    def __enter__(self) -> "Steered":
        self.cache = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def ask(self) -> tuple[int, int]:
        """Wrong answers and hits."""
        self.records.clear()
        wrong = sum(not right(self.model, ids, self.through) for ids in PROMPTS)
        self.cache.flush()
        return wrong, sum(record.method == "exact" for record in self.records)

    def reason(self) -> str:
        return self.records[-1].reason


def steer(model: Any, strength: float) -> None:
    layer = model.model.layers[1]
    own = type(layer).forward.__get__(layer)

    @functools.wraps(type(layer).forward)
    def forward(*given: Any, **named: Any) -> Any:
        out = own(*given, **named)
        return (strength * out[0], *out[1:]) if isinstance(out, tuple) else strength * out

    layer.forward = forward


def test_code_under_functools_wraps_is_not_taken_for_the_librarys() -> None:
    model = tiny_llama()
    with Steered(model) as served:
        assert served.ask() == (0, 0)
        assert served.ask() == (0, 6)
        for strength in (0.3, 4.0):
            steer(model, strength)
            assert served.ask() == (0, 0)
            assert served.ask() == (0, 6)
        del model.model.layers[1].forward
        served.ask()
        assert served.ask() == (0, 6)


def test_code_behind_accelerates_hooks_counts() -> None:
    model = tiny_llama()
    with Steered(model) as served:
        served.ask()
        steer(model, 0.3)
        add_hook_to_module(model.model.layers[1], ModelHook())
        assert served.ask() == (0, 0)
        assert served.ask() == (0, 6)
        del model.model.layers[1]._old_forward, model.model.layers[1].forward


@pytest.mark.parametrize("place", ["forward", "__call__"])
def test_a_library_class_that_was_patched_is_noticed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_llama.LlamaMLP.forward

    @functools.wraps(own)
    def patched(self: Any, x: torch.Tensor) -> torch.Tensor:
        return 3.0 * own(self, x)

    with Steered(tiny_llama()) as served:
        served.ask()
        monkeypatch.setattr(modeling_llama.LlamaMLP, place, patched, raising=False)
        assert served.ask() == (0, 0)


def test_an_attention_function_that_was_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def mine(*given: Any, **named: Any) -> Any:
        out, weights = own(*given, **named)
        return 3.0 * out, weights

    with Steered(tiny_llama()) as served:
        served.ask()
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", mine)
        assert served.ask() == (0, 0)


def own_class(scale: float) -> type:
    """A class as a notebook's cell defines it again and again."""
    source = f"""
class Mine(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp
    def forward(self, x):
        return {scale} * self.mlp(x)
"""
    names = {"nn": nn, "__name__": "__main__"}
    exec(source, names)
    return names["Mine"]


def replace_mlps(model: Any, kind: Any) -> None:
    for layer in model.model.layers:
        layer.mlp = kind(getattr(layer.mlp, "mlp", layer.mlp))


def test_what_cannot_be_described_is_computed_in_full_and_named_once_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_llama()
    model.model.layers[0].mlp.held = torch.Generator()
    with caplog.at_level(logging.WARNING, "dejakv"), Steered(model) as served:
        assert served.ask() == (0, 0)
        assert served.ask() == (0, 0)
    assert served.reason() == "model.layers.0.mlp.held holds a torch._C.Generator, whose content cannot be read"
    assert [record.getMessage() for record in caplog.records] == [f"nothing is reused: {served.reason()}"]


def test_ones_own_class_is_reused_and_its_code_counts() -> None:
    model = tiny_llama()
    replace_mlps(model, own_class(2.0))
    with Steered(model) as served:
        assert served.ask() == (0, 0)
        assert served.ask() == (0, 6)
        replace_mlps(model, own_class(3.0))  # the cell was edited and run again
        assert served.ask() == (0, 0)
        assert served.ask() == (0, 6)
        type(model.model.layers[0].mlp).forward = lambda self, x: 5.0 * self.mlp(x)
        assert served.ask() == (0, 0)
        replace_mlps(model, own_class(2.0))
        served.ask()
        assert served.ask() == (0, 6), "what was stored under the first code is found again"


def test_ones_own_hook_counts() -> None:
    model = tiny_llama()
    with Steered(model) as served:
        served.ask()
        handle = model.model.layers[1].mlp.register_forward_hook(lambda _module, _given, out: 3.0 * out)
        assert served.ask() == (0, 0)
        assert served.ask() == (0, 6)
        handle.remove()
        assert served.ask() == (0, 6)


def test_an_edited_file_beside_it_finds_nothing_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the class calls in it is never looked into: its source counts."""
    code = tmp_path / "code"
    code.mkdir()
    monkeypatch.syspath_prepend(code)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (code / "scaled_mlp.py").write_text(
        "import torch, scale_of_mlp\n"
        "class Scaled(torch.nn.Module):\n"
        "    def __init__(self, mlp):\n"
        "        super().__init__()\n"
        "        self.mlp = mlp\n"
        "    def forward(self, x):\n"
        "        return scale_of_mlp.scaled(self.mlp(x))\n"
    )
    config = SemanticCacheConfig(semantic_text=False, cache_dir=str(tmp_path / "cache"))
    found: list[tuple[int, int]] = []
    for scale in (2.0, 3.0, 2.0):
        (code / "scale_of_mlp.py").write_text(f"def scaled(x):\n    return {scale} * x\n")
        for name in ("scaled_mlp", "scale_of_mlp"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        model = tiny_llama()
        replace_mlps(model, importlib.import_module("scaled_mlp").Scaled)
        with Steered(model, config=config) as served:
            found.append(served.ask())
    assert found == [(0, 0), (0, 0), (0, 6)]


class Function(TorchFunctionMode):
    def __torch_function__(self, f: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = f(*args, **(kwargs or {}))
        return out * 3.0 if f is torch.nn.functional.silu else out


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, f: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = f(*args, **(kwargs or {}))
        return out * 3.0 if "silu" in str(f) else out


@pytest.mark.parametrize("mode", [Function, Dispatch])
def test_torch_modes_go_to_the_model(mode: Any) -> None:
    with Steered(tiny_llama()) as served:
        served.ask()
        with mode():
            assert served.ask() == (0, 0)
            assert "mode is on" in served.reason()
        assert served.ask() == (0, 6)


def test_a_default_device_is_no_mode_that_counts() -> None:
    with torch.device("cpu"), Steered(tiny_llama()) as served:
        served.ask()
        assert served.ask() == (0, 6)


def test_torch_compile_is_reused() -> None:
    # Not for the whole file: its other models are those of a process that compiles nothing.
    from torch._dynamo.utils import counters

    torch.compiler.reset()  # else what this process compiled before counts towards the limit of compilations
    model = tiny_llama()
    model.model.layers[0].mlp.compile(backend="eager")
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    with Steered(model) as served:
        assert served.ask() == (0, 0)
        # Prompts during which the model is compiled are not stored. When that ends is torch's affair: it counts the frames that it takes.
        for _ in range(20):
            frames = counters["frames"]["total"]
            assert served.ask()[0] == 0
            if counters["frames"]["total"] == frames:
                break
        assert served.ask() == (0, 6)


COMPILES_ELSEWHERE = """
import torch
from dejakv import attach
from dejakv.models import load
model, tokenizer = load("docs-lm")
inputs = tokenizer("<s> ann lives in rome . <q> where does ann live ? <a>", return_tensors="pt")
methods = []
with attach(model, tokenizer, on_record=lambda record: methods.append(record.method)):
    model.generate(**inputs, max_new_tokens=2)
    torch.compile(torch.nn.Linear(4, 4), backend="eager")(torch.ones(1, 4))
    model.generate(**inputs, max_new_tokens=2)
print(methods)
"""
"""The first `torch.compile` of a process replaces methods of `nn.Module`, so it takes a process of its own."""


def test_a_first_compilation_elsewhere_in_the_process_costs_no_hit() -> None:
    done = python("-c", COMPILES_ELSEWHERE)
    assert done.stdout.split() == ["['none',", "'exact']"], done.stdout + done.stderr[-2000:]


def test_after_a_restart_the_same_weights_with_another_alpha_find_nothing(tmp_path: Path) -> None:
    config = SemanticCacheConfig(semantic_text=False, cache_dir=str(tmp_path / "cache"))
    found: list[tuple[int, int]] = []
    for alpha in (16, 64, 16):
        lora = peft.LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        with Steered(peft.get_peft_model(tiny_llama(), lora).eval(), config=config) as served:
            found.append(served.ask())
    assert found == [(0, 0), (0, 0), (0, 6)]


PROMPT_LEARNING = {
    "prompt tuning": lambda: peft.PromptTuningConfig(
        num_virtual_tokens=4, prompt_tuning_init="RANDOM", task_type="CAUSAL_LM"
    ),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, task_type="CAUSAL_LM"),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
}


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
# peft 0.21 gives its prefix under the former name, beside the cache that transformers 5.24 makes.
@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache`")
@pytest.mark.parametrize("kind", PROMPT_LEARNING)
def test_prompt_learning_around_an_attached_model_is_computed_in_full(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    base = tiny_llama()
    wrapper = peft.get_peft_model(base, PROMPT_LEARNING[kind]()).eval()
    with caplog.at_level(logging.ERROR), Steered(base, through=wrapper) as served:
        assert served.ask() == (0, 0)
        assert served.ask() == (0, 0)
        assert "which is no part of the model" in served.reason()
        with torch.no_grad():
            for parameter in wrapper.prompt_encoder.parameters():
                parameter.add_(1.0)
        assert served.ask() == (0, 0)
        served.through = None
        served.ask()
        served.ask()
        assert served.ask() == (0, 6), "the base model itself is served as ever"
    assert not caplog.records, "no traceback for a prompt"


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM
from .helper import scale


class MineConfig(LlamaConfig):
    model_type = "mine"


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = scale(out.logits)
        return out
"""


def remote(folder: Path, factor: float) -> Any:
    """A model with code of its own, as `trust_remote_code` loads it."""
    if not (folder / "config.json").exists():
        tiny_llama(**LLAMA_SHAPE).save_pretrained(folder)
        text = (folder / "config.json").read_text()
        text = text.replace('"model_type": "llama"', '"model_type": "mine", "auto_map": {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}')  # fmt: skip
        (folder / "config.json").write_text(text)
    (folder / "helper.py").write_text(f"def scale(x):\n    return {factor} * x\n")
    (folder / "modeling_mine.py").write_text(REMOTE)
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()


def test_a_model_with_remote_code_is_reused_and_its_source_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    config = SemanticCacheConfig(semantic_text=False, cache_dir=str(tmp_path / "cache"))
    found: list[Any] = []
    for factor in (1.0, -1.0, 1.0):
        model = remote(tmp_path / "mine", factor)
        assert type(model).__module__.startswith("transformers_modules.")
        with Steered(model, config=config) as served:
            found += [served.ask(), served.ask()]
            assert served.records[-1].reason == ""
        for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
            del sys.modules[name]
    assert found == [(0, 0), (0, 6), (0, 0), (0, 6), (0, 6), (0, 6)]
