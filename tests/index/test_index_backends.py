"""Every index passes the same tests, small and beyond the size where it changes its method."""

import numpy as np
import pytest
from numpy.typing import NDArray

from dejakv.errors import ConfigError, InputError
from dejakv.prototypes.lsh import LSHIndex
from dejakv.vectors.base import unit_vector
from dejakv.vectors.flat import FlatIndex
from dejakv.vectors.hnsw import HNSWIndex
from dejakv.vectors.spaces import VectorSpaces, make_index


class IndexTests:
    """Approximate ones may miss neighbours, but not in a handful."""

    dim = 24

    def make(self, dim: int) -> FlatIndex:
        raise NotImplementedError

    def filled(self, count: int) -> tuple[FlatIndex, NDArray[np.float32]]:
        """An index of random unit vectors, whose ids are their numbers, and the vectors."""
        rows = np.random.default_rng(0).standard_normal((count, self.dim)).astype(np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        index = self.make(self.dim)
        for place, row in enumerate(rows):
            index.add(str(place), row * (place + 1))
        return index, rows

    def test_an_empty_one_finds_nothing(self) -> None:
        index = self.make(self.dim)
        assert (len(index), index.dim) == (0, self.dim)
        assert index.search(np.ones(self.dim, np.float32), 5) == []

    def test_a_vector_finds_itself_with_cosine_one_whatever_its_length(self) -> None:
        index, rows = self.filled(40)
        for place, row in enumerate(rows):
            ((id, score),) = index.search(row * 0.01, 1)
            assert id == str(place)
            assert score == pytest.approx(1.0, abs=5e-3)
        assert len(index) == 40

    def test_search_is_sorted_bounded_and_agrees_with_scores(self) -> None:
        index, rows = self.filled(50)
        hits = index.search(rows[3], 10)
        assert len(hits) == 10
        assert [s for _, s in hits] == sorted((s for _, s in hits), reverse=True)
        again = index.scores(rows[3], [id for id, _ in hits])
        assert again == pytest.approx([s for _, s in hits], abs=5e-3)
        assert index.scores(rows[3], ["unknown"]) == [None]
        assert len(index.search(rows[3], 1000)) == 50
        least = (hits[4][1] + hits[5][1]) / 2
        assert [id for id, _ in index.search(rows[3], 10, least)] == [id for id, _ in hits[:5]]
        assert index.search(-rows[3], 10, 0.999) == []

    def test_what_is_removed_is_not_found_and_what_is_added_again_is_replaced(self) -> None:
        index, rows = self.filled(20)
        for place in range(0, 20, 2):
            assert index.remove(str(place))
        assert not index.remove("0")
        assert len(index) == 10
        assert index.scores(rows[0], ["0"]) == [None]
        for place in range(1, 20, 2):
            assert index.search(rows[place], 1)[0][0] == str(place)
        assert {id for id, _ in index.search(rows[0], 20)} == {str(place) for place in range(1, 20, 2)}
        index.add("1", rows[0])
        assert len(index) == 10
        ((id, score),) = index.search(rows[0], 1)
        assert (id, score) == ("1", pytest.approx(1.0, abs=5e-3))

    def test_wrong_dimension_names_both(self) -> None:
        index = self.make(self.dim)
        for call in (lambda v: index.add("a", v), lambda v: index.search(v, 1)):
            with pytest.raises(ConfigError, match=rf"25.*dimension {self.dim}"):
                call(np.ones(25, dtype=np.float32))
        assert len(index) == 0

    @pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
    def test_a_vector_without_direction_is_refused(self, value: float) -> None:
        index = self.make(self.dim)
        bad = np.full(self.dim, value, dtype=np.float32)
        for call in (lambda: index.add("a", bad), lambda: index.search(bad, 1)):
            with pytest.raises(InputError, match="no direction"):
                call()
        assert len(index) == 0


class TestFlat(IndexTests):
    def make(self, dim: int) -> FlatIndex:
        return FlatIndex(dim)


class TestHNSWSmall(IndexTests):
    def make(self, dim: int) -> FlatIndex:
        return HNSWIndex(dim)


class TestHNSWGraph(IndexTests):
    def make(self, dim: int) -> FlatIndex:
        return HNSWIndex(dim, flat_below=1)


def rows_of(count: int, dim: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def near(rows: np.ndarray, cosine: float, seed: int = 1) -> np.ndarray:
    """A neighbour of each row at this cosine."""
    noise = np.random.default_rng(seed).standard_normal(rows.shape).astype(np.float32)
    noise -= (noise * rows).sum(axis=1, keepdims=True) * rows
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    return cosine * rows + np.sqrt(1 - cosine**2) * noise


@pytest.mark.parametrize("count", [20, 3000])
@pytest.mark.parametrize("k", [1, 8])
def test_flat_equals_brute_force(count: int, k: int) -> None:
    rows, queries = rows_of(count, 32), rows_of(5, 32, seed=9)
    index = FlatIndex(32)
    for place, row in enumerate(rows):
        index.add(str(place), row)
    for query in queries:
        truth = rows @ query
        order = np.argsort(-truth)[:k]
        hits = index.search(query, k)
        assert [int(id) for id, _ in hits] == order.tolist()
        assert [score for _, score in hits] == pytest.approx(truth[order].tolist(), abs=1e-5)


def test_hnsw_finds_near_neighbours_the_more_the_broader_it_searches() -> None:
    rows = rows_of(4000, 32)
    index = HNSWIndex(32, breadth=4)
    for place, row in enumerate(rows):
        index.add(str(place), row)
    recalls: list[float] = []
    for index.breadth in (1, 256):
        found = [index.search(query, 1)[0][0] for query in near(rows[:200], 0.8)]
        recalls.append(float(np.mean([id == str(place) for place, id in enumerate(found)])))
    assert recalls[0] < recalls[1] >= 0.985


def test_lsh_hash_convention_and_repeatability() -> None:
    one, other = LSHIndex(12, num_hyperplanes=16, seed=42), LSHIndex(12, 16, 42)
    rows = rows_of(30, 12)
    hashes = one.compute_hash_batch(rows)
    assert hashes == other.compute_hash_batch(rows)
    assert hashes == [one.compute_hash(row) for row in rows]
    assert hashes != LSHIndex(12, 16, seed=43).compute_hash_batch(rows)
    assert all(len(h) == 16 and set(h) <= {"0", "1"} for h in hashes)
    assert hashes[0] == "".join("1" if plane @ rows[0] >= 0 else "0" for plane in one.hyperplanes)
    assert one.compute_hash(np.zeros(12)) == "1" * 16  # on a plane counts as above it
    with pytest.raises(ConfigError, match="embedding_dim=5"):
        one.compute_hash(np.ones(5))


def test_lsh_accepts_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    index, rows = LSHIndex(12), rows_of(3, 12)
    assert index.compute_hash_batch(torch.tensor(rows, requires_grad=True)) == index.compute_hash_batch(rows)


def test_factory_names_the_choices() -> None:
    assert isinstance(make_index("flat", 3), FlatIndex)
    with pytest.raises(ConfigError, match="flat, hnsw"):
        make_index("annoy", 3)
    with pytest.raises(ConfigError, match="dimension 0"):
        make_index("flat", 0)


def test_unit_handles_extreme_lengths() -> None:
    for scale in (1e-25, 1e-18, 1.0, 1e18, 1e25):
        row = unit_vector(np.array([3.0, 4.0], dtype=np.float32) * np.float32(scale), 2)
        assert row.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)


def test_spaces_drop_empty_ones_and_move_donors() -> None:
    spaces, rows = VectorSpaces(8), rows_of(3, 8)
    spaces.add("a", "one", rows[0])
    spaces.add("b", "one", rows[1])
    assert spaces.get("a") is None
    assert len(spaces) == 1
    assert spaces.remove("one")
    assert not spaces.remove("one")
    assert spaces.get("b") is None


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_thousands_of_small_spaces(kind: str) -> None:
    spaces, rows = VectorSpaces(384, kind), rows_of(5, 384)
    for space in range(2000):
        for place in range(5):
            spaces.add(str(space), f"{space}:{place}", rows[place])
    assert len(spaces) == 10_000
    assert spaces.get("1999").search(rows[4], 1)[0][0] == "1999:4"
