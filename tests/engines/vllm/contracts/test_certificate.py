"""A connector with a certificate: it blends within the rules, and computes the rest in full."""

from pathlib import Path
from typing import Any

import pytest
from vllm_harness import Engine, Output, running, tokens

from dejakv import __version__
from dejakv.decide.bound import certified_setting
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.trust.certificate import Certificate, Hit, rules_of
from dejakv.trust.rules import PILOT
from dejakv.trust.settings import TrustSettings

A = tokens(400, 901)
LITTLE = A[60:160] + tokens(24, 902) + A[200:390]
"""A prompt with a short stretch that no stored prompt holds, and one with a long one."""
MUCH = A[60:160] + tokens(130, 903) + A[250:390]
MODES: dict[str, Any] = {"modes": ["off", "exact", "blend"]}


def certificate(epoch: str) -> Certificate:
    """Of a log whose hits were wrong above a risk of .2."""
    hits = [Hit(number % 50 / 50, number % 50 > 10, 1000, {}) for number in range(PILOT + 1500)]
    asked = TrustSettings(error_bound=0.1)
    made = Certificate(
        error_bound=0.1,
        confidence=0.95,
        differs="first",
        model="docs-lm",
        engine="vllm",
        epoch=epoch,
        level="copied",
        method="blend",
        setting=certified_setting(ConnectorSettings.from_extra(MODES).cache_config()),
        made="2026-01-02",
        dejakv_version=__version__,
        settings={},
        **rules_of(hits, asked),
    )
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
def test_a_certificate_opens_and_closes_blends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "certificate.json"
    file.write_text(certificate("of another model").text())
    with running(extra={**MODES, "certificate": str(file)}) as engine:
        for output in asked_both(engine):
            assert output.told["method"] != "blend"
            assert not output.told["approximate"]
            assert output.told["reason"].startswith("the certificate is of another model or engine")
        truth = [ask(engine, prompt, mode="off").tokens for prompt in (LITTLE, MUCH)]
        assert engine.metrics()["vllm:dejakv_withheld"] == 2
        epoch = engine.connector.scheduler_side.lookups.adapters.base
    file.write_text(certificate(epoch).text())
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
