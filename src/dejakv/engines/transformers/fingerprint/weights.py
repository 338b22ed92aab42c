"""A model's tensors: a digest over every byte, and a check for changes at a small part of its cost.

Writes through `.data` leave a tensor's version and address as they were, so its content must be
looked at. Each check reads a sample of every tensor and, in turns, a part of all bytes.
"""

import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

TURNS = 128
"""Checks after which every byte has been compared at the latest."""
POINTS = 16
"""Elements of each tensor that every check compares, spread evenly.

Smaller tensors are compared whole.
"""
_SMALLEST, _LARGEST = 1 << 20, 1 << 26


class _TensorPart(NamedTuple):
    """Bytes `start` to `stop` of a tensor."""

    tensor: int
    start: int
    stop: int


class WeightDigest:
    """Tensors as they were when this was made.

    Attributes
    ----------
    digest : str
        SHA-256 over names, shapes, dtypes and all bytes. A tensor that comes twice counts under its
        first name.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
        self._names = tuple(names)
        self._tensor_refs = [None if tensor is None else weakref.ref(tensor) for tensor in tensors]
        # Backwards, so that the first place of a shared tensor wins.
        first = {
            id(tensor): place
            for place, tensor in reversed(list(enumerate(tensors)))
            if tensor is not None
        }
        self._places = sorted(first.values())
        distinct = self._distinct(tensors)
        self._titles = [
            (names[place], f"{tuple(tensor.shape)}:{tensor.dtype}")
            for place, tensor in zip(self._places, distinct, strict=True)
        ]
        # Before the digests: what is written while they are made differs at the next check.
        self._stamps = [_stamp(tensor) for tensor in distinct]
        self._points = _SamplePoints(distinct)
        self._samples = self._points.read(distinct)
        self._parts = _cut(distinct)
        self._digests = _digests(distinct, self._parts)

        self._share = max(
            _SMALLEST, -(-sum(part.stop - part.start for part in self._parts) // TURNS)
        )
        self._next = 0
        self.digest = self.digest_where(lambda _: True)

    def digest_where(self, includes: Callable[[str], bool]) -> str:
        """Return the digest over the tensors whose name is wanted."""
        sha = hashlib.sha256()
        indices = {index for index, (name, _) in enumerate(self._titles) if includes(name)}
        for index in sorted(indices):
            sha.update(f"{self._titles[index]};".encode())

        for part, digest in zip(self._parts, self._digests, strict=True):
            if part.tensor in indices:
                sha.update(digest.to_bytes(16, "little"))
        return sha.hexdigest()

    def unchanged(
        self, names: Sequence[str], tensors: Sequence[Tensor | None], *, turn: bool = True
    ) -> bool:
        """Tell whether these are the same tensors with the same content.

        Parameters
        ----------
        turn : bool
            Whether to compare the next part of all bytes too, besides every tensor's sample.
        """
        if len(tensors) != len(self._tensor_refs) or self._names != tuple(names):
            return False
        if not all(
            tensor is None if ref is None else ref() is tensor
            for ref, tensor in zip(self._tensor_refs, tensors, strict=True)
        ):
            return False

        distinct = self._distinct(tensors)
        if self._stamps != [_stamp(tensor) for tensor in distinct]:
            return False
        return self._samples == self._points.read(distinct) and (
            not turn or self._turn_agrees(distinct)
        )

    def _distinct(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        return [tensor for place in self._places if (tensor := tensors[place]) is not None]

    def _turn_agrees(self, distinct: Sequence[Tensor]) -> bool:
        parts, digests, bytes_compared = list[_TensorPart](), list[int](), 0
        while bytes_compared < self._share and len(parts) < len(self._parts):
            part = self._parts[self._next]
            parts.append(part)
            digests.append(self._digests[self._next])
            bytes_compared += part.stop - part.start
            self._next = (self._next + 1) % len(self._parts)

        return _digests(distinct, parts) == digests


def unreadable(names: Sequence[str], tensors: Sequence[Tensor | None]) -> str:
    """Return why the content of these tensors cannot be compared; empty if it can."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is None:
            continue
        if is_traceable_wrapper_subclass(tensor):
            return f"{name} is a {type(tensor).__name__}, whose content cannot be read"
        if tensor.layout != torch.strided or tensor.is_quantized:
            return f"{name} has a layout that cannot be read ({tensor.layout})"
        if tensor.is_meta or (tensor.numel() and not tensor.untyped_storage().nbytes()):
            return f"{name} is not in memory (offloaded weights)"
    return ""


def _stamp(tensor: Tensor) -> tuple[int, tuple[int, ...], int]:
    # Inference tensors have no version.
    return tensor.data_ptr(), tensor.stride(), -1 if tensor.is_inference() else tensor._version


