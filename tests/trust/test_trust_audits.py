"""Would-be hits wait for their labels within bounds, and each draw is learned or lost once."""

from tests.trust.gates import gate_of, hit, opened, pilot

from dejakv.request import Media, Request
from dejakv.trust.audits import Audits
from dejakv.trust.differs import Seen, differs_of
from dejakv.trust.draw import Draw
from dejakv.trust.gate import Gate

ANSWER = Seen("a", (1,))


def exploring() -> Gate:
    """A closed gate that labels every hit."""
    gate = gate_of()
    pilot(gate)
    return gate


def audits(gate: Gate, most: int = 8, most_bytes: int = 1 << 20) -> Audits[str]:
    return Audits[str](gate, differs_of("first"), most, most_bytes)


def noted(waiting: Audits[str], prompt: str = "p", partition: str = "a", media: tuple[Media, ...] = ()) -> Draw:
    draw = hit(waiting.gate, 0.0, partition)
    waiting.note(draw, Request("r", prompt, "", media, partition), "e", prompt)
    return draw


def lost(gate: Gate) -> int:
    return gate.report(None).lost


def test_the_oldest_comes_first_and_leaves() -> None:
    waiting = audits(exploring())
    for prompt in "abc":
        noted(waiting, prompt)
    taken = [waiting.take() for _ in range(3)]
    assert [item and item.decision for item in taken] == ["a", "b", "c"]
    assert waiting.take() is None
    assert len(waiting) == 0


def test_only_labelled_draws_wait() -> None:
    gate = gate_of(chance=0.9, explore_share=0.5)
    pilot(gate)
    waiting = audits(gate)
    assert not noted(waiting).labelled
    assert len(waiting) == 0


def test_without_room_the_oldest_is_lost() -> None:
    gate = exploring()
    waiting = audits(gate, most=2)
    for prompt in "abc":
        noted(waiting, prompt)
    assert [waiting.take().decision, waiting.take().decision] == ["b", "c"]  # pyright: ignore[reportOptionalMemberAccess]
    assert lost(gate) == 1


def test_bytes_are_bounded_and_one_large_request_waits_alone() -> None:
    """It would otherwise never be labelled, and large requests may be wrong more often than others."""
    gate = exploring()
    waiting = audits(gate, most_bytes=100)
    noted(waiting, "x" * 60)
    noted(waiting, "small", media=(Media(b"y" * 500),))
    assert (len(waiting), lost(gate)) == (1, 1)
    noted(waiting, "z" * 60)
    assert (len(waiting), lost(gate)) == (1, 2)
    noted(waiting, "z" * 40)
    assert (len(waiting), lost(gate)) == (2, 2)


def test_an_answer_is_kept_only_of_the_way_that_was_drawn() -> None:
    gate = exploring()
    waiting = audits(gate)
    waiting.answered(noted(waiting), ANSWER, approximate=False)
    item = waiting.take()
    assert item is not None
    assert item.answer == ANSWER


def test_a_served_hit_that_ran_exactly_in_the_end_is_lost() -> None:
    """A blend may find too little to take. The bound is on answers that are approximate."""
    gate = opened()
    gate._random = lambda: 0.0
    waiting = audits(gate)
    draw = noted(waiting)
    assert (draw.served, draw.labelled) == (True, True)
    waiting.answered(draw, ANSWER, approximate=False)
    assert (len(waiting), lost(gate)) == (0, 1)


def test_an_answer_after_its_label_was_taken_is_of_no_use() -> None:
    waiting = audits(exploring())
    draw = noted(waiting)
    assert waiting.take() is not None
    waiting.answered(draw, ANSWER, approximate=False)
    assert len(waiting) == 0


def test_clearing_a_partition_loses_its_own_alone() -> None:
    gate = exploring()
    pilot(gate, "b")
    waiting = audits(gate)
    noted(waiting, "a")
    noted(waiting, "b", "b")
    waiting.clear("b")
    assert (gate.report("a").lost, gate.report("b").lost, len(waiting)) == (0, 1, 1)


def test_closing_loses_what_waits_and_what_comes() -> None:
    gate = exploring()
    waiting = audits(gate)
    noted(waiting)
    waiting.close()
    noted(waiting)
    assert (len(waiting), lost(gate), waiting.closed) == (0, 2, True)
    assert waiting.take() is None


def test_a_label_is_learned() -> None:
    gate = exploring()
    waiting = audits(gate)
    for wrong in (True, False):
        noted(waiting)
        item = waiting.take()
        assert item is not None
        waiting.learn(item, wrong)
    report = gate.report("a")
    assert (report.explored, report.explored_wrong) == (2, 1)
