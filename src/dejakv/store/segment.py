"""A segment: one immutable safetensors object that describes itself.

Nothing in it is ever changed, and it refers to nothing.

It has the tensors `keys` (names of the prefixes that end inside), `ids` (tokens of its rows), `pad`
and `state`, in this order. One read of the first kilobytes has everything but the state. The format
(https://huggingface.co/docs/safetensors) is written here rather than by the library, whose
raw-bytes interface changed; the tests read the files with it.

The checksum of the state runs at memory speed, so that what is read can be verified: zlib.crc32
takes three to five times as long as copying the bytes, blake2b more than twenty. The bytes, as
64-bit words in rows of 521, are summed column by column modulo 2**64, for every 256 rows; blake2b
over the sums binds them together. It always detects damage within 4168 consecutive bytes: every
flipped bit and every lost or overwritten page. Wider damage goes unnoticed only if it cancels in
every column. It guards against faults, not against a forger who may write to the folder.
"""

import base64
import hashlib
import json
import math
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dejakv.identity import BLOCK_TOKENS, MediumSpan
from dejakv.store.base import (
    KV,
    NUMPY_DTYPES,
    CorruptState,
    RawTensor,
    StateInfo,
    check_tensor,
    seconds_text,
)
from dejakv.store.prefix_keys import SIZE, PrefixKeys, ends_of

FORMAT = "dejakv-segment-3"
"""Format of an object, in its header."""
HEAD = 16 << 10
"""Bytes at the beginning of an object, enough for most descriptions."""
NEVER = 1e18
"""Time at which entries without a lifetime expire."""
DESCRIPTION = "record"
"""Kind of a segment that has only the description of a prompt.

It serves processes that share objects but no catalog.
"""
MAX_SEGMENT_TOKENS = 256
"""Most tokens of one segment."""
MAX_SEGMENT_BYTES = 32 << 20
"""Most bytes of one segment, which is checked and stored as a whole, even for a few of its rows."""
_ALIGNMENT = 64
_ROW_WORDS = 521
_BLOCK_ROWS = 256
_TEXT = {
    **{name: name for name in ("name", "partition", "epoch", "kind")},
    "record": "entry_id",
    "checksum": "checksum",
}
"""Attribute of a segment by its field in the header: stored fields keep their first names."""
_JSON = ("start", "stop", "spans", "position", "generation", "lineage")
_SECONDS = ("created", "ttl")


def new_segment_name() -> str:
    """Return a name that no other segment has: 32 random hexadecimal digits."""
    return secrets.token_hex(16)


