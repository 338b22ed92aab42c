"""Objects of a bucket in fewer bytes, without loss.

The state's bytes are parted by their place in a word of four (planes), and go through zstd.

An object is two frames of the format (RFC 8878). Decoders skip the first, which has the object's
beginning as it is, so that a read of the first kilobytes has its description. The second has the
planes. Objects that are not packed begin otherwise, so both may stand in one bucket.

docs/results/many-machines.md has the measurement: bf16 takes 1/1.47 of its bytes, float32 1/1.19.
"""

import errno
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from dejakv.errors import MissingExtraError
from dejakv.store.base import CorruptState
from dejakv.store.objects import Bytes, StoreUnavailable

_FRAME = struct.Struct("<IIQ")
"""Magic number and length of a skippable frame, then the size of the whole object when unpacked."""
_MAGIC = 0x184D2A5D
_LEVEL = 1
_WORD = 4
_MIN_STATE_BYTES = 1 << 16
"""Bytes of state below which nothing is packed."""
_MOST = 256 << 20
"""Bytes of state above which nothing is packed.

What claims more is no object of ours, and no memory is taken for it.
"""
MORE = _FRAME.size
"""Bytes by which a description begins later in a packed object."""


def check_zstd() -> Any:
    """Return the module `zstandard`.

    Raises
    ------
    MissingExtraError
        If it is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError("zstandard", "remote", "compress") from error

    return zstandard


def packed(parts: Sequence[Any]) -> bytes:
    """Return the bytes of an object, packed if that makes them fewer.

    Only state of 64 KiB to 256 MiB in whole words of four bytes is packed.

    Parameters
    ----------
    parts : Sequence[Any]
        Buffers with its description and its state.

    Raises
    ------
    MissingExtraError
        If state is to be packed and zstandard is not installed.
    """
    if len(parts) == 2:
        head, state = bytes(parts[0]), np.frombuffer(parts[1], np.uint8)
        if _MIN_STATE_BYTES <= state.size <= _MOST and state.size % _WORD == 0:
            # Sign and exponent bytes of neighbours are alike: beside each other they compress.
            planes = np.ascontiguousarray(state.reshape(-1, _WORD).T)
            frame = check_zstd().ZstdCompressor(_LEVEL).compress(planes)
            # Random state does not compress: then it stays as it is.
            if len(frame) + MORE < state.size:
                return _FRAME.pack(_MAGIC, 8 + len(head), len(head) + state.size) + head + frame

    return b"".join(parts)


def unpacked(data: Bytes, name: str) -> Bytes:
    """Return the bytes of an object as they were put.

    Raises
    ------
    CorruptState
        If the object is damaged.
    StoreUnavailable
        Without the library.
    """
    if (frame_sizes := _read_frame(data[:MORE].tobytes())) is None:
        return data
    try:
        zstd, (length, size) = check_zstd(), frame_sizes
    except MissingExtraError as error:
        raise StoreUnavailable(OSError(errno.EIO, str(error))) from error
    try:
        frame = data[MORE + length :]
        if not 0 < size - length == zstd.frame_content_size(frame) <= _MOST:
            raise CorruptState(
                f"object {name}: its size is another one, or none that an object has"
            )

        planes = np.frombuffer(zstd.ZstdDecompressor().decompress(frame), np.uint8)
        unpacked_bytes = np.empty(size, np.uint8)
        unpacked_bytes[:length] = data[MORE : MORE + length]
        unpacked_bytes[length:].reshape(-1, _WORD)[:] = planes.reshape(_WORD, -1).T
    except (zstd.ZstdError, ValueError) as error:
        raise CorruptState(f"object {name} cannot be unpacked: {error}") from error

    return unpacked_bytes


def unpacked_head(head: bytes, size: int) -> tuple[bytes, int]:
    """Return the first bytes of an object and its size, as they were before packing.

    Parameters
    ----------
    head : bytes
        First bytes of the object, at least `MORE` more than are needed.
    size : int
        Size of the object.
    """
    frame_sizes = _read_frame(head[:MORE])
    if frame_sizes is None:
        return head, size
    return head[MORE : MORE + frame_sizes[0]], frame_sizes[1]


def _read_frame(head: bytes) -> tuple[int, int] | None:
    """Return the bytes of the description, and of the whole before packing; None if unpacked."""
    if len(head) < MORE:
        return None
    magic, length, size = _FRAME.unpack(head)
    return (length - 8, size) if magic == _MAGIC and length >= 8 else None