def _cut(tensors: Sequence[Tensor]) -> list[_TensorPart]:
    """Divide all bytes into parts of about a quarter of a turn; no part spans tensors."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    # Whole words of 8 bytes: `weighted_sum` reads them as int64.
    step = min(_LARGEST, max(_SMALLEST, sum(sizes) // (4 * TURNS))) // 8 * 8
    parts: list[_TensorPart] = []
    for index, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        # Other tensors are copied whole, to be read in order.
        part_bytes = step if tensor.is_contiguous() else max(size, 1)
        parts += [
            _TensorPart(index, start, min(start + part_bytes, size))
            for start in range(0, size, part_bytes)
        ]
    return parts


def _digests(tensors: Sequence[Tensor], parts: Sequence[_TensorPart]) -> list[int]:
    """Return a number for each part.

    On the CPU it is XXH3; on other devices a sum, so that one transfer brings all of them.
    """
    results: list[int | Tensor] = []
    for part in parts:
        flat = _flat(tensors[part.tensor])
        if flat.device.type == "cpu":
            data: Any = flat.view(torch.uint8)[part.start : part.stop].numpy()
            results.append(xxhash.xxh3_128_intdigest(data))
        else:
            results.append(weighted_sum(flat.view(torch.uint8)[part.start : part.stop]))

    sums = [number for number in results if isinstance(number, Tensor)]
    if sums:
        transferred = iter(torch.stack([number.to(sums[0].device) for number in sums]).tolist())
        # A sum of int64 may be negative, which `to_bytes` refuses.
        results = [
            next(transferred) % (1 << 64) if isinstance(number, Tensor) else number
            for number in results
        ]
    return [int(number) for number in results]


def weighted_sum(data: Tensor) -> Tensor:
    """Return a digest of bytes (uint8, one dimension) that a device computes by itself.

    Words of 8 bytes are multiplied by odd random numbers and summed modulo 2^64, in rows and then
    over the rows. Any change of a single word changes the sum; of several, all but one time in
    2^64.

    Returns
    -------
    Tensor, shape []
        Int64, on the device of `data`.
    """
    words = data[: data.numel() // 8 * 8]
    rest = data[words.numel() :].to(torch.int64)
    # int64 cannot be read at an unaligned address.
    if words.data_ptr() % 8:
        words = words.clone()

    factors = _factors(data.device)
    flat = torch.cat([words.view(torch.int64), rest]) if rest.numel() else words.view(torch.int64)

    total = flat.new_zeros(())
    for row in flat.split(factors.numel()):
        total = total * _STEP + (row * factors[: row.numel()]).sum()
    return total


_STEP = 6364136223846793005  # odd, so that no row is lost
_factor_cache: dict[torch.device, Tensor] = {}


def _factors(device: torch.device) -> Tensor:
    if device not in _factor_cache:
        generator = torch.Generator().manual_seed(0)
        # 32 MB of factors on each device, for tensors of any size.
        numbers = torch.randint(
            -(1 << 62), 1 << 62, (1 << 22,), generator=generator, dtype=torch.int64
        )
        _factor_cache[device] = (numbers * 2 + 1).to(device)
    return _factor_cache[device]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1)


class _SamplePoints:
    """A few elements of every tensor, read together: one copy for each device and dtype.

    On the CPU the views are kept, since making them is most of the cost. They hold the tensors'
    memory until the next check that finds it replaced; on other devices, where memory is dear, they
    are made anew each time.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, tensor in enumerate(tensors):
            self._groups.setdefault((tensor.device, tensor.dtype), []).append(index)
        self._views = {
            key: [_spread(tensors[index]) for index in group]
            for key, group in self._groups.items()
            if key[0].type == "cpu" and all(tensors[index].is_contiguous() for index in group)
        }

    def read(self, tensors: Sequence[Tensor]) -> list[bytes]:
        """Return the sampled elements' bytes, a block for each device and dtype."""
        read: list[bytes] = []
        for key, group in self._groups.items():
            points = torch.cat(self._views.get(key) or [_spread(tensors[index]) for index in group])
            read.append(_flat(points.cpu()).view(torch.uint8).numpy().tobytes())
        return read


@torch.no_grad()
def _spread(tensor: Tensor) -> Tensor:
    """Return `POINTS` elements from the first to the last, or all of a small tensor."""
    if tensor.numel() <= POINTS or not tensor.is_contiguous():
        return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // POINTS)]
    return torch.as_strided(tensor.detach(), (POINTS,), ((tensor.numel() - 1) // (POINTS - 1),))