@dataclass(frozen=True)
class Segment:
    """What an object says of itself.

    Attributes
    ----------
    name : str
        Name of the object, 32 hexadecimal digits that no other has.
    partition, epoch : str
        Whose state it is, and fingerprint of what computed it.
    kind : str
        `kv`: exact rows of a prompt. Segments of other kinds stand for themselves alone and have no
        keys.
    start, stop : int
        Its rows, counted in the prompt in which it was computed; of a snapshot the tokens that it
        saves; 0 and 0 of other tensors without rows.
    prefix : bytes
        Key of the first `start` tokens.
    keys : tuple[bytes, ...]
        Names of the prefixes that end at `ends_of(start, stop, spans)`.
    ids : bytes
        Tokens of its rows, 4 bytes each.
    spans : tuple[MediumSpan, ...]
        Media that overlap its rows.
    entry_id : str
        Id of the prompt for which it was stored.
    position, generation : int
        See `StateInfo`.
    lineage : tuple[str, ...]
        Ids of what rows of a blend were computed from.
    created, ttl : float
        See `StateInfo`.
    about : bytes
        Of other kinds than `kv`: the whole description (`base.encode_meta`).
    checksum : str
        Checksum of its state.
    nbytes : int
        Bytes of the object.
    page : int
        Rows in each page of its state (`RawTensor.page`); in the header where it is not 1.
    purges : int
        How many purges of shared objects its writer knew when its put began; in the header where
        there were some.
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
    entry_id: str = ""
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

    @property
    def due(self) -> float:
        """When it may not be used any more, in seconds since 1970."""
        return self.created + self.ttl if self.ttl else NEVER

    @property
    def row(self) -> tuple[str, str, bytes, bytes]:
        """Partition, epoch, keys and tokens (empty with media), as a catalog has them."""
        return (
            self.partition,
            self.epoch,
            b"".join(dict.fromkeys(self.keys)),
            b"" if self.spans else self.ids,
        )


def cut_segments(
    meta: StateInfo,
    keys: PrefixKeys,
    start: int,
    stop: int,
    row_bytes: int,
    cuts: Collection[int] = (),
    unit: int = BLOCK_TOKENS,
) -> list[Segment]:
    """Cut rows `start` to `stop - 1` of a prompt into segments, without names yet.

    Each has at most `MAX_SEGMENT_TOKENS` rows and `MAX_SEGMENT_BYTES` bytes, or `unit` rows where
    that is more.

    Parameters
    ----------
    meta : StateInfo
        Description of the prompt.
    keys : PrefixKeys
        Its keys.
    start, stop : int
        Rows to cut.
    row_bytes : int
        Bytes of one row.
    cuts : Collection[int]
        Rows at which a segment has to begin.
    unit : int
        The limit in rows is a multiple of this, and at least this.
    """
    max_rows = max(
        unit, min(MAX_SEGMENT_TOKENS, MAX_SEGMENT_BYTES // max(1, row_bytes)) // unit * unit
    )
    segments: list[Segment] = []
    while start < stop:
        # At multiples of the limit from the prompt's beginning, so that all prompts are cut alike.
        end = min(
            [stop, start // max_rows * max_rows + max_rows, *(cut for cut in cuts if cut > start)]
        )
        inside = tuple(s for s in meta.spans if s.start < end and s.start + s.length > start)
        named = tuple(keys.prefix_key(prefix_end) for prefix_end in ends_of(start, end, inside))
        segments.append(
            Segment(
                "", meta.partition, meta.epoch, KV, start, end, keys.prefix_key(start), named,
                keys.ids[start:end].tobytes(), inside, meta.id, created=meta.created, ttl=meta.ttl,
            )
        )  # fmt: skip
        start = end

    return segments


def encode(segment: Segment, tensor: RawTensor) -> tuple[Segment, list[NDArray[np.uint8] | bytes]]:
    """Encode a segment and its state.

    Returns
    -------
    segment : Segment
        The segment with its checksum and size.
    buffers : list[ndarray | bytes]
        Bytes of the object: its description, then its state.

    Raises
    ------
    StoreError
        As `check_tensor`.
    """
    check_tensor(tensor)
    data = np.ascontiguousarray(tensor.data, dtype=NUMPY_DTYPES[tensor.dtype])
    shape, flat = list(tensor.data.shape), data.reshape(-1).view(np.uint8)
    segment = replace(
        segment,
        checksum=_checksum_of(flat, segment.name, tensor.dtype, shape),
        page=tensor.page,
    )

    keys = b"".join(segment.keys)
    meta = {name: getattr(segment, attribute) for name, attribute in _TEXT.items()}
    meta |= {name: json.dumps(getattr(segment, name)) for name in _JSON if name != "spans"}
    meta |= {name: seconds_text(getattr(segment, name)) for name in _SECONDS}
    meta |= {"page": str(segment.page)} if segment.page > 1 else {}
    meta |= {"purges": str(segment.purges)} if segment.purges else {}
    meta["spans"] = json.dumps([[span.start, span.length, span.digest] for span in segment.spans])
    meta |= {
        "format": FORMAT,
        "prefix": segment.prefix.hex(),
        "about": base64.b64encode(segment.about).decode(),
    }

    # Last: it covers every other entry.
    meta["index"] = _digest(meta, keys, segment.ids)
    body = _header(
        meta, len(segment.keys), len(segment.ids) // 4, tensor.dtype, shape, int(flat.size)
    )

    # Aligned, so that a memory map can be viewed as any dtype without a copy.
    pad = -(len(keys) + len(segment.ids)) % _ALIGNMENT
    head = len(body).to_bytes(8, "little") + body + keys + segment.ids + bytes(pad)
    return replace(segment, nbytes=len(head) + int(flat.size)), [head, flat]


def _header(
    meta: dict[str, str], keys: int, ids: int, dtype: str, shape: list[int], size: int
) -> bytes:
    """Return the header of an object with so many keys and tokens, and a state of `size` bytes."""
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


def read_description(
    read: Callable[[int], tuple[bytes, int]], first: int = HEAD
) -> tuple[Segment, str, list[int], int]:
    """Read and verify the description of an object.

    Parameters
    ----------
    read : Callable[[int], tuple[bytes, int]]
        Returns the first bytes of the object, at most so many, and the object's size.
    first : int
        Bytes of the first read.

    Returns
    -------
    segment : Segment
        The description.
    dtype : str
        Safetensors name of the state's dtype.
    shape : list[int]
        Shape of the state.
    offset : int
        Where the state begins in the object.

    Raises
    ------
    CorruptState
        If the description is damaged, or of another format. Errors of `read` are passed on.
    """
    try:
        head, size = read(first)
        length = int.from_bytes(head[:8], "little")
        # Checked before it is used: a damaged length must not ask for gigabytes.
        if not 0 < length <= size - 8:
            raise CorruptState(f"a header of {length} bytes in an object of {size}")
        # A long description: one more read, with some of what follows it.
        if len(head) < 8 + length:
            head, size = read(8 + length + HEAD)
        header: Any = json.loads(head[8 : 8 + length])
        meta: dict[str, str] = dict(header["__metadata__"])
        if meta["format"] != FORMAT:
            raise CorruptState("the object is of another format")

        base = 8 + length
        (k0, k1), (i0, i1) = header["keys"]["data_offsets"], header["ids"]["data_offsets"]
        (s0, s1), dtype, shape = (
            header["state"][name] for name in ("data_offsets", "dtype", "shape")
        )
        if base + s1 != size or not 0 == k0 <= k1 == i0 <= i1 <= s0 <= s1:
            raise CorruptState("the offsets do not fit the object")

        if len(head) < base + s0:
            head, size = read(base + s0)
        keys, ids = head[base : base + k1], head[base + i0 : base + i1]
        # To the byte: what no digest covers is damage too.
        same = head[8:base] == _header(
            meta, len(keys) // SIZE, len(ids) // 4, dtype, shape, s1 - s0
        )
        if (
            not same
            or any(head[base + i1 : base + s0])
            or meta.pop("index") != _digest(meta, keys, ids)
        ):
            raise CorruptState("the description is damaged")

        plain: dict[str, Any] = {name: json.loads(meta[name]) for name in _JSON}
        plain |= {name: float(meta[name]) for name in _SECONDS}
        plain["spans"] = tuple(MediumSpan(*span) for span in plain["spans"])
        plain["lineage"] = tuple(plain["lineage"])
        segment = Segment(
            **{attribute: meta[name] for name, attribute in _TEXT.items()}, **plain,
            prefix=bytes.fromhex(meta["prefix"]),
            keys=tuple(keys[offset : offset + SIZE] for offset in range(0, len(keys), SIZE)),
            ids=ids, about=base64.b64decode(meta["about"]), nbytes=size,
            page=int(meta.get("page", "1")), purges=int(meta.get("purges", "0")),
        )  # fmt: skip
        kind = np.dtype(NUMPY_DTYPES[dtype])
        if math.prod(shape) * kind.itemsize != s1 - s0:
            raise CorruptState("the offsets do not fit the shape")
        ends = (
            ends_of(segment.start, segment.stop, segment.spans)
            if segment.kind == KV and segment.stop > segment.start
            else []
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptState(f"the description is damaged: {error}") from error

    if len(segment.keys) not in (0, len(ends)) or (segment.keys and segment.kind != KV):
        raise CorruptState("the keys do not fit the rows")
    if "of" in meta:
        raise CorruptState("the state is in 8 bits, which an earlier version wrote")
    return segment, dtype, shape, base + s0


def open_object(buffer: NDArray[np.uint8], name: str) -> tuple[Segment, RawTensor]:
    """Read and verify segment and state in the bytes of an object.

    Returns
    -------
    tuple[Segment, RawTensor]
        The tensor is a read-only view of the bytes.

    Raises
    ------
    CorruptState
        If the object is damaged or another one.
    """
    segment, dtype, shape, state_offset = read_description(
        lambda need: (buffer[:need].tobytes(), buffer.size)
    )

    # A file renamed or copied over another is whole, but of another prompt.
    if segment.name != name:
        raise CorruptState(f"object {name} is another one")

    flat = buffer[state_offset:]
    if _checksum_of(flat, name, dtype, shape) != segment.checksum:
        raise CorruptState(f"object {name}: the checksum differs")
    return segment, state_view(buffer, dtype, shape, segment.page)


def state_view(buffer: NDArray[np.uint8], dtype: str, shape: Sequence[int], page: int) -> RawTensor:
    """Return a read-only view of the state in the bytes of an object, which end with it."""
    element = np.dtype(NUMPY_DTYPES[dtype])
    flat = buffer[buffer.size - math.prod(shape) * element.itemsize :]
    data = flat.view(element).reshape(shape)
    data.flags.writeable = False
    return RawTensor(data, dtype, page)


def _checksum_of(octets: NDArray[np.uint8], name: str, dtype: str, shape: list[int]) -> str:
    """Return the checksum of a state's bytes and their description, 32 hexadecimal digits."""
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
    return hashlib.blake2b(
        len(text).to_bytes(8, "little") + text + keys + ids, digest_size=16
    ).hexdigest()
