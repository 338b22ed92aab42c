"""What a process still holds of a request: everything that its parts lead to is looked through."""

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Trace:
    """What a request is recognised by: texts, runs of token ids, and the sizes of arrays of pixels."""

    texts: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    pixels: Callable[[Any], bool] = lambda _: False

    def is_in(self, found: object) -> bool:
        if isinstance(found, str):
            return any(text in found for text in self.texts)
        if isinstance(found, bytes | bytearray):
            return any(text.encode() in found for text in self.texts)
        if isinstance(found, tuple | list):
            return bool(self.tokens) and _has_run(found, self.tokens)
        if isinstance(found, np.ndarray) and found.dtype.kind in "iu":
            return bool(self.tokens) and _has_run(found.reshape(-1).tolist(), self.tokens)
        return self.pixels(found)


def remains(roots: Iterable[object], trace: Trace) -> list[str]:
    """Where the trace was found: the types on the way to it, once for each place."""
    gc.collect()
    seen: set[int] = set()
    waiting: list[tuple[object, str]] = [(root, type(root).__name__) for root in roots]
    found: list[str] = []
    while waiting:
        one, way = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if trace.is_in(one):
            found.append(way)
        waiting += [(inner, f"{way}.{type(inner).__name__}") for inner in _inside(one)]
    return found


def frames_of(names: Iterable[str]) -> list[object]:
    """The local variables of the running threads of these names."""
    import threading

    frames = sys._current_frames()
    held: list[object] = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0) if thread.name in set(names) else None
        while frame is not None:
            held += frame.f_locals.values()
            frame = frame.f_back
    return held


def _inside(one: object) -> Sequence[object]:
    if isinstance(one, ModuleType | type | CodeType | FrameType | str | bytes | int | float):
        return ()
    if isinstance(one, FunctionType):  # not its globals: they lead everywhere
        cells = [cell.cell_contents for cell in one.__closure__ or () if _filled(cell)]
        return [*cells, *(one.__defaults__ or ())]
    return gc.get_referents(one)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _has_run(values: Sequence[Any], run: tuple[int, ...]) -> bool:
    starts = [place for place, value in enumerate(values) if type(value) is int and value == run[0]]
    return any(tuple(values[place : place + len(run)]) == run for place in starts)
