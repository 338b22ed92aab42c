"""Locks and callbacks for children of `fork`, which lack the threads of their parent.

A thread of the parent may hold a lock at the moment of the fork; its copy in the child would never
be released.
"""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_methods: list[weakref.WeakMethod[Callable[[], None]]] = []


def fork_safe_lock() -> threading.Lock:
    """Make a lock that is free in a child of `fork`, whoever held it in the parent."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def fork_safe_rlock() -> Any:
    """Make a lock like `fork_safe_lock` that its thread may take again."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def call_in_child(method: Callable[[], None]) -> None:
    """Have a bound method called in each child of `fork`, as long as its object lives."""
    # Weak references, so that a store which is dropped without `close` is freed.
    _methods[:] = [method_ref for method_ref in _methods if method_ref() is not None]
    _methods.append(weakref.WeakMethod(method))


def _after_in_child() -> None:
    for lock in list(_locks):
        # As the standard library does with its own locks.
        lock._at_fork_reinit()

    for method_ref in _methods:
        if (method := method_ref()) is not None:
            method()


os.register_at_fork(after_in_child=_after_in_child)
