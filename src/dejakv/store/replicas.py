"""Follows what other machines put into and take out of shared objects."""

import threading
import time
from collections.abc import Callable

from dejakv.store.counters import logger

LIST_SECONDS = 10.0
"""Seconds between two listings; 20 times as long as a listing takes where that is more, since services charge for them."""
SHARE = 20


class Follower:
    """Calls `catch_up` again and again in a thread of its own, so that nothing waits for a listing, until it is closed."""

    def __init__(self, catch_up: Callable[[], object]) -> None:
        self._catch_up = catch_up
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dejakv-replicas", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        wait = LIST_SECONDS
        while not self._closed.wait(wait):
            began = time.monotonic()
            try:
                self._catch_up()
            except Exception:  # nobody waits for it, and the next may succeed
                logger.exception("a store was not compared with its objects")
            wait = max(LIST_SECONDS, SHARE * (time.monotonic() - began))
