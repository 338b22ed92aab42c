"""The file format: readable by the safetensors library, and nothing damaged is taken for whole."""

import hashlib
import json

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dejakv.errors import StoreError
from dejakv.store.base import Tensor
from dejakv.store.checksum import BLOCK_ROWS, ROW_WORDS, checksum
from dejakv.store.codec import MAX_HEADER_BYTES, CorruptChunk, decode, encode
from dejakv.store.metacodec import decode_meta, encode_meta
from dejakv.testing.chunks import DTYPES, make_chunk, same_bits


def file_of(tensor: Tensor, id: str = "chunk-1") -> bytes:
    encoded = encode(id, tensor)
    return encoded.header + encoded.data.tobytes()


def parsed(raw: bytes, id: str = "chunk-1", expected: str | None = None) -> Tensor:
    return decode(id, np.frombuffer(raw, dtype=np.uint8), expected)


def with_header(raw: bytes, change: object) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    body = change if isinstance(change, bytes) else json.dumps(change).encode()
    return len(body).to_bytes(8, "little") + body + raw[8 + length :]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_reads_our_files(dtype: str) -> None:
    tensor = make_chunk(dtype=dtype).tensor
    raw = file_of(tensor)
    assert len(raw) % 64 == tensor.nbytes % 64
    if dtype == "BF16":
        theirs = safetensors.torch.load(raw)["state"]
        assert theirs.dtype == torch.bfloat16
        assert theirs.view(torch.uint16).numpy().tobytes() == tensor.data.tobytes()
    else:
        np.testing.assert_array_equal(safetensors.numpy.load(raw)["state"], tensor.data)


def test_a_file_the_library_wrote_is_not_a_chunk() -> None:
    raw = safetensors.numpy.save({"state": np.zeros(3, np.float32)})
    with pytest.raises(CorruptChunk):
        parsed(raw)


def test_any_flipped_bit_of_a_file_is_found() -> None:
    raw = bytearray(file_of(make_chunk(nbytes=2048).tensor))
    for position in range(len(raw)):
        bit = 1 << (position * 5 % 8)
        raw[position] ^= bit
        with pytest.raises(CorruptChunk):
            parsed(bytes(raw))
        raw[position] ^= bit
    parsed(bytes(raw))


def test_any_truncation_of_a_file_is_found() -> None:
    raw = file_of(make_chunk(nbytes=1024).tensor)
    for length in range(len(raw)):
        with pytest.raises(CorruptChunk):
            parsed(raw[:length])
    with pytest.raises(CorruptChunk):
        parsed(raw + b"\0")


def test_another_chunks_file_is_found_out() -> None:
    raw = file_of(make_chunk().tensor)
    with pytest.raises(CorruptChunk):
        parsed(raw, id="chunk-2")
    with pytest.raises(CorruptChunk):
        parsed(raw, expected="0" * 32)


