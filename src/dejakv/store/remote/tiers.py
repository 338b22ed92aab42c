"""Copies of objects nearer by: in memory, and of a bucket's objects on this machine's disk.

Each tier has a budget in bytes. Objects never change, so that no copy is ever out of date. An
object is written to its own place first, and no copy of it is found before it is there.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dejakv.store.base import CorruptState
from dejakv.store.counters import logger
from dejakv.store.forks import call_in_child, fork_safe_lock
from dejakv.store.memory import MemoryTier
from dejakv.store.objects import (
    Bytes,
    FolderObjects,
    ObjectMissing,
    Objects,
    ReadTimeout,
    StoreUnavailable,
)
from dejakv.store.remote.health import AT_ONCE, CircuitBreaker, LinkTiming
from dejakv.store.remote.tombstones import TombstoneSet
from dejakv.store.segment import open_object


class LocalCopies(FolderObjects):
    """Copies in a folder, which several processes may share.

    Parameters
    ----------
    root : Path
        The folder.
    max_bytes : int
        Above it, the copies unread for the longest time are removed; 0: no limit.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        super().__init__(root)
        self._max_bytes = max_bytes
        self._room = 0

    def keep(self, name: str, parts: Sequence[Any]) -> None:
        """Keep a copy if it fits. A disk that is full or away keeps none."""
        size = sum(memoryview(part).nbytes for part in parts)
        if self._max_bytes and size > self._max_bytes:
            return
        try:
            self.put(name, parts)
            self._room -= size
            # Listing the folder for each copy would cost more than the copy.
            if self._max_bytes and self._room < 0:
                self._make_room()
        except (StoreUnavailable, OSError) as error:
            logger.info("no copy of %s is kept: %s", name, error)

    def has(self, name: str) -> bool:
        """Return whether there is a copy, without reading it."""
        with suppress(ObjectMissing):
            return os.path.exists(self._path(name))
        return False

    def find(self, name: str) -> Bytes | None:
        """Return a verified copy and count it as read; None if it is missing.

        A damaged copy is removed, and counts as missing.
        """
        try:
            data = self.get(name)
            open_object(data, name)
        except (ObjectMissing, StoreUnavailable):
            return None
        except CorruptState as error:
            logger.warning("a damaged copy is removed: %s", error)
            with suppress(StoreUnavailable):
                self.delete([name])
            return None

        # Read now. The time of writing stays: it tells whether a file is another one.
        with suppress(OSError, ObjectMissing):
            os.utime(path := self._path(name), ns=(time.time_ns(), os.stat(path).st_mtime_ns))
        return data

    def keep_only(self, names: set[str], before: float) -> None:
        """Remove copies of other objects that were written before `before` (seconds since 1970)."""
        for name in list(self.list()):
            with suppress(OSError, ObjectMissing, StoreUnavailable):
                if name not in names and os.stat(self._path(name)).st_mtime < before:
                    self.delete([name])

    def _make_room(self) -> None:
        """Meet the budget now, and again when half of the free part is written.

        Other processes write copies, too.
        """
        copies: list[tuple[int, int, str]] = []
        for name in self.list():
            with suppress(OSError, ObjectMissing):
                status = os.stat(self._path(name))
                copies.append((status.st_atime_ns, status.st_size, name))

        total_bytes = sum(size for _, size, _ in copies)
        # By access time, which `find` sets itself: many disks are mounted without it.
        for _, size, name in sorted(copies):
            if total_bytes <= self._max_bytes:
                break
            self.delete([name])
            total_bytes -= size

        self._room = (self._max_bytes - total_bytes) // 2


