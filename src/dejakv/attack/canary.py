"""A pickle that leaves a file when it is loaded: proof that something was unpickled."""

import os
import pickle
from pathlib import Path


class _Payload:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (self.path, os.O_CREAT | os.O_WRONLY)


def pickle_that_touches(path: Path) -> bytes:
    """The bytes; to load them makes an empty file at `path`."""
    return pickle.dumps(_Payload(str(path)))