def test_headers_of_ill_will_are_refused() -> None:
    tensor = make_chunk(nbytes=512).tensor
    raw = file_of(tensor)
    good = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    info = good["state"]
    assert same_bits(parsed(with_header(raw, good)), tensor)
    bad: list[object] = [
        b"",
        b"[" * 50_000,
        b"null",
        b"\xff\xfe",
        b'{"a": 1, "a": 2}',
        {**good, "second": info},
        {"__metadata__": good["__metadata__"]},
        {"state": info},
        {**good, "__metadata__": {**good["__metadata__"], "extra": "x"}},
        {**good, "state": {**info, "extra": 1}},
        {**good, "state": {**info, "dtype": "F64"}},
        {**good, "state": {**info, "shape": [2**62, 2**62, 0]}},
        {**good, "state": {**info, "shape": [-1, -1]}},
        {**good, "state": {**info, "shape": [True, tensor.nbytes // 4]}},
        {**good, "state": {**info, "shape": [1.0]}},
        {**good, "state": {**info, "shape": [1] * 40 + [tensor.nbytes // 4]}},
        {**good, "state": {**info, "shape": list(reversed(info["shape"]))}},
        {**good, "state": {**info, "data_offsets": [0, tensor.nbytes + 1]}},
        {**good, "state": {**info, "data_offsets": [4, tensor.nbytes]}},
        b" " * (MAX_HEADER_BYTES + 1),
    ]
    for header in bad:
        with pytest.raises(CorruptChunk):
            parsed(with_header(raw, header))
    with pytest.raises(CorruptChunk):
        parsed((2**63).to_bytes(8, "little") + raw[8:])


def test_what_cannot_be_written_says_what_can() -> None:
    with pytest.raises(StoreError, match="BF16 as u2"):
        encode("x", Tensor(np.zeros(2, np.float32), "BF16"))
    with pytest.raises(StoreError, match="dimensions"):
        encode("x", Tensor(np.zeros((1,) * 17, np.float32), "F32"))
    with pytest.raises(StoreError, match="exact_key"):
        encode("x" * 70_000, Tensor(np.zeros(2, np.float32), "F32"))


def test_the_checksum_is_the_one_that_is_documented() -> None:
    words = [int(word) for word in np.random.default_rng(5).integers(0, 2**64, 260 * ROW_WORDS + 3, dtype=np.uint64)]
    sha = hashlib.blake2b(digest_size=16)
    for part in (str(8 * len(words)), "label"):
        sha.update(len(part).to_bytes(8, "little") + part.encode())
    rows = [words[start : start + ROW_WORDS] for start in range(0, 260 * ROW_WORDS, ROW_WORDS)]
    for block in (rows[:BLOCK_ROWS], rows[BLOCK_ROWS:]):
        for column in zip(*block, strict=True):
            sha.update((sum(column) % 2**64).to_bytes(8, "little"))
    sha.update(b"".join(word.to_bytes(8, "little") for word in words[260 * ROW_WORDS :]))
    assert checksum(np.array(words, dtype=np.uint64), "label") == sha.hexdigest()


@settings(max_examples=100, deadline=None)
@given(
    start=st.integers(0, 300 * 8 * ROW_WORDS - 1),
    damage=st.binary(min_size=1, max_size=8 * ROW_WORDS),
    mode=st.sampled_from(["set", "flip"]),
)
def test_damage_within_a_row_is_always_found(start: int, damage: bytes, mode: str) -> None:
    octets = np.random.default_rng(0).integers(0, 256, 300 * 8 * ROW_WORDS + 77, dtype=np.uint8)
    before, intact = checksum(octets), octets.copy()
    place = octets[start : start + len(damage)]
    place[:] = np.frombuffer(damage, np.uint8)[: place.size] ^ (place if mode == "flip" else 0)
    assert (checksum(octets) == before) == np.array_equal(octets, intact)


@settings(max_examples=50, deadline=None)
@given(start=st.integers(0, 60), fill=st.sampled_from([0, 255]))
def test_a_lost_page_is_always_found(start: int, fill: int) -> None:
    octets = np.random.default_rng(0).integers(0, 256, 64 * 4096, dtype=np.uint8)
    before = checksum(octets)
    octets[start * 4096 : (start + 1) * 4096] = fill
    assert checksum(octets) != before


def test_swapped_pages_and_lost_zeros_change_the_checksum() -> None:
    array = np.random.default_rng(0).integers(0, 256, 3 * 8 * ROW_WORDS * 40, dtype=np.uint8)
    swapped = np.concatenate([array[4096:8192], array[:4096], array[8192:]])
    longer = np.concatenate([array, np.zeros(8, np.uint8)])
    assert len({checksum(item) for item in (array, swapped, longer)}) == 3
    assert checksum(array, "a", "bc") != checksum(array, "ab", "c")


def test_any_flipped_bit_of_a_description_is_found() -> None:
    meta = make_chunk(vectors={"prompt": np.ones(5, np.float32)}).meta
    blob = bytearray(encode_meta(meta))
    assert decode_meta(bytes(blob)).token_ids == meta.token_ids
    for position in range(len(blob)):
        blob[position] ^= 1 << (position % 8)
        with pytest.raises(CorruptChunk):
            decode_meta(bytes(blob))
        blob[position] ^= 1 << (position % 8)
    for length in range(0, len(blob), 7):
        with pytest.raises(CorruptChunk):
            decode_meta(bytes(blob[:length]))


@pytest.mark.parametrize("token", [-1, 2**32, "a"])
def test_token_ids_that_are_none_are_refused(token: object) -> None:
    from dataclasses import replace

    with pytest.raises(StoreError, match="token ids"):
        encode_meta(replace(make_chunk().meta, token_ids=(1, token)))  # type: ignore[arg-type]


def test_a_description_of_an_older_version_lacks_later_fields_and_is_read() -> None:
    blob = encode_meta(make_chunk().meta)[16:]
    length = int.from_bytes(blob[:4], "little")
    described = json.loads(blob[4 : 4 + length])
    older = {
        name: value
        for name, value in described.items()
        if name not in ("parent", "rows_from", "position", "generation")
    }
    assert len(older) == len(described) - 4
    body = json.dumps(older).encode()
    content = len(body).to_bytes(4, "little") + body + blob[4 + length :]
    meta = decode_meta(hashlib.blake2b(content, digest_size=16).digest() + content)
    assert (meta.parent, meta.rows_from, meta.position, meta.generation) == ("", 0, 0, 0)
    assert meta.token_ids == make_chunk().meta.token_ids
