"""Objects of a bucket in fewer bytes, exactly: the state's bytes apart by their place in a word of four (planes), through zstd.

An object is two frames of the format (RFC 8878): one that decoders skip, with the object's beginning as it is, so that a read of the first
kilobytes has its description; and one with the planes. Objects that are not packed begin otherwise, so both may stand in one bucket.

docs/results/many-machines.md has the measurement: bf16 takes 1/1.47 of its bytes, float32 1/1.19.
"""

import errno
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from dejakv.errors import MissingExtraError
from dejakv.store.base import CorruptChunk
from dejakv.store.objects import Bytes, StoreUnavailable

_FRAME = struct.Struct("<IIQ")
"""Magic number and length of a skippable frame, then the size of the whole object when it is not packed."""
_MAGIC = 0x184D2A5D
_LEVEL = 1
_WORD = 4
_LEAST = 1 << 16
"""Bytes of state below which nothing is packed."""
_MOST = 256 << 20
"""Bytes of state above which nothing is packed: what claims more is no object of ours, and no memory is taken for it."""
MORE = _FRAME.size
"""Bytes by which a description begins later in a packed object."""


def check_zstd() -> Any:
    """The library. Raises: MissingExtraError"""
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError("zstandard", "remote", "compress") from error
    return zstandard


def packed(parts: Sequence[Any]) -> bytes:
    """An object's bytes, of its description and its state: packed if that makes them fewer."""
    if len(parts) == 2:
        head, state = bytes(parts[0]), np.frombuffer(parts[1], np.uint8)
        if _LEAST <= state.size <= _MOST and state.size % _WORD == 0:
            # Sign and exponent bytes of neighbours are alike: beside each other they compress.
            planes = np.ascontiguousarray(state.reshape(-1, _WORD).T)
            frame = check_zstd().ZstdCompressor(_LEVEL).compress(planes)
            # Random state does not compress: then it stays as it is.
            if len(frame) + MORE < state.size:
                return _FRAME.pack(_MAGIC, 8 + len(head), len(head) + state.size) + head + frame
    return b"".join(parts)


def unpacked(data: Bytes, name: str) -> Bytes:
    """An object's bytes as they were put. Raises: CorruptChunk; Unknown without the library"""
    if (frame_sizes := _begins(data[:MORE].tobytes())) is None:
        return data
    try:
        zstd, (length, size) = check_zstd(), frame_sizes
    except MissingExtraError as error:
        raise StoreUnavailable(OSError(errno.EIO, str(error))) from error
    try:
        frame = data[MORE + length :]
        if not 0 < size - length == zstd.frame_content_size(frame) <= _MOST:
            raise CorruptChunk(f"object {name}: its size is another one, or none that an object has")
        planes = np.frombuffer(zstd.ZstdDecompressor().decompress(frame), np.uint8)
        unpacked_bytes = np.empty(size, np.uint8)
        unpacked_bytes[:length] = data[MORE : MORE + length]
        unpacked_bytes[length:].reshape(-1, _WORD)[:] = planes.reshape(_WORD, -1).T
    except (zstd.ZstdError, ValueError) as error:
        raise CorruptChunk(f"object {name} cannot be unpacked: {error}") from error

    return unpacked_bytes


def beginning(head: bytes, size: int) -> tuple[bytes, int]:
    """The first bytes of an object and its size, as they were before packing; `head`: at least `MORE` more bytes than are needed."""
    frame_sizes = _begins(head[:MORE])
    if frame_sizes is None:
        return head, size
    return head[MORE : MORE + frame_sizes[0]], frame_sizes[1]


def _begins(head: bytes) -> tuple[int, int] | None:
    """Bytes of the description, and of the whole before packing; None for an unpacked object."""
    if len(head) < MORE:
        return None
    magic, length, size = _FRAME.unpack(head)
    return (length - 8, size) if magic == _MAGIC and length >= 8 else None
