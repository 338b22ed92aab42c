"""A segment: one immutable safetensors object that describes itself. Nothing in it is ever changed, and it refers to nothing.

Tensors in this order: `keys` (names of the prefixes that end inside), `ids` (tokens of its rows), `pad`, `state`. One read of the
first kilobytes has everything but the state. The format (https://huggingface.co/docs/safetensors) is written here rather than by
the library, whose raw-bytes interface changed; the tests read the files with it.

The checksum of the state runs at memory speed, so that what is read can be verified: zlib.crc32 takes three to five times as
long as copying the bytes, blake2b more than twenty. The bytes, as 64-bit words in rows of 521, are summed column by column modulo
2**64, for every 256 rows; blake2b over the sums binds them together. It always detects damage within 4168 consecutive bytes: every
flipped bit and every lost or overwritten page. Wider damage goes unnoticed only if it cancels in every column. It guards against
faults, not against a forger who may write to the folder.
"""

import base64
import hashlib
import json
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import StoreError
from dejakv.identity import BLOCK_TOKENS, MediumSpan
from dejakv.store.base import AXIS, INT8, KV, NUMPY_DTYPES, ChunkMeta, CorruptChunk, Tensor, check
from dejakv.store.keys import SIZE, PrefixKeys, ends_of
from dejakv.store.records import seconds_text

FORMAT = "dejakv-segment-3"
HEAD = 16 << 10
"""Bytes at the beginning of an object, enough for most descriptions."""
NEVER = 1e18
RECORD = "record"
"""Kind of a segment with the description of a prompt alone, for processes that share objects but no catalog."""
MOST_TOKENS = 256
MOST_BYTES = 32 << 20
"""Limits of one segment, which is checked and kept as a whole, even for a few of its rows."""
_ALIGNMENT = 64
_ROW_WORDS = 521
_BLOCK_ROWS = 256
_TEXT = ("name", "partition", "epoch", "kind", "record", "checksum")
_JSON = ("start", "stop", "spans", "position", "generation", "lineage")
_SECONDS = ("created", "ttl")
_FLOATS = ("F32", "F16", "BF16")
_SCALE = 4
"""Bytes of a scale."""


@dataclass(frozen=True)
class Segment:
    """What an object says of itself.

    name         of the object, 32 hexadecimal digits that no other has
    kind         `kv`: exact rows of a prompt; others stand for themselves alone and have no keys
    start, stop  its rows, of the prompt it was computed in; 0 and 0 of what has no rows
    prefix       key of the first `start` tokens
    keys         names of the prefixes that end at `ends_of(start, stop, spans)`
    ids          tokens of its rows, 4 bytes each
    record       id of the prompt that it was stored for
    lineage      ids of what rows of a blend were computed from
    about        of other kinds than `kv`: the whole description (`records.encode_meta`)
    page         rows in each page of its state (`Tensor.page`); said where it is not 1
    purges       how many purges of shared objects its writer knew when its put began; said where there were some
    of           of kind `int8`: dtype of its state before it was quantized
    due          when it may not be used any more, in seconds since 1970
    """

    name: str
    partition: str
    epoch: str
    kind: str
    start: int
    stop: int
    prefix: bytes = b""
    keys: tuple[bytes, ...] = ()
    ids: bytes = b""
    spans: tuple[MediumSpan, ...] = ()
    record: str = ""
    position: int = 0
    generation: int = 0
    lineage: tuple[str, ...] = ()
    created: float = 0.0
    ttl: float = 0.0
    about: bytes = b""
    checksum: str = ""
    nbytes: int = 0
    page: int = 1
    purges: int = 0
    of: str = ""

    @property
    def due(self) -> float:
        return self.created + self.ttl if self.ttl else NEVER

    @property
    def row(self) -> tuple[str, str, bytes, bytes]:
        """Partition, epoch, keys and, without media, tokens, as a catalog has them."""
        return self.partition, self.epoch, b"".join(dict.fromkeys(self.keys)), b"" if self.spans else self.ids


