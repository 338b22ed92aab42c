"""The chain and the small guards: threshold, context, media, vision, known wrong."""

import math

import pytest

from dejakv.decide.guards.base import ContextGuard, Guard, GuardVerdict, MediaGuard, ThresholdGuard, judge
from dejakv.decide.levels.base import Match
from dejakv.errors import ConfigError
from dejakv.identity import MediumSpan
from dejakv.request import Media, Request
from dejakv.store.base import StateInfo

Case = tuple[Request, StateInfo, Match]
PICTURE, OTHER = Media(b"one"), Media(b"two")


def case(
    score: float = 0.9,
    level: str = "semantic_text",
    prompts: tuple[str, str] = ("Read. Where? Answer:", "Read. When? Answer:"),
    media: tuple[Media, ...] = (),
    spans: tuple[MediumSpan, ...] = (),
) -> Case:
    donor = StateInfo("id", "default", "epoch", (1, 2), prompts[1], "When?", spans=spans)
    return Request("r", prompts[0], "Where?", media=media), donor, Match("id", level, score)


class Says(Guard):
    """A guard that says one thing, and remembers that it was asked."""

    def __init__(self, decision: str, name: str = "says") -> None:
        self.decision, self.name, self.asked = decision, name, 0

    def judge(self, request: Request, donor: StateInfo, match: Match) -> GuardVerdict:
        self.asked += 1
        if self.decision == "raise":
            raise ZeroDivisionError("by zero")
        return GuardVerdict(self.decision, self.name, "because")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("decisions", "result", "who"),
    [
        (["accept"], "accept", "g0"),
        (["abstain", "accept"], "accept", "g1"),
        (["accept", "accept"], "accept", "g0"),
        (["accept", "reject"], "reject", "g1"),
        (["reject", "accept"], "reject", "g0"),
        (["abstain", "abstain"], "reject", "chain"),
        ([], "reject", "chain"),
        (["accept", "raise"], "reject", "g1"),
    ],
)
def test_chain(decisions: list[str], result: str, who: str) -> None:
    guards = [Says(decision, f"g{place}") for place, decision in enumerate(decisions)]
    verdict = judge(guards, *case())
    assert (verdict.decision, verdict.guard) == (result, who)
    assert verdict.reason


def test_an_error_is_a_rejection_that_names_it_and_the_first_rejection_ends_the_chain() -> None:
    after = Says("accept")
    verdict = judge([Says("raise", "broken"), after], *case())
    assert verdict == GuardVerdict("reject", "broken", "the guard failed: ZeroDivisionError")
    assert after.asked == 0


@pytest.mark.parametrize(
    ("guard", "accepted", "rejected"),
    [
        (ThresholdGuard({"semantic_text": 0.85}), case(0.85), case(0.8499)),
        (ContextGuard(), case(), case(prompts=("Read. Where? Answer:", "Read this. When? Answer:"))),
        (
            MediaGuard(),
            case(media=(PICTURE,), spans=(MediumSpan(3, 4, PICTURE.digest),)),
            case(media=(PICTURE,), spans=(MediumSpan(3, 4, OTHER.digest),)),
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_verdicts_repeat_and_carry_name_and_reason(guard: Guard, accepted: Case, rejected: Case) -> None:
    first, no = guard.judge(*accepted), guard.judge(*rejected)
    assert first.decision in ("accept", "abstain")
    assert guard.judge(*accepted) == first
    assert no.decision == "reject"
    for verdict in (first, no):
        assert verdict.guard == guard.name
        assert verdict.reason


@pytest.mark.parametrize(
    ("thresholds", "default", "match", "decision"),
    [
        ({"semantic_text": 0.0}, None, ("semantic_text", 0.0), "accept"),
        ({"semantic_text": 0.0}, None, ("semantic_text", -0.1), "reject"),
        ({"semantic_text": -1.0}, None, ("semantic_text", -1.0), "accept"),
        ({"semantic_text": 0.0}, None, ("semantic_text", math.nan), "reject"),
        ({}, None, ("semantic_text", 0.99), "abstain"),
        ({}, 0.5, ("my_level", 0.6), "accept"),
        ({}, 0.5, ("my_level", 0.4), "reject"),
        ({}, 0.5, ("exact_text", 1.0), "accept"),
    ],
)
def test_threshold(
    thresholds: dict[str, float], default: float | None, match: tuple[str, float], decision: str
) -> None:
    guard = ThresholdGuard(thresholds, default)
    assert guard.judge(*case(match[1], match[0])).decision == decision


@pytest.mark.parametrize("value", [1.5, -1.5, math.nan])
def test_impossible_threshold(value: float) -> None:
    with pytest.raises(ConfigError, match="-1 to 1"):
        ThresholdGuard({"semantic_text": value})
    with pytest.raises(ConfigError, match="-1 to 1"):
        ThresholdGuard(default=value)


def test_context_abstains_where_the_chunk_is_not_in_the_prompt() -> None:
    verdict = ContextGuard().judge(*case(prompts=("Something else", "Read. When? Answer:")))
    assert verdict.decision == "abstain"


def test_media_order_and_number_count() -> None:
    guard = MediaGuard()
    spans = (MediumSpan(0, 1, PICTURE.digest), MediumSpan(1, 1, OTHER.digest))
    assert guard.judge(*case(media=(PICTURE, OTHER), spans=spans)).decision == "abstain"
    assert guard.judge(*case(media=(OTHER, PICTURE), spans=spans)).decision == "reject"
    assert guard.judge(*case(media=(PICTURE,), spans=spans)).decision == "reject"
    assert guard.judge(*case(media=(), spans=spans)).decision == "reject"
    assert guard.judge(*case()).decision == "abstain"


@pytest.mark.parametrize(
    ("other", "match", "decision", "says"),
    [
        (False, Match("id", "exact_text", 1.0), "abstain", "same media"),
        (True, Match("id", "exact_text", 1.0), "reject", "has not compared"),
        (True, Match("id", "embedding:prompt", 0.95, {"vision": 0.95, "prompt": 1.0}), "abstain", "look alike"),
        (True, Match("id", "embedding:prompt", 0.9, {"vision": 0.9, "prompt": 1.0}), "abstain", "look alike"),
        (True, Match("id", "embedding:prompt", 0.89, {"vision": 0.89, "prompt": 1.0}), "reject", "below 0.9"),
    ],
)
def test_another_picture_may_do_only_if_the_vision_layer_compared_them(
    other: bool, match: Match, decision: str, says: str
) -> None:
    asked, donor, _ = case(media=(PICTURE,), spans=(MediumSpan(0, 1, (OTHER if other else PICTURE).digest),))
    verdict = MediaGuard(0.9).judge(asked, donor, match)
    assert (verdict.decision, says in verdict.reason) == (decision, True)
