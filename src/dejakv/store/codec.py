"""A chunk's tensor as one safetensors file, and back, without trusting any byte.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length of a JSON header, the header, the data.
The header is written here rather than by `safetensors.serialize`, whose raw-bytes interface changed between 0.5 and 0.8;
the tests read the files with the library. Data start at a multiple of 64 bytes. The checksum covers id, dtype, shape and
data, and is verified on every load, at the cost given in `checksum.py`.
"""

import json
import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dejakv.errors import StoreError
from dejakv.store.base import Tensor
from dejakv.store.checksum import checksum

TENSOR_NAME = "state"
FORMAT = "dejakv-chunk-1"
MAX_HEADER_BYTES = 64 * 1024
MAX_DIMENSIONS = 16
_ALIGNMENT = 64

NUMPY_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "|u1", "I64": "<i8"}


class CorruptChunk(StoreError):
    """Stored bytes differ from the written ones. Stores catch it: to a caller it is a counted miss."""


@dataclass(frozen=True)
class Encoded:
    """The two parts of a file, separate so that writing copies no tensor. `header` includes its length and padding."""

    header: bytes
    data: NDArray[np.uint8]
    checksum: str

    @property
    def nbytes(self) -> int:
        return len(self.header) + int(self.data.nbytes)


def check(tensor: Tensor) -> None:
    """Raises: StoreError if the dtype is not one of `NUMPY_DTYPES`, does not fit the array, or there are too many dimensions."""
    expected = NUMPY_DTYPES.get(tensor.dtype)
    if expected is None or tensor.data.dtype.newbyteorder("<") != np.dtype(expected):
        raise StoreError(
            f"a tensor of dtype {tensor.dtype!r} in an array of {tensor.data.dtype} cannot be stored: "
            f"give one of {', '.join(f'{name} as {kind[1:]}' for name, kind in NUMPY_DTYPES.items())}"
        )
    if tensor.data.ndim > MAX_DIMENSIONS:
        raise StoreError(f"a tensor of {tensor.data.ndim} dimensions cannot be stored: {MAX_DIMENSIONS} at most")


def encode(id: str, tensor: Tensor) -> Encoded:
    """The safetensors file of a chunk's tensor. Raises: StoreError as `check`."""
    check(tensor)
    shape = list(tensor.data.shape)
    array = np.ascontiguousarray(tensor.data, dtype=NUMPY_DTYPES[tensor.dtype])
    digest = _checksum(id, tensor.dtype, shape, array)
    body = json.dumps(
        {
            "__metadata__": {"checksum": digest, "format": FORMAT, "id": id},
            TENSOR_NAME: {"dtype": tensor.dtype, "shape": shape, "data_offsets": [0, array.nbytes]},
        },
        separators=(",", ":"),
    ).encode()
    body += b" " * (-(8 + len(body)) % _ALIGNMENT)
    if len(body) > MAX_HEADER_BYTES:
        raise StoreError(f"the id of a chunk is {len(id)} characters long: use `identity.exact_key`")
    return Encoded(len(body).to_bytes(8, "little") + body, array.reshape(-1).view(np.uint8), digest)


def decode(id: str, buffer: NDArray[np.uint8], expected: str | None = None) -> Tensor:
    """The tensor in the bytes of a file, without a copy: a read-only view of `buffer`.

    `expected` is the checksum known to the caller; without it the file's own one is used.
    Raises: CorruptChunk if anything differs from the chunk written with this id.
    """
    size = int(buffer.size)
    length = int.from_bytes(buffer[:8].tobytes(), "little") if size >= 8 else 0
    if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
        raise CorruptChunk(f"chunk {id}: a header of {length} bytes in a file of {size}")
    dtype, shape, digest = _parse_header(id, buffer[8 : 8 + length].tobytes())
    kind = np.dtype(NUMPY_DTYPES[dtype])
    data = buffer[8 + length :]
    if data.size != math.prod(shape) * kind.itemsize:
        raise CorruptChunk(f"chunk {id}: {data.size} bytes of data for shape {shape} of {dtype}")
    array = data.view(kind).reshape(shape)
    array.flags.writeable = False
    if _checksum(id, dtype, shape, array) != digest or digest != (expected or digest):
        raise CorruptChunk(f"chunk {id}: the checksum differs")
    return Tensor(array, dtype)


def _checksum(id: str, dtype: str, shape: list[int], array: NDArray[Any]) -> str:
    return checksum(array, FORMAT, id, dtype, ",".join(map(str, shape)))


def _parse_header(id: str, body: bytes) -> tuple[str, list[int], str]:
    try:
        header: Any = json.loads(body.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CorruptChunk(f"chunk {id}: the header is not JSON") from error
    match header:
        case {
            "__metadata__": {"checksum": str(digest), "format": str(format_name), "id": str(named), **more},
            "state": {"dtype": str(dtype), "shape": list(), "data_offsets": [0, int(end)], **rest},
            **others,
        } if not (more or rest or others) and format_name == FORMAT and named == id and dtype in NUMPY_DTYPES:
            shape = cast(list[Any], header[TENSOR_NAME]["shape"])
        case _:
            raise CorruptChunk(f"chunk {id}: the header is not that of this chunk")
    if len(shape) > MAX_DIMENSIONS or not all(type(item) is int and item >= 0 for item in shape):
        raise CorruptChunk(f"chunk {id}: the shape {shape} is impossible")
    if end != math.prod(shape) * np.dtype(NUMPY_DTYPES[dtype]).itemsize:
        raise CorruptChunk(f"chunk {id}: the offsets do not fit the shape")
    return dtype, shape, digest


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result
