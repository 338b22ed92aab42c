from dejakv.guards.vision import VisionGuard
from dejakv.identity import Span
from dejakv.levels.base import Match
from dejakv.request import Media, Request
from dejakv.store.base import ChunkMeta

RED, BLUE = Media(b"red"), Media(b"blue")
REQUEST = Request("1", "p", "c", (RED,))


def donor(medium: Media) -> ChunkMeta:
    return ChunkMeta("d", "p", "e", (1, 2), "p", "c", spans=(Span(0, 1, medium.digest),))


def test_the_same_picture_needs_no_look() -> None:
    verdict = VisionGuard(0.9).judge(REQUEST, donor(RED), Match("d", "exact_text", 1.0))
    assert verdict.decision == "abstain"


def test_equal_text_alone_does_not_bridge_two_pictures() -> None:
    verdict = VisionGuard(0.9).judge(REQUEST, donor(BLUE), Match("d", "exact_text", 1.0))
    assert (verdict.decision, "has not compared" in verdict.reason) == ("reject", True)


def test_the_vision_layer_decides() -> None:
    for score, decision in ((0.95, "abstain"), (0.9, "abstain"), (0.89, "reject")):
        match = Match("d", "embedding:prompt", score, {"vision": score, "prompt": 1.0})
        assert VisionGuard(0.9).judge(REQUEST, donor(BLUE), match).decision == decision