class TieredObjects:
    """Objects with copies of some of them in memory and on disk.

    Parameters
    ----------
    objects : Objects
        The objects.
    max_bytes : int
        Bytes of copies in memory; 0: none.
    fill : str
        When a copy enters memory: also on writing (`write`), or only on reading (`read`).
    disk : LocalCopies | None
        Copies on disk; None: none.
    """

    def __init__(
        self, objects: Objects, max_bytes: int, fill: str = "write", disk: LocalCopies | None = None
    ) -> None:
        self.shared = objects.shared
        self._objects, self._max_bytes, self._fill, self._disk = objects, max_bytes, fill, disk
        self._memory = MemoryTier[str, Bytes](max_bytes)
        self._lock = fork_safe_lock()
        self._link: LinkTiming | None = getattr(objects, "link", None)
        self.tombstones: TombstoneSet | None = getattr(objects, "tombstones", None)
        self.breaker: CircuitBreaker | None = getattr(objects, "breaker", None)
        self._begin_reads()
        # A child of `fork` lacks the parent's threads.
        call_in_child(self._begin_reads)
        self.head = objects.head

    def _begin_reads(self) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="dejakv-fetch")
        self._reads: dict[str, Future[Bytes]] = {}
        """Reads under way; other readers of the same object wait for them."""

    def put(self, name: str, parts: Sequence[Any]) -> bool:
        """Put an object, then keep copies of it."""
        created = self._objects.put(name, parts)
        if self._disk is not None:
            self._disk.keep(name, parts)
        if (
            self._fill == "write"
            and sum(memoryview(part).nbytes for part in parts) <= self._max_bytes
        ):
            self._hold(
                name,
                np.concatenate([np.frombuffer(part, np.uint8) for part in parts]),
                mapped=False,
            )

        return created

    def get(self, name: str) -> Bytes:
        """Return all bytes of an object, from the nearest place that has it."""
        near = self._local_copy(name)
        return near if near is not None else self._read(name)

    def read_seconds(self, sizes: Mapping[str, int]) -> float:
        """Estimate the seconds to read the objects without a copy here.

        The estimate is 0 if all have a copy, and for objects that are on this machine.

        Parameters
        ----------
        sizes : Mapping[str, int]
            Bytes of each object by name.
        """
        far = [size for name, size in sizes.items() if not self._has_local_copy(name)]
        return self._link.seconds(len(far), sum(far)) if far and self._link is not None else 0.0

    def fetch(self, sizes: Mapping[str, int], until: float | None) -> Callable[[str], Bytes]:
        """Read the objects without a copy here, all at once.

        Parameters
        ----------
        sizes : Mapping[str, int]
            Bytes of each object by name.
        until : float | None
            When to give up, by `time.monotonic`; None: never. Reads that are late go on, for the
            next caller.

        Returns
        -------
        Callable[[str], Bytes]
            `get` for these objects, which raises the error of its read. Other names raise
            `ObjectMissing`: they were removed meanwhile.

        Raises
        ------
        ReadTimeout
            If `until` has passed.
        """
        near = {
            name: copy_data for name in sizes if (copy_data := self._local_copy(name)) is not None
        }
        reads = {name: self._begin_read(name) for name in sizes if name not in near}
        began = time.monotonic()

        unfinished = wait(
            reads.values(), None if until is None else max(0.0, until - began)
        ).not_done

        # Failed reads say nothing about the link, but one given up says it is slow.
        if (
            reads
            and self._link is not None
            and (unfinished or not any(read.exception() for read in reads.values()))
        ):
            self._link.read(
                len(reads), sum(sizes[name] for name in reads), time.monotonic() - began
            )

        if unfinished:
            raise ReadTimeout

        def get(name: str) -> Bytes:
            if name in reads:
                return reads[name].result()
            if name not in near:
                raise ObjectMissing(name)
            return near[name]

        return get

    def _has_local_copy(self, name: str) -> bool:
        with self._lock:
            in_memory = self._memory.get(name) is not None
        return in_memory or (self._disk is not None and self._disk.has(name))

    def _local_copy(self, name: str) -> Bytes | None:
        """Return a copy from memory, or else from disk; None without one."""
        with self._lock:
            memory_copy = self._memory.use(name)
        if memory_copy is not None or self._disk is None:
            return memory_copy
        disk_copy = self._disk.find(name)
        return None if disk_copy is None else self._hold(name, disk_copy, mapped=True)

    def _begin_read(self, name: str) -> "Future[Bytes]":
        with self._lock:
            under_way = self._reads.get(name)
            read = self._reads[name] = under_way or self._pool.submit(self._read, name)
        # Outside of the lock: a read that is already done calls back at once, and takes it.
        if under_way is None:
            read.add_done_callback(lambda _: self._finish_read(name))
        return read

    def _finish_read(self, name: str) -> None:
        with self._lock:
            self._reads.pop(name, None)

    def _read(self, name: str) -> Bytes:
        data = self._objects.get(name)
        if self._disk is not None:
            self._disk.keep(name, [data])
        return self._hold(name, data, mapped=not self.shared)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects with all copies; missing ones are ignored."""
        # From the nearest to the farthest: no copy outlives its object.
        with self._lock:
            for name in names:
                self._memory.drop(name)
        if self._disk is not None:
            self._disk.delete(names)
        self._objects.delete(names)

    def list(self) -> Iterator[str]:
        """Yield the names of all objects, then remove the copies on disk of all others."""
        # A copy younger than the listing may be of an object that came meanwhile.
        began, names = time.time(), set[str]()
        for name in self._objects.list():
            names.add(name)
            yield name
        if self._disk is not None:
            self._disk.keep_only(names, began)

    def close(self) -> None:
        """End the reads that have not begun, and close the objects."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._objects.close()

    def sweep(self) -> None:
        """Remove what killed processes were writing (see `FolderObjects.sweep`)."""
        (self._disk or self._objects).sweep()

    def _hold(self, name: str, data: Bytes, *, mapped: bool) -> Bytes:
        """Keep data in memory if it fits (of a mapped file a copy), and return it."""
        if data.size > self._max_bytes:
            return data
        # A map would keep its file's pages on disk, also of one that was deleted.
        data = data.copy() if mapped else data
        data.flags.writeable = False
        with self._lock:
            self._memory.put(name, data, data.size)
        return data
