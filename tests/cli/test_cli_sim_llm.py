"""`dejakv sim-llm` on a small random model."""

import pytest
from training.lckv_model import lckv_from, twin_from
from typer.testing import CliRunner

from dejakv.cli.main import typer_app


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """docs-lckv as training begins with it."""
    from transformers import AutoTokenizer

    from dejakv.models import path

    made = tmp_path_factory.mktemp("model")
    lckv_from(twin_from("docs-lm")).save_pretrained(made)
    AutoTokenizer.from_pretrained(path("docs-lm")).save_pretrained(made)
    return made


def run(*arguments):
    return CliRunner().invoke(
        typer_app, ["sim-llm", "--device", "cpu", "--facts", "12", "--cases", "2", *map(str, arguments)]
    )


def test_basic_shows_a_hit_with_the_answer_of_the_first(folder):
    done = run("--model", folder, "--tail", 16)
    assert done.exit_code == 0, done.exception
    lines = [line for line in done.output.splitlines() if ":" in line]
    first, again = (next(line for line in lines if what in line) for what in ("a new task", "the same again"))
    assert "computed" in first
    assert "from " in again
    assert "1 of " in again
    assert first.split(": ")[1].split(" (")[0] == again.split(": ")[1].split(" (")[0]


@pytest.mark.parametrize("demo", ["similarity", "benchmark"])
def test_other_demos_run(folder, demo):
    done = run("--model", folder, "--demo", demo)
    assert done.exit_code == 0, done.exception
    assert {"similarity": "unrelated", "benchmark": "times as fast"}[demo] in done.output


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
def test_mistakes_name_the_cause(folder, arguments, cause):
    assert cause in str(run("--model", folder, *arguments).exception)


def test_an_ordinary_model_is_refused_and_unsound_is_labelled():
    assert "every layer attends to its own KV" in str(run("--model", "docs-lm").exception)
    done = run("--model", "docs-lm", "--unsound")
    assert done.exit_code == 0, done.exception
    assert "[unsound reuse]" in done.output
