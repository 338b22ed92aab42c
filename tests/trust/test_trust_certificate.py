"""Certificates as files and as rules."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dejakv.errors import ConfigError
from dejakv.trust.certificate import HOLDS, Certificate, CertifiedHit, rules_of
from dejakv.trust.evidence import interval
from dejakv.trust.rules import PILOT
from dejakv.trust.settings import TrustSettings

FIXED: dict[str, Any] = {
    "differs": "first",
    "model": "m",
    "engine": "vllm",
    "epoch": "e",
    "level": "copied",
    "method": "blend",
    "setting": "s",
    "made": "2026-01-02",
    "dejakv_version": "0",
    "settings": {},
}


def log_of(wrong: list[bool], seed: int = 0) -> list[CertifiedHit]:
    """Hits of risks between 0 and 1, the wrong ones as given behind the pilot, and prompts of 100 tokens."""
    rng = random.Random(seed)
    return [CertifiedHit(rng.random(), outcome, 100, {"seams": 1.0}) for outcome in [False] * PILOT + wrong]


def certified(hits: list[CertifiedHit], bound: float = 0.1, confidence: float = 0.95) -> Certificate:
    asked = TrustSettings(error_bound=bound, confidence=confidence)
    return Certificate(error_bound=bound, confidence=confidence, **FIXED, **rules_of(hits, asked))


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    made = certified(log_of([False] * 200))
    file = tmp_path / "certificate.json"
    file.write_text(made.text())
    assert Certificate.read(file).text() == made.text()
    assert next(iter(json.loads(file.read_text()).items())) == ("holds", HOLDS)
    assert Certificate.read(file).hits == made.hits
    assert made.cutoff == 1.0
    assert made.upper is not None
    assert made.upper <= 0.1


@pytest.mark.parametrize("name", ["cutoff", "error_bound", "epoch", "setting", "evidence", "counts", "longest"])
def test_an_edited_file_is_refused(tmp_path: Path, name: str) -> None:
    values = json.loads(certified(log_of([False] * 200)).text())
    others = {"cutoff": 0.99, "error_bound": 0.05, "longest": 9_999, "epoch": "f", "setting": "t", "counts": {}}
    values[name] = others.get(name, values[name][1:] if name == "evidence" else None)
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"edited or damaged: .* make it again with `dejakv certify`"):
        Certificate.read(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: FileNotFoundError"),
        ("{", "cannot be read: JSONDecodeError"),
        ("[" * 100_000, "cannot be read: RecursionError"),
        ("[]", "no file of"),
        ("{}", "no file of"),
    ],
)
def test_what_is_no_certificate_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "certificate.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        Certificate.read(file)


@pytest.mark.parametrize("name", ["format", "risk_version"])
def test_a_certificate_of_other_rules_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file = tmp_path / "certificate.json"
    file.write_text(certified(log_of([False] * 200)).text())
    monkeypatch.setattr(f"dejakv.trust.certificate.{name.upper()}", 99)
    with pytest.raises(ConfigError, match="of another version"):
        Certificate.read(file)


def test_hits_that_choose_the_rules_are_no_evidence() -> None:
    """However many are wrong among them; and as few hits as they are open nothing."""
    few = certified([CertifiedHit(0.5, False, 100, {})] * PILOT, bound=0.9)
    assert (few.cutoff, few.rules) == (None, ())
    hits = log_of([False] * 200)
    spoiled = [CertifiedHit(hit.risk, True, 100, {}) for hit in hits[:PILOT]] + hits[PILOT:]
    assert certified(spoiled).cutoff == certified(hits).cutoff == 1.0
    assert certified(spoiled).counts["wrong"] == PILOT
    short, long = ([rule["cutoff"] for rule in certified(some).rules] for some in (hits[: PILOT + 1], hits))
    assert short == long


def test_a_rule_opens_where_wrong_hits_have_a_higher_risk() -> None:
    hits = [CertifiedHit(hit.risk, hit.risk > 0.5, hit.tokens, hit.features) for hit in log_of([False] * 600)]
    made = certified(hits)
    assert made.cutoff is not None
    assert 0 < made.cutoff <= 0.6
    assert [rule["open"] for rule in made.rules] == sorted((rule["open"] for rule in made.rules), reverse=True)
    assert made.counts["kept"] == sum(hit.risk <= made.cutoff for hit in hits) < len(hits)
    assert made.counts["kept_wrong"] == sum(hit.wrong and hit.risk <= made.cutoff for hit in hits)


def test_a_certificate_at_its_bound_is_rare() -> None:
    """Of logs whose every hit is wrong with the probability that is to be excluded, at most a share 1 - confidence opens anything."""
    opened = 0
    for seed in range(300):
        rng = random.Random(seed)
        opened += certified(log_of([rng.random() < 0.1 for _ in range(150)], seed)).cutoff is not None
    assert opened <= 0.05 * 300


def test_neither_longer_prompts_nor_higher_risks_are_served() -> None:
    made = certified(log_of([False] * 200))
    assert made.serves(0.5, 100)
    assert not made.serves(0.5, 101)
    hits = [CertifiedHit(hit.risk, hit.risk > 0.5, hit.tokens, hit.features) for hit in log_of([False] * 600)]
    strict = certified(hits)
    assert strict.cutoff is not None
    assert (strict.serves(strict.cutoff, 100), strict.serves(strict.cutoff + 1e-6, 100)) == (True, False)
    assert not certified([]).serves(0.0, 0)


@pytest.mark.parametrize(
    ("hits", "wrong", "verdict"),
    [(200, 0, "holds"), (200, 100, "does not hold"), (20, 0, "too few hits"), (20, 3, "too few hits")],
)
def test_an_audit_says_what_a_later_log_says(hits: int, wrong: int, verdict: str) -> None:
    later = [CertifiedHit(0.5, number < wrong, 100, {}) for number in range(hits)]
    done = certified(log_of([False] * 200)).audit([*later, CertifiedHit(0.5, True, 101, {})])
    assert (done.verdict, done.hits, done.served, done.wrong) == (verdict, hits + 1, hits, wrong)


def test_an_interval_has_its_share_between_its_ends() -> None:
    for labels, wrong in ((50, 0), (50, 5), (50, 50), (0, 0)):
        low, high = interval(labels, wrong, 0.95)
        assert 0 <= low <= (wrong / labels if labels else 0) <= high <= 1
    assert interval(0, 0, 0.95) == pytest.approx((0, 1))


def test_evidence_counts_again_for_another_bound() -> None:
    made = certified(log_of([False] * 60), bound=0.05)
    assert made.cutoff is None
    loose = made.recertify(TrustSettings(error_bound=0.2))
    assert (loose.error_bound, loose.cutoff, loose.hits) == (0.2, 1.0, made.hits)
    assert loose.recertify(TrustSettings(error_bound=0.05)).text() == made.text()
