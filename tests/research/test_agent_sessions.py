"""Sessions of agents: what changes in the middle of their prompts from turn to turn."""

from itertools import pairwise

import pytest
from research.agent_sessions import AGENTS, LIMIT_CHARACTERS, TURNS

from dejakv.datasets.base import Sample
from dejakv.datasets.registry import DatasetOptions, open_dataset


def session(kind: str) -> list[Sample]:
    return list(open_dataset(f"research.agent_sessions:{kind}", DatasetOptions(seed=2)))


def size(sample: Sample) -> int:
    return sum(len(text) for _, text in sample.messages)


@pytest.mark.parametrize("kind", ["reminders", "compaction", "subagents"])
def test_each_kind_has_forty_turns_of_chats_that_end_with_a_question(kind: str) -> None:
    samples = session(kind)
    assert len({sample.id for sample in samples}) == len(samples) == TURNS
    for sample in samples:
        roles = [role for role, _ in sample.messages]
        assert roles == ["system", *["user", "assistant"] * (len(roles) // 2 - 1), "user"]
        assert sample.fields["recorded"]
    assert [sample.messages for sample in session(kind)] == [sample.messages for sample in samples]
    assert 16_000 < max(map(size, samples)) < 64_000


def test_reminder_moves_to_the_newest_message() -> None:
    for before, after in pairwise(session("reminders")):
        marked = ["system-reminder" in text for _, text in after.messages]
        assert marked == [False] * (len(marked) - 1) + [True]
        shared = len(before.messages) - 1
        assert after.messages[:shared] == before.messages[:shared]
        assert before.messages[shared][1].endswith(after.messages[shared][1])


def test_compaction_shortens_a_history_at_its_limit() -> None:
    samples = session("compaction")
    compacted = [after for before, after in pairwise(samples) if len(after.messages) < len(before.messages)]
    assert compacted
    assert all("What you found so far" in sample.messages[0][1] for sample in compacted)
    assert all(sum(len(text) for _, text in sample.messages[1:-1]) < LIMIT_CHARACTERS + 4_000 for sample in samples)


def test_subagents_share_a_head_and_hear_of_each_other() -> None:
    samples = session("subagents")
    assert len({sample.messages[0] for sample in samples}) == 1
    for earlier, later in zip(samples, samples[AGENTS:], strict=False):
        assert later.messages[: len(earlier.messages)] == earlier.messages
    answers = [sample.fields["recorded"] for sample in samples]
    for agent, sample in enumerate(samples[AGENTS : 2 * AGENTS]):
        told = sample.messages[-1][1]
        assert [answer in told for answer in answers[:AGENTS]] == [other != agent for other in range(AGENTS)]
