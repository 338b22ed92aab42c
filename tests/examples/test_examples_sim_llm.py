"""The example of top-layer reuse, on the bundled model and on a small random one."""

import importlib.util
from pathlib import Path

import pytest
from research.training.lckv import lckv_from, twin_from
from tests.examples.test_examples_core import run as run_file

from dejakv.errors import DejaKVError


def example():
    """The example as a module."""
    place = Path(__file__).parents[2] / "examples" / "sim_llm.py"
    spec = importlib.util.spec_from_file_location("sim_llm_example", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bundled_model():
    text = run_file("sim_llm.py", "--cases", "1", "--facts", "6")
    assert "a new task" in text
    assert "1 hits of" in text or "hits of" in text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """docs-lckv as training begins with it."""
    from transformers import AutoTokenizer

    from dejakv.models import path

    made = tmp_path_factory.mktemp("model")
    lckv_from(twin_from("docs-lm")).save_pretrained(made)
    AutoTokenizer.from_pretrained(path("docs-lm")).save_pretrained(made)
    return made


def run(capsys, *arguments):
    example().main(["--device", "cpu", "--facts", "12", "--cases", "2", *map(str, arguments)])
    return capsys.readouterr().out


def test_basic_shows_a_hit_with_the_answer_of_the_first(folder, capsys):
    lines = [line for line in run(capsys, "--model", folder, "--tail", 16).splitlines() if ":" in line]
    first, again = (next(line for line in lines if what in line) for what in ("a new task", "the same again"))
    assert "computed" in first
    assert "from " in again
    assert "1 of " in again
    assert first.split(": ")[1].split(" (")[0] == again.split(": ")[1].split(" (")[0]


@pytest.mark.parametrize("demo", ["similarity", "benchmark"])
def test_other_demos_run(folder, demo, capsys):
    assert {"similarity": "unrelated", "benchmark": "times as fast"}[demo] in run(
        capsys, "--model", folder, "--demo", demo
    )


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--demo", "magic"], "demo 'magic' is unknown"),
        (["--similarity-threshold", "3"], "similarity_threshold=3"),
        (["--max-cache-size", "0"], "max_cache_size=0"),
        (["--tail", "0"], "tail=0"),
        (["--cases", "0"], "cases=0"),
        (["--num-hyperplanes", "99"], "num_hyperplanes=99"),
    ],
)
def test_mistakes_name_the_cause(folder, arguments, cause, capsys):
    with pytest.raises(DejaKVError, match=cause):
        run(capsys, "--model", folder, *arguments)


def test_an_ordinary_model_is_refused(capsys):
    with pytest.raises(DejaKVError, match="every layer attends to its own KV"):
        run(capsys, "--model", "docs-lm")
