"""KV entries in 8 bits: what they come back as, and what of them is refused."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from dejakv.store import open_store
from dejakv.store.base import INT8, CorruptChunk, StoredState, Tensor
from dejakv.store.segment import Segment, encode, opened, quantized
from dejakv.store.selection import DONORS, Selection
from dejakv.testing.chunks import ids, prompt_chunk

NAME = "0" * 32


def in_8_bits(tokens: Sequence[int] = range(40), **about: Any) -> StoredState:
    """A prompt's state with other values in each row and channel."""
    chunk = prompt_chunk(tuple(tokens), kind=INT8, generation=1, **about)
    shape = (2, 3, 2, len(tokens), 64)
    values = np.random.default_rng(len(tokens)).standard_normal(shape, np.float32)
    return StoredState(chunk.meta, Tensor(values, "F32"))


def floats(tensor: Tensor) -> np.ndarray:
    data = tensor.data
    return (data.astype("<u4") << 16).view("<f4") if tensor.dtype == "BF16" else data.astype("<f4")


@given(
    st.sampled_from(["F32", "F16", "BF16"]),
    arrays(
        np.float32,
        array_shapes(min_dims=5, max_dims=5, max_side=5),
        elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False),
    ),
)
def test_no_entry_is_further_off_than_a_127th_of_the_largest_of_its_token_and_head(
    dtype: str, values: np.ndarray
) -> None:
    values = np.where(np.abs(values) < 1e-2, 0, values)  # float16 has no more below
    data = (
        (values.view("<u4") >> 16).astype("<u2")
        if dtype == "BF16"
        else values.astype("<f4" if dtype == "F32" else "<f2")
    )
    given = Tensor(data, dtype)
    chunk = StoredState(prompt_chunk(tuple(range(values.shape[3])), kind=INT8, generation=1).meta, given)
    with closing(open_store(background=False)) as store:
        assert store.put(chunk)
        for _ in range(2):  # as it is read, and as it is known
            found = store.get(chunk.meta.id)
            assert found is not None
            assert (found.tensor.dtype, found.tensor.shape) == (dtype, values.shape)
            most = np.abs(floats(given)).max(4, keepdims=True, initial=0.0)
            assert (np.abs(floats(found.tensor) - floats(given)) <= most / 127).all()


def test_it_takes_a_quarter_of_float32_and_is_there_after_a_restart(tmp_path: Path) -> None:
    chunk = in_8_bits(range(400))
    for remake in (False, True):
        with closing(open_store(tmp_path / "store")) as store:
            assert remake or store.put(chunk)
            assert chunk.tensor.nbytes / 4 < store.stats().bytes < chunk.tensor.nbytes / 3.5
            found = store.get(chunk.meta.id)
            assert found is not None
            assert np.allclose(found.tensor.data, chunk.tensor.data, atol=0.05)
            assert found.meta.nbytes < chunk.tensor.nbytes / 3.5
        for catalog in tmp_path.glob("store/catalog*"):
            catalog.unlink()  # it is made again from the objects


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_no_finite_kv_entries_is_not_stored(bad: float) -> None:
    chunk = in_8_bits()
    values = chunk.tensor.data.copy()
    values[1, 2, 0, 7, 5] = bad
    pages = Tensor(np.zeros((1, 1, 1, 3, 64), np.uint8), "U8", page=16)
    with closing(open_store()) as store:
        assert not store.put(replace(chunk, tensor=Tensor(values, "F32")))
        assert not store.put(replace(chunk, tensor=pages))
        assert store.stats().refused == {"invalid": 2}
        assert store.get(chunk.meta.id) is None


def test_no_prefix_of_it_is_ever_found(tmp_path: Path) -> None:
    chunk = in_8_bits()
    with closing(open_store(tmp_path / "store")) as store:
        assert store.put(chunk)
        tokens = (*chunk.meta.token_ids, 7)
        assert store.find(chunk.meta.partition, chunk.meta.epoch, tokens) is None


@pytest.mark.parametrize("where", [0.01, 0.5, 0.99])
def test_a_damaged_one_is_a_counted_miss(tmp_path: Path, where: float) -> None:
    chunk = in_8_bits()
    with closing(open_store(tmp_path / "store")) as store:
        assert store.put(chunk)
        (path,) = tmp_path.glob("store/segments/*/*")
        raw = bytearray(path.read_bytes())
        raw[int(where * len(raw))] ^= 4
        path.write_bytes(raw)
        assert store.get(chunk.meta.id) is None
        assert (store.stats().corrupt, store.stats().misses) == (1, 1)


def segment(kind: str = INT8, stop: int = 40) -> Segment:
    return Segment(NAME, "p", "e", kind, 0, stop)


@pytest.mark.parametrize(
    ("one", "tensor"),
    [
        (segment(), in_8_bits().tensor),  # not in 8 bits
        (segment("rows"), quantized(in_8_bits().tensor)),  # in 8 bits, where nobody expects it
        (segment("kv"), quantized(in_8_bits().tensor)),
        (segment(stop=39), quantized(in_8_bits().tensor)),  # more scales than rows tell, or fewer
        (segment(stop=41), quantized(in_8_bits().tensor)),
        (segment(), replace(quantized(in_8_bits().tensor), of="INT4")),  # of a codec to come
    ],
)
def test_another_codec_or_another_count_of_scales_is_damage(one: Segment, tensor: Tensor) -> None:
    with pytest.raises(CorruptChunk, match="codec, or has another number"):
        opened(np.frombuffer(b"".join(map(bytes, encode(one, tensor)[1])), np.uint8), NAME)


def test_with_a_prompt_leaves_what_begins_with_it_and_what_was_made_of_it() -> None:
    prompt, other = in_8_bits(), in_8_bits(range(100, 140))
    longer = in_8_bits(range(60))
    rows = in_8_bits(range(200, 240), metadata={DONORS: [prompt.meta.id]})
    with closing(open_store()) as store:
        for chunk in (prompt, other, longer, rows):
            assert store.put(chunk)
        purged = store.purge(Selection(donors=(prompt.meta.id,)))
        assert (purged.prompts, purged.rows) == (2, 1)
        assert ids(store) == {other.meta.id}
