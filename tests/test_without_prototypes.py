"""The core works where `dejakv/prototypes/` is missing: in a process that cannot import it."""

import json

import pytest
from tests.services import python

HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:2] == ["dejakv", "prototypes"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""

CORE = (
    HIDE
    + """
import json
from dejakv import Pipeline, Request, Sampling, SemanticCacheConfig, TransformersEngine, build_cache
from dejakv.errors import DejaKVError

engine = TransformersEngine.from_pretrained("docs-lm")
facts = " ".join(f"{name} lives in Rome." for name in ("Ann", "Bob", "Eve", "Dan", "Tom", "Mia", "Leo", "Zoe") * 6)

def prompt(question, first="Nobody knows why."):
    return f"<s> {first} {facts} <q> {question} <a>"

def ask(pipeline, number, text, **options):
    answer = pipeline.answer(Request(str(number), text, text, sampling=Sampling(4), **options))
    pipeline.cache.flush()
    return answer

told = {}
config = SemanticCacheConfig(
    index_encoder="model", similarity_threshold=0.5, min_gain=1, lexical_guard=False, costs=(1e-4, 0.0, 0.0, 0.0)
)
for mode, second in (
    ("exact", prompt("Where does Ann live?")),
    ("adopt", prompt("Where does Bob live?", first="Somebody knows why.")),
    ("blend", prompt("Where does Bob live?", first="It is late. Nobody knows why.")),
):
    cache = build_cache(config, engine, background=False)
    pipeline = Pipeline(engine, cache)
    first = ask(pipeline, 1, prompt("Where does Ann live?"))
    again = ask(pipeline, 2, second, reuse=mode)
    told[mode] = [first.record.method, again.record.method, again.record.approximate, again.record.reason]
    if mode == "exact":
        told["equal"] = first.token_ids == again.token_ids
    cache.close()

for where, make in (
    ("settings", lambda: SemanticCacheConfig(reuse="top_layer")),
    ("request", lambda: Request("1", "a", "a", reuse="top_layer")),
    ("fusion", lambda: build_cache(SemanticCacheConfig(fusion_provider="json:JSONDecoder"), engine)),
    ("model", lambda: TransformersEngine.from_pretrained("docs-lckv")),
):
    try:
        make()
        told[where] = "accepted"
    except DejaKVError as error:
        told[where] = f"{type(error).__name__}: {error}"
told["loaded"] = [name for name in sys.modules if name.startswith("dejakv.prototypes")]
print(json.dumps(told))
"""
)

PACKAGES = (
    HIDE
    + """
import importlib, pkgutil
import dejakv

for module in pkgutil.walk_packages(dejakv.__path__, "dejakv."):
    # vLLM is not installed here, and a command runs at its import.
    if module.name.startswith("dejakv.prototypes") or module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        print(module.name, error.name)
"""
)


def run_python(code: str) -> str:
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def told() -> dict[str, object]:
    return json.loads(run_python(CORE).splitlines()[-1])


@pytest.mark.parametrize("mode", ["exact", "adopt", "blend"])
def test_core_method_runs_without_prototypes(told: dict[str, object], mode: str) -> None:
    assert told[mode] == ["none", mode, mode != "exact", ""]
    assert told["equal"]
    assert told["loaded"] == []


@pytest.mark.parametrize(("where", "kind"), [("settings", "ConfigError"), ("request", "InputError")])
def test_top_layer_is_refused_without_prototypes(told: dict[str, object], where: str, kind: str) -> None:
    text = str(told[where])
    assert text.startswith(f"{kind}: reuse='top_layer' is refused: ")
    assert "No module named 'dejakv.prototypes" in text
    assert "choose one of exact, adopt, blend" in text


@pytest.mark.parametrize(("where", "kind"), [("fusion", "ConfigError"), ("model", "ModelError")])
def test_parts_of_prototypes_name_what_is_missing(told: dict[str, object], where: str, kind: str) -> None:
    assert str(told[where]).startswith(f"{kind}: ")
    assert "No module named 'dejakv.prototypes" in str(told[where])


def test_all_other_packages_import_without_prototypes() -> None:
    missing = [line.split() for line in run_python(PACKAGES).splitlines()]
    assert [name for name, module in missing if module.startswith("dejakv")] == []
