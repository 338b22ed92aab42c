"""Token ids of segments that are compared again and again."""

import numpy as np
import pytest

from dejakv.find.copied.kept_tokens import KeptTokens


def test_a_segment_is_asked_for_once_while_there_is_room() -> None:
    asked: list[str] = []

    def tokens_of(id: str) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
        asked.append(id)
        return None if id == "gone" else np.full(10, int(id), np.int64)

    kept = KeptTokens(tokens_of, 170)  # two of them
    for id in "1", "1", "2", "1", "3", "1", "2":  # the 2 makes room for the 3
        found = kept(id)
        assert found is not None
        assert found.tolist() == [int(id)] * 10
    assert asked == ["1", "2", "3", "2"]
    assert kept.nbytes == 160


def test_what_is_gone_or_too_large_is_not_kept() -> None:
    there = {"large": np.arange(100, dtype=np.int64), "small": np.arange(3, dtype=np.int64)}
    kept = KeptTokens(there.get, 400)
    assert kept("gone") is None
    assert np.array_equal(kept("large"), there["large"])  # type: ignore[arg-type]
    assert kept.nbytes == 0
    kept("small")
    kept.forget("small")
    kept.forget("never there")
    there.clear()
    assert kept("small") is None


@pytest.mark.parametrize("tokens", [0, 1])
def test_tiny_segments(tokens: int) -> None:
    kept = KeptTokens(lambda _: np.zeros(tokens, np.int64), 8)
    for _ in range(2):
        found = kept("a")
        assert found is not None
        assert len(found) == tokens
