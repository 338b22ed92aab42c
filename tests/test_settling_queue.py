"""What waits to be settled, within bounds: each draw is learned or lost once, each promotion waits once."""

from typing import Any

import pytest
from tests.trust.conftest import gate_of, hit, opened, pilot

from dejakv.decide.levels.base import Query
from dejakv.decide.methods import BlendPlan
from dejakv.decide.plan import Decision, DonorSearch, ReuseRequest
from dejakv.decide.queue import PREFILL, QueueCounts, SettlingQueue
from dejakv.request import Media, Request
from dejakv.store.base import StateInfo
from dejakv.trust.differs import ComparedAnswer, differs_of
from dejakv.trust.draw import HitDraw
from dejakv.trust.gate import TrustGate

ANSWER = ComparedAnswer("a", (1,))


def exploring() -> TrustGate:
    """A closed gate that labels every hit."""
    gate = gate_of()
    pilot(gate)
    return gate


def labels(gate: TrustGate) -> SettlingQueue:
    return SettlingQueue(gate, differs_of("first"))


def noted(waiting: Any, prompt: str = "p", partition: str = "a", media: tuple[Media, ...] = ()) -> HitDraw:
    draw = hit(waiting.gate, 0.0, partition)
    waiting.label(draw, Request("r", prompt, "", media, partition), "e", prompt)
    return draw


def lost(gate: TrustGate) -> int:
    return gate.report(None).lost


def test_the_oldest_comes_first_and_leaves() -> None:
    waiting = labels(exploring())
    for prompt in "abc":
        noted(waiting, prompt)
    taken = [waiting.take_label() for _ in range(3)]
    assert [item and item.request.prompt for item in taken] == ["a", "b", "c"]
    assert waiting.take_label() is None
    for item, wrong in zip(taken, (True, False, True), strict=True):
        waiting.learn(item, wrong)
    report = waiting.gate.report("a")
    assert (report.explored, report.explored_wrong) == (3, 2)


def test_without_room_the_oldest_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dejakv.decide.queue.MAX_LABELS", 2)
    gate = exploring()
    waiting = labels(gate)
    for prompt in "abc":
        noted(waiting, prompt)
    assert [waiting.take_label().request.prompt, waiting.take_label().request.prompt] == ["b", "c"]
    assert lost(gate) == 1


def test_bytes_are_bounded_and_one_large_request_waits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would otherwise never be labelled, and large requests may be wrong more often than others."""
    monkeypatch.setattr("dejakv.decide.queue.MAX_WAITING_BYTES", 100)
    gate = exploring()
    waiting = labels(gate)
    noted(waiting, "x" * 60)
    noted(waiting, "small", media=(Media(b"y" * 500),))
    assert (len(waiting), lost(gate)) == (1, 1)
    noted(waiting, "z" * 60)
    assert (len(waiting), lost(gate)) == (1, 2)
    noted(waiting, "z" * 40)
    assert (len(waiting), lost(gate)) == (2, 2)


def test_a_served_hit_that_ran_exactly_in_the_end_is_lost() -> None:
    """A blend may find too little to take. The bound is on answers that are approximate."""
    gate = opened()
    gate._random = lambda: 0.0
    waiting = labels(gate)
    draw = noted(waiting)
    assert (draw.served, draw.labelled) == (True, True)
    waiting.add_answer(draw, ANSWER, approximate=False)
    assert (len(waiting), lost(gate)) == (0, 1)
    assert gate.report("a").wrong == 0


def test_without_room_a_shadow_is_lost_before_any_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit that is lost counts as wrong."""
    gate = opened()
    gate._random = lambda: 0.0
    monkeypatch.setattr("dejakv.decide.queue.MAX_LABELS", 2)
    waiting = labels(gate)
    audit, shadow = noted(waiting), hit(gate, 0.99)
    assert (audit.served, shadow.served, shadow.labelled) == (True, False, True)
    waiting.label(shadow, Request("r", "shadow", "", (), "a"), "e", "shadow")
    newest = noted(waiting)
    left = [waiting.take_label(), waiting.take_label()]
    assert [item and item.key for item in left] == [audit.id, newest.id]
    assert (gate.report("a").lost, gate.report("a").wrong) == (1, 0)


