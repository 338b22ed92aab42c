"""The memory of this process while something happens."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_EVERY = 0.01
_STATUS = Path("/proc/self/status")


def resident() -> int | None:
    """Bytes in memory now; None where the system does not tell."""
    return _told("VmRSS:")


def peak() -> int | None:
    """Bytes in memory at this process's worst moment. (`getrusage` counts those of the process that started it.)"""
    return _told("VmHWM:")


def _told(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), None)


class Growth:
    """`most`: bytes above the beginning at the worst moment; None if it cannot be measured."""

    most: int | None = None


@contextmanager
def watched() -> Iterator[Growth]:
    """Looks a hundred times a second."""
    growth, done, begun = Growth(), threading.Event(), resident()

    def look() -> None:
        while True:
            now = resident()
            if now is not None and begun is not None:
                growth.most = max(growth.most or 0, now - begun)
            if done.wait(_EVERY):
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield growth
    finally:
        done.set()
        thread.join()
