"""Streams of `research.stabilize`: each has what its rule is for, and the rule keeps a longer prefix of it."""

import pytest
from research.stabilize import STREAMS, gains_of


@pytest.mark.parametrize(
    ("stream", "rules"),
    [("reminders", "volatile"), ("clock", "volatile"), ("tools", "default rules"), ("passages", "passages")],
)
def test_a_rule_lengthens_the_prefixes_of_its_stream(stream: str, rules: str) -> None:
    rows = {row["rules"]: row for row in gains_of(STREAMS[stream], "smollm2-135m", 8)}
    assert rows[rules]["tokens_prefix"] > rows["as logged"]["tokens_prefix"]
    assert rows[rules]["changed"] > 0
    others = {"keys", "tools", "properties", "volatile", "passages"} - {rules}
    assert stream == "tools" or all(rows[name]["changed"] == 0 for name in others)


@pytest.mark.parametrize("stream", ["compaction", "subagents"])
def test_a_session_without_what_the_rules_move_is_left_alone(stream: str) -> None:
    assert gains_of(STREAMS[stream], "smollm2-135m", 4) == []