def cut(
    meta: ChunkMeta,
    keys: PrefixKeys,
    start: int,
    stop: int,
    row_bytes: int,
    cuts: Collection[int] = (),
    unit: int = BLOCK_TOKENS,
) -> list[Segment]:
    """Segments, without names yet, for rows `start` to `stop - 1` of a prompt: at most `MOST_TOKENS` and `MOST_BYTES` each.

    cuts  rows at which one has to begin
    unit  rows of which no segment has less, unless it ends with the prompt
    """
    max_rows = max(unit, min(MOST_TOKENS, MOST_BYTES // max(1, row_bytes)) // unit * unit)
    segments: list[Segment] = []
    while start < stop:
        # At multiples of the limit from the prompt's beginning, so that all prompts are cut alike.
        end = min([stop, start // max_rows * max_rows + max_rows, *(cut for cut in cuts if cut > start)])
        inside = tuple(s for s in meta.spans if s.start < end and s.start + s.length > start)
        named = tuple(keys.at(prefix_end) for prefix_end in ends_of(start, end, inside))
        segments.append(
            Segment(
                "", meta.partition, meta.epoch, KV, start, end, keys.at(start), named,
                keys.ids[start:end].tobytes(), inside, meta.id, created=meta.created, ttl=meta.ttl,
            )
        )  # fmt: skip
        start = end

    return segments


def encode(segment: Segment, tensor: Tensor) -> tuple[Segment, list[NDArray[np.uint8] | bytes]]:
    """The segment with its checksum and size, and the buffers of its object. Raises: StoreError as `check`."""
    check(tensor)
    data = np.ascontiguousarray(tensor.data, dtype=NUMPY_DTYPES[tensor.dtype])
    shape, flat = list(tensor.data.shape), data.reshape(-1).view(np.uint8)
    segment = replace(
        segment, checksum=_sum_of(flat, segment.name, tensor.dtype, shape), page=tensor.page, of=tensor.of
    )

    keys = b"".join(segment.keys)
    meta = {name: getattr(segment, name) for name in _TEXT}
    meta |= {name: json.dumps(getattr(segment, name)) for name in _JSON if name != "spans"}
    meta |= {name: seconds_text(getattr(segment, name)) for name in _SECONDS}
    meta |= {"page": str(segment.page)} if segment.page > 1 else {}
    meta |= {"purges": str(segment.purges)} if segment.purges else {}
    meta |= {"of": segment.of} if segment.of else {}
    meta["spans"] = json.dumps([[span.start, span.length, span.digest] for span in segment.spans])
    meta |= {"format": FORMAT, "prefix": segment.prefix.hex(), "about": base64.b64encode(segment.about).decode()}
    # Last: it covers every other entry.
    meta["index"] = _digest(meta, keys, segment.ids)
    body = _header(meta, len(segment.keys), len(segment.ids) // 4, tensor.dtype, shape, int(flat.size))
    # Aligned, so that a memory map can be viewed as any dtype without a copy.
    pad = -(len(keys) + len(segment.ids)) % _ALIGNMENT
    head = len(body).to_bytes(8, "little") + body + keys + segment.ids + bytes(pad)
    return replace(segment, nbytes=len(head) + int(flat.size)), [head, flat]


def _header(meta: dict[str, str], keys: int, ids: int, dtype: str, shape: list[int], size: int) -> bytes:
    """The header of an object with so many keys and tokens, and a state of `size` bytes."""
    offset, tensors = 0, {}
    for name, kind, dims, length in (
        ("keys", "U8", [keys, SIZE], keys * SIZE),
        ("ids", "U32", [ids], 4 * ids),
        ("pad", "U8", [pad := -(keys * SIZE + 4 * ids) % _ALIGNMENT], pad),
        ("state", dtype, shape, size),
    ):
        tensors[name] = {"dtype": kind, "shape": dims, "data_offsets": [offset, offset + length]}
        offset += length

    body = json.dumps({"__metadata__": meta, **tensors}, separators=(",", ":")).encode()
    return body + b" " * (-(8 + len(body)) % _ALIGNMENT)


def described(read: Callable[[int], tuple[bytes, int]], first: int = HEAD) -> tuple[Segment, str, list[int], int]:
    """The verified description of an object; dtype, shape and place of its state. Raises: CorruptChunk, and the errors of `read`.

    read   returns the first bytes of the object, at most so many, and the object's size
    first  bytes that are read at once
    """
    try:
        head, size = read(first)
        length = int.from_bytes(head[:8], "little")
        # Checked before it is used: a damaged length must not ask for gigabytes.
        if not 0 < length <= size - 8:
            raise CorruptChunk(f"a header of {length} bytes in an object of {size}")
        # A long description: one more read, with some of what follows it.
        if len(head) < 8 + length:
            head, size = read(8 + length + HEAD)
        header: Any = json.loads(head[8 : 8 + length])
        meta: dict[str, str] = dict(header["__metadata__"])
        if meta["format"] != FORMAT:
            raise CorruptChunk("the object is of another format")

        base = 8 + length
        (k0, k1), (i0, i1) = header["keys"]["data_offsets"], header["ids"]["data_offsets"]
        (s0, s1), dtype, shape = (header["state"][name] for name in ("data_offsets", "dtype", "shape"))
        if base + s1 != size or not 0 == k0 <= k1 == i0 <= i1 <= s0 <= s1:
            raise CorruptChunk("the offsets do not fit the object")
        if len(head) < base + s0:
            head, size = read(base + s0)
        keys, ids = head[base : base + k1], head[base + i0 : base + i1]
        # To the byte: what no digest covers is damage too.
        same = head[8:base] == _header(meta, len(keys) // SIZE, len(ids) // 4, dtype, shape, s1 - s0)
        if not same or any(head[base + i1 : base + s0]) or meta.pop("index") != _digest(meta, keys, ids):
            raise CorruptChunk("the description is damaged")

        plain: dict[str, Any] = {name: json.loads(meta[name]) for name in _JSON}
        plain |= {name: float(meta[name]) for name in _SECONDS}
        plain["spans"] = tuple(MediumSpan(*span) for span in plain["spans"])
        plain["lineage"] = tuple(plain["lineage"])
        segment = Segment(
            **{name: meta[name] for name in _TEXT}, **plain, prefix=bytes.fromhex(meta["prefix"]),
            keys=tuple(keys[offset : offset + SIZE] for offset in range(0, len(keys), SIZE)), ids=ids,
            about=base64.b64decode(meta["about"]), nbytes=size, page=int(meta.get("page", "1")),
            purges=int(meta.get("purges", "0")), of=meta.get("of", ""),
        )  # fmt: skip
        kind = np.dtype(NUMPY_DTYPES[dtype])
        if math.prod(shape) * kind.itemsize != s1 - s0:
            raise CorruptChunk("the offsets do not fit the shape")
        ends = (
            ends_of(segment.start, segment.stop, segment.spans)
            if segment.kind == KV and segment.stop > segment.start
            else []
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptChunk(f"the description is damaged: {error}") from error

    if len(segment.keys) not in (0, len(ends)) or (segment.keys and segment.kind != KV):
        raise CorruptChunk("the keys do not fit the rows")
    quantized = dtype == "U8" and len(shape) == 5 and shape[AXIS] == segment.stop - segment.start and shape[-1] > _SCALE
    if not (segment.of in _FLOATS and quantized) if segment.kind == INT8 else segment.of:
        raise CorruptChunk("the state is of another codec, or has another number of scales than rows")
    return segment, dtype, shape, base + s0


def opened(buffer: NDArray[np.uint8], name: str) -> tuple[Segment, Tensor]:
    """Segment and state in an object's bytes, verified; the tensor is a read-only view. Raises: CorruptChunk."""
    segment, dtype, shape, state_offset = described(lambda need: (buffer[:need].tobytes(), buffer.size))
    # A file renamed or copied over another is whole, but of another prompt.
    if segment.name != name:
        raise CorruptChunk(f"object {name} is another one")

    flat = buffer[state_offset:]
    if _sum_of(flat, name, dtype, shape) != segment.checksum:
        raise CorruptChunk(f"object {name}: the checksum differs")
    data = flat.view(np.dtype(NUMPY_DTYPES[dtype])).reshape(shape)
    data.flags.writeable = False
    return segment, Tensor(data, dtype, segment.page, segment.of)


def quantized(tensor: Tensor) -> Tensor:
    """KV entries `[2, layers, kv_heads, rows, head_dim]` in 8 bits, `[2, layers, kv_heads, rows, head_dim + 4]` uint8: of each token and head
    the entries as int8 by a scale, and behind them the scale, a 127th of their absmax, as a float32.

    Raises: StoreError for what is no finite KV entries.
    """
    if tensor.dtype not in _FLOATS or tensor.data.ndim != 5:
        raise StoreError(f"a state of {tensor.dtype} {tensor.shape} is no KV entries: leave out kv_quantization")
    *outer, rows, width = tensor.shape
    quantized_data = np.empty((*outer, rows, width + _SCALE), np.uint8)
    # One head at a time: float32 of a whole state would take four times its bytes or more.
    for head in np.ndindex(*outer):
        values = _floats(tensor.data[head], tensor.dtype)
        scale = (np.abs(values).max(1, keepdims=True, initial=0.0) / 127).astype("<f4")
        if not np.isfinite(scale).all():
            raise StoreError("KV entries that are not finite cannot be quantized: leave out kv_quantization")
        # A scale of 0 means that all entries are 0: no division by it.
        quantized_data[head][:, :width] = np.rint(values / np.where(scale, scale, 1)).astype(np.int8).view(np.uint8)
        # Beside the entries of its token, so that a slice of rows has its own scales.
        quantized_data[head][:, width:] = scale.view(np.uint8)
    return Tensor(quantized_data, "U8", of=tensor.dtype)


def dequantized(tensor: Tensor) -> Tensor:
    """KV entries in the dtype that they had before `quantized`; a tensor that is not quantized as it is."""
    if not tensor.of:
        return tensor
    *outer, rows, width = tensor.shape
    restored = np.empty((*outer, rows, width - _SCALE), NUMPY_DTYPES[tensor.of])
    for head in np.ndindex(*outer):
        int8_values, scale = np.split(tensor.data[head], [-_SCALE], axis=1)
        values = int8_values.view(np.int8) * np.ascontiguousarray(scale).view("<f4")
        if tensor.of == "BF16":  # to the nearest, of two the even one
            bits = values.view("<u4")
            values = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        restored[head] = values

    restored.flags.writeable = False
    return Tensor(restored, tensor.of)


def _floats(data: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    # bfloat16 is the upper half of a float32.
    return (data.astype("<u4") << 16).view("<f4") if dtype == "BF16" else data.astype("<f4")


def _sum_of(octets: NDArray[np.uint8], name: str, dtype: str, shape: list[int]) -> str:
    """Checksum of a state's bytes and their description, 32 hexadecimal digits."""
    sha = hashlib.blake2b(digest_size=16)
    for part in (str(octets.size), FORMAT, name, dtype, ",".join(map(str, shape))):
        encoded = part.encode()
        sha.update(len(encoded).to_bytes(8, "little") + encoded)

    whole = octets.size // (8 * _ROW_WORDS)
    words = octets[: whole * 8 * _ROW_WORDS].view("<u8").reshape(whole, _ROW_WORDS)
    for start in range(0, whole, _BLOCK_ROWS):
        sums = np.add.reduce(words[start : start + _BLOCK_ROWS], axis=0)
        sha.update(sums.astype("<u8", copy=False).tobytes())
    # The rest, shorter than a row, is hashed as it is.
    sha.update(octets[whole * 8 * _ROW_WORDS :].tobytes())
    return sha.hexdigest()


def _digest(meta: dict[str, str], keys: bytes, ids: bytes) -> str:
    text = json.dumps(meta, sort_keys=True).encode()
    return hashlib.blake2b(len(text).to_bytes(8, "little") + text + keys + ids, digest_size=16).hexdigest()