def test_clearing_a_partition_loses_its_own_alone() -> None:
    gate = exploring()
    pilot(gate, "b")
    waiting = labels(gate)
    noted(waiting, "a")
    noted(waiting, "b", "b")
    promoting(promoting(waiting, "13"), "2", partition="b")
    waiting.clear("b")
    assert (gate.report("a").lost, gate.report("b").lost, waiting.counts) == (0, 1, QueueCounts(1, 2))
    assert taken(waiting) == "31"


def test_closing_loses_what_waits_and_what_comes() -> None:
    gate = exploring()
    waiting = labels(gate)
    noted(promoting(waiting, "1"))
    waiting.close()
    noted(waiting)
    assert (waiting.counts, lost(gate), waiting.closed) == (QueueCounts(0, 1), 2, True)
    assert SettlingQueue().counts.labels is None


def asked(key: str, partition: str = "a", no_store: bool = False, ttl: float | None = None, **more: Any) -> Decision:
    request = Request(key, f"prompt {key}", key, partition=partition, **more)
    entry = StateInfo(key, partition, "e", (1, 2, 3), request.prompt, request.chunk, ttl=ttl or 0.0)
    return Decision(
        entry, ReuseRequest("blend", no_store=no_store), (BlendPlan(),), DonorSearch(), Query(request, ""), {}
    )


def promoting(prompts: SettlingQueue, keys: str, **more: Any) -> SettlingQueue:
    for key in keys:
        prompts.promote(asked(key, **more))
    return prompts


def taken(prompts: SettlingQueue) -> str:
    found = ""
    while (item := prompts.take_promotion()) is not None:
        found += item.key
    return found


def test_what_waits_is_the_prompt_and_not_what_a_caller_hung_on_it() -> None:
    prompts = SettlingQueue()
    prompts.promote(asked("k", metadata={"options": object()}))
    item = prompts.take_promotion()
    assert item is not None
    assert (item.request.prompt, item.request.chunk, item.epoch) == ("prompt k", "k", "e")
    assert (item.request.sampling, item.request.metadata) == (PREFILL, {})


def test_the_oldest_are_dropped_beyond_either_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(promoting(SettlingQueue(), "12321")) == "123", "the newest comes first, and each once"
    monkeypatch.setattr("dejakv.decide.queue.MAX_PROMOTIONS", 3)
    prompts = promoting(SettlingQueue(), "12345")
    assert prompts.counts == QueueCounts(promotions=3, dropped=2)
    assert taken(prompts) == "543"
    monkeypatch.setattr("dejakv.decide.queue.MAX_WAITING_BYTES", 250)
    large = promoting(SettlingQueue(), "123", media=(Media(bytes(100)),))
    assert large.counts == QueueCounts(promotions=2, dropped=1)
    assert taken(large) == "32"
    monkeypatch.setattr("dejakv.decide.queue.MAX_WAITING_BYTES", 50)
    too_large = promoting(SettlingQueue(), "1", media=(Media(bytes(100)),))
    assert too_large.counts == QueueCounts(promotions=0, dropped=1)


def test_a_prompt_that_waits_too_long_is_not_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1000.0, 1050.0, 1070.0, 1070.0])
    monkeypatch.setattr("dejakv.decide.queue.now", lambda: next(clock))
    waiting = promoting(SettlingQueue(), "12", ttl=60.0)
    assert waiting.counts.promotions == 2
    item = waiting.take_promotion()
    assert item is not None
    assert (item.key, item.request.ttl) == ("2", pytest.approx(40))
    assert waiting.take_promotion() is None


def test_a_removal_concerns_the_work_of_its_partition_that_began_before() -> None:
    queue = SettlingQueue()
    begun = queue.mark()
    queue.begin_removal("a")
    assert (queue.removed_since(begun, "a"), queue.removed_since(begun, "b")) == (True, False)
    assert not queue.removed_since(queue.mark(), "a")
    queue.begin_removal(None)
    assert queue.removed_since(begun, "b")


def test_queue_remembers_a_bounded_number_of_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dejakv.decide.queue.MAX_REMOVALS", 3)
    queue = SettlingQueue()
    marks = list[int]()
    for partition in "abcd":
        marks.append(queue.mark())
        queue.begin_removal(partition)
    # The first is forgotten: whether it was of this partition is not known, so nothing begun before it is stored.
    assert queue.removed_since(marks[0], "z")
    assert [queue.removed_since(mark, "b") for mark in marks[1:]] == [True, False, False]
    assert not queue.removed_since(marks[1], "z")
