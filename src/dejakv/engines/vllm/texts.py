"""The thread in which prompts are compared and described as text, which may run an encoder."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context

TEXTS_WAITING = 64
"""Prompts that are compared or described, or wait for it; more are only looked up exactly and for copied text."""


class Texts:
    """One prompt after the other. Thread-safe."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dejakv-text")
        self._lock = threading.Lock()
        self._held = 0

    @property
    def idle(self) -> bool:
        """Whether the next prompt would be worked on at once."""
        return not self._held

    def submit(self, work: Callable[[], None]) -> "Future[None] | None":
        """Has a prompt worked on, in the caller's context; None if too many wait."""
        with self._lock:
            if self._held >= TEXTS_WAITING:
                return None
            self._held += 1
        job = self._pool.submit(copy_context().run, work)
        job.add_done_callback(self._done)
        return job

    def close(self) -> None:
        """Waits for the prompt that is worked on; the others are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _done(self, _: "Future[None]") -> None:
        with self._lock:
            self._held -= 1
