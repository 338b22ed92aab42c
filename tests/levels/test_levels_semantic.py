"""Semantic text: thresholds, windows, spaces, stored vectors, and no vector computed twice."""

import numpy as np
import pytest

from dejakv.decide.levels.base import Level, Query
from dejakv.decide.levels.semantic import SemanticTextCache
from dejakv.errors import ConfigError, InputError
from dejakv.identity import digest_of
from dejakv.request import Request
from dejakv.testing.levels import LevelTests
from dejakv.vectors.base import Vector


class WordEncoder:
    """Averages a fixed random vector a word: near where words are shared."""

    dim = 64
    fingerprint = "words"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def encode(self, text: str) -> Vector:
        self.calls.append(text)
        words = text.lower().split()
        if words == ["bad"]:
            raise InputError("no direction")
        row = sum((self._word(word) for word in words), np.zeros(self.dim, np.float32))
        return (row / np.linalg.norm(row)).astype(np.float32)

    def _word(self, word: str) -> Vector:
        seed = int(digest_of(word)[:8], 16)
        return np.random.default_rng(seed).standard_normal(self.dim).astype(np.float32)


def query(chunk: str, space: str = "s", partition: str = "p", **vectors: Vector) -> Query:
    return Query(Request("r", chunk, chunk, partition=partition), space, encoded=dict(vectors))


class TestSemanticText(LevelTests):
    def make(self) -> Level:
        return SemanticTextCache(WordEncoder(), threshold=0.9)

    def query(self, topic: int, space: str = "s") -> Query:
        return query(f"{'alpha beta gamma delta'.split()[topic]} question", space)


def test_threshold_is_inclusive_and_zero_is_a_threshold() -> None:
    one, other = np.array([1, 0], np.float32), np.array([0, 1], np.float32)
    for threshold, found in ((0.0, True), (1e-6, False), (-1.0, True)):
        cache = SemanticTextCache(WordEncoder(), threshold)
        cache.add("x", "x", one)
        assert bool(cache.search_vector(other)) is found
        assert bool(cache.search_vector(-one)) is (threshold == -1.0)


@pytest.mark.parametrize("threshold", [-1.01, 1.01, float("nan")])
def test_impossible_threshold(threshold: float) -> None:
    with pytest.raises(ConfigError, match="-1 to 1"):
        SemanticTextCache(WordEncoder(), threshold)


def test_negative_window() -> None:
    with pytest.raises(ConfigError, match="chunk_window"):
        SemanticTextCache(WordEncoder(), chunk_window=-1)


def test_the_window_decides_what_is_embedded() -> None:
    encoder = WordEncoder()
    cache = SemanticTextCache(encoder, 0.99, chunk_window=9)
    cache.add("a", query("  red thing and more"))
    assert encoder.calls == ["red thing"]
    assert cache.search(query("red thing but less")).matches
    assert not cache.search(query("blue box and more")).matches


def test_stored_vectors_are_not_computed_again() -> None:
    encoder = WordEncoder()
    cache = SemanticTextCache(encoder)
    vector = encoder.encode("one two")
    encoder.calls.clear()
    cache.add("a", query("one two", text=vector))
    assert encoder.calls == []
    assert cache.search(query("one two")).matches[0].score == pytest.approx(1.0, abs=1e-5)


def test_a_query_is_embedded_once() -> None:
    encoder = WordEncoder()
    cache, asked = SemanticTextCache(encoder), query("one two")
    cache.search(asked)
    cache.add("a", asked)
    assert encoder.calls == ["one two"]


def test_text_without_direction_is_skipped() -> None:
    cache = SemanticTextCache(WordEncoder())
    assert cache.search(query("bad")).statuses == {"semantic_text": "skip"}
    cache.add("a", query("bad"))
    assert len(cache) == 0


def test_fingerprint_covers_all_that_changes_vectors() -> None:
    made = [SemanticTextCache(WordEncoder(), chunk_window=window).fingerprint for window in (0, 9)]
    assert len(set(made)) == 2
    assert SemanticTextCache(WordEncoder(), 0.1).fingerprint == made[0]


def test_at_most_eight_best_first() -> None:
    cache = SemanticTextCache(WordEncoder(), 0.0)
    for number in range(50):
        cache.add(str(number), query(f"same words here {number}"))
    scores = [match.score for match in cache.search(query("same words here 7")).matches]
    assert len(scores) == 8
    assert scores == sorted(scores, reverse=True)
