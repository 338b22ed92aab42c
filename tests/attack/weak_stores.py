"""Stores with a hole each, as processes that attacks read from: `DEJAKV_WEAK` names the hole."""

import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from dejakv.attack.reading import main
from dejakv.store import disk
from dejakv.store.base import Store, Tensor
from dejakv.store.open import open_store

HOLE = os.environ.get("DEJAKV_WEAK", "")


def unchecked(_id: str, buffer: Any, *_: Any) -> Tensor:
    """The tensor of a file, whatever chunk it is of."""
    length = int.from_bytes(buffer[:8].tobytes(), "little")
    return Tensor(buffer[8 + length :].view(np.float32).reshape(2, 1, 2, -1, 2), "F32")


def opened(place: str) -> Store:
    if HOLE == "unchecked":
        disk.decode = unchecked  # type: ignore[attr-defined]
    if HOLE == "unpickles":
        for file in Path(place).rglob("*"):
            if file.is_file() and file.read_bytes()[:1] == b"\x80":
                pickle.loads(file.read_bytes())  # noqa: S301
    if HOLE == "crashes" and "clean" not in place:
        os.abort()
    if HOLE == "hangs" and "clean" not in place:
        time.sleep(60)
    if HOLE == "writes":
        for file in (Path(place) / "chunks").rglob("*.safetensors"):
            if file.is_symlink():
                file.write_bytes(b"mine")
    if HOLE == "greedy" and "clean" not in place:
        np.ones(40_000_000)
    return open_store(place)


if __name__ == "__main__":
    sys.modules.setdefault("tests.attack.weak_stores", sys.modules[__name__])
    main(opened)
