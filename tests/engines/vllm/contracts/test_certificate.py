"""A connector with a certificate: it blends within the rules, and computes the rest in full."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.documents import DOCUMENTS, stream
from typer.testing import CliRunner
from vllm_harness import Engine, Output, running, tokens

from dejakv.cli.main import typer_app
from dejakv.experiments.samples import SamplePrompter
from dejakv.trust.certificate import Certificate, CertifiedHit, rules_of
from dejakv.trust.rules import PILOT
from dejakv.trust.settings import TrustSettings

A = tokens(400, 901)
LITTLE = A[60:160] + tokens(24, 902) + A[200:390]
"""A prompt with a short stretch that no stored prompt holds, and one with a long one."""
MUCH = A[60:160] + tokens(130, 903) + A[250:390]
MODES: dict[str, Any] = {"modes": ["off", "exact", "blend"]}
SAMPLES = stream()[: len(DOCUMENTS) + PILOT + 25]
"""Documents, and questions about two of them each."""


def of_the_command(folder: Path) -> Path:
    """The file that `dejakv certify` makes of a log."""
    log, file = folder / "log.jsonl", folder / "certificate.json"
    log.write_text("".join(json.dumps({"question": s.question, "context": s.context}) + "\n" for s in SAMPLES))
    given = ["certify", str(log), "--model", "docs-lm", "--engine", "vllm", "--error-bound", "0.5"]
    done = CliRunner().invoke(typer_app, [*given, "--output", str(file)])
    assert done.exception is None, done.exception
    return file


def opening_less(made: Certificate) -> Certificate:
    """As if hits of its log had been wrong above a risk of .2."""
    hits = [CertifiedHit(number % 50 / 50, number % 50 > 10, 1000, {}) for number in range(PILOT + 1500)]
    made = replace(made, **rules_of(hits, TrustSettings(error_bound=0.1)))
    assert made.cutoff is not None
    return made


def ask(engine: Engine, prompt: list[int], **wish: Any) -> Output:
    (output,) = engine.ask([prompt], wish={"no_store": True, **wish})
    return output


def asked_both(engine: Engine) -> tuple[Output, Output]:
    engine.ask([A])
    engine.settle()
    return ask(engine, LITTLE, mode="blend"), ask(engine, MUCH, mode="blend")


@pytest.mark.slow
def test_a_certificate_of_the_command_opens_and_closes_blends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = of_the_command(tmp_path)
    with running(extra={**MODES, "certificate": str(file)}) as engine:
        tokenizer = engine.llm.get_tokenizer()
        prompts = [tokenizer.encode(SamplePrompter(tokenizer).request(sample).prompt) for sample in SAMPLES]
        engine.ask(prompts[: len(DOCUMENTS)])
        engine.settle()
        for prompt in prompts[len(DOCUMENTS) :][:3]:
            hit = ask(engine, prompt, mode="blend")
            assert (hit.told["method"], hit.told["approximate"]) == ("blend", True), hit.told["reason"]
        for output in asked_both(engine):
            assert output.told["reason"].startswith("the certificate has no prompt as long in its log")
        truth = [ask(engine, prompt, mode="off").tokens for prompt in (LITTLE, MUCH)]
        assert engine.metrics()["vllm:dejakv_withheld"] == 2
        monkeypatch.setattr(Certificate, "epoch", property(lambda _: "another"), raising=False)
        engine.reset_prefix_cache()
        output = ask(engine, LITTLE, mode="blend")
        assert (output.told["method"] != "blend", output.told["approximate"]) == (True, False)
        assert output.told["reason"].startswith("the certificate is of another model or engine")
        monkeypatch.undo()
    file.write_text(opening_less(Certificate.read(file)).text())
    with running(extra={**MODES, "certificate": str(file)}) as engine:
        little, much = asked_both(engine)
        assert (little.told["method"], little.told["approximate"]) == ("blend", True), little.told["reason"]
        assert (much.told["method"], much.told["approximate"], much.tokens) == ("none", False, truth[1])
        assert much.told["reason"].startswith("the certificate does not serve such a plan: its risk is 0.")
        named = ask(engine, LITTLE, mode="blend", donors=[little.told["donor"]])
        assert named.told["reason"].startswith("the certificate is not of such a hit")
        assert engine.metrics()["vllm:dejakv_withheld"] == 2
        both = [LITTLE, LITTLE[:288] + tokens(20, 904)]  # nine blocks in common; the other one has a plan of its own
        engine.reset_prefix_cache()
        first, second, other = engine.ask([LITTLE, *both], wish={"mode": "blend", "no_store": True})
        assert sorted((first.told["level"], second.told["level"])) == ["copied", "prefix"]
        assert other.told["level"] == "copied"
        monkeypatch.setattr(Certificate, "serves", lambda *given: False)
        for output in engine.ask(both, wish={"mode": "blend", "no_store": True}):
            assert (output.told["method"], output.told["approximate"]) == ("none", False)
            assert output.told["reason"].startswith("the certificate does not serve")
