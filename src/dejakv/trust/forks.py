"""Locks that a child of `fork` can use: they are taken before the fork and released on both sides after it.

Else a lock that another thread held at that moment would be held for ever in the child. Taken before `store.connection` closes its
connections: handlers registered later run earlier.
"""

import os
import threading
import weakref
from typing import Any

from dejakv.store import connection as connection  # registers its handlers first

GATE, LEDGER = 0, 1
"""The order in which locks are taken: a gate calls its ledger while it holds its own."""

_locks: tuple[weakref.WeakSet[Any], weakref.WeakSet[Any]] = (weakref.WeakSet(), weakref.WeakSet())
_one_fork = threading.Lock()
_held: list[Any] = []


def lock(order: int) -> threading.Lock:
    """A new lock that survives forks."""
    made = threading.Lock()
    _locks[order].add(made)
    return made


def _before_fork() -> None:
    _one_fork.acquire()
    for locks in _locks:
        for one in list(locks):
            one.acquire()
            _held.append(one)


def _after_fork() -> None:
    while _held:
        _held.pop().release()
    _one_fork.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
