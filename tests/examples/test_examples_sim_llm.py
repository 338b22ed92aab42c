"""The example of top-layer reuse shows a hit, its answer from the changed text, and the refusal."""

from tests.examples.test_examples_core import run


def test_sim_llm() -> None:
    first, second, statistics, refused = run("sim_llm.py").splitlines()
    assert first.startswith("What is the job of Bob? baker (computed;")
    assert second.startswith("What city does Ann live in? tokyo (state of task ")
    assert "'hits': 1" in statistics
    assert refused.startswith("docs-lm: LlamaForCausalLM cannot take")
