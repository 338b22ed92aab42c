"""Opening of stores by place and settings."""

import os
import sqlite3
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dejakv.errors import StoreError
from dejakv.settings import in_bucket, is_memory
from dejakv.store.budgets import (
    SNAPSHOT_SHARE,
    Admission,
    Budget,
    Clock,
    PartitionBudgets,
    PolicyName,
    parse_quotas,
)
from dejakv.store.budgets import now as steady
from dejakv.store.catalog import Catalog
from dejakv.store.claim import (
    CATALOG,
    CATALOG_FILES,
    DAMAGED,
    FORMAT,
    MARKER,
    NOT_FOR_OTHERS,
    InUse,
    bucket_copied_in,
    format_of,
    is_our_file,
    locked_folder,
    open_file,
    purge_folder,
    ranks_in,
    refuse_network,
    write_marker,
)
from dejakv.store.connection import is_damage
from dejakv.store.counters import logger
from dejakv.store.objects import FolderObjects, Objects, StoreUnavailable
from dejakv.store.remote.feed import AnnouncedObjects, ChangeFeed
from dejakv.store.remote.tiers import LocalCopies, TieredObjects
from dejakv.store.selection import Selection
from dejakv.store.store import Store

if TYPE_CHECKING:
    from dejakv.config import SemanticCacheConfig

Fill = Literal["write", "read"]
"""When state enters memory: on writing, or on the first read."""


def open_store(
    place: str | Path | None = None,
    *,
    disk_dir: str | Path | None = None,
    disk_bytes: int = 0,
    feed: str | None = None,
    compress: bool = False,
    max_bytes: int = 0,
    max_entries: int = 0,
    policy: PolicyName = "lru",
    memory_bytes: int = 0,
    memory_fill: Fill = "write",
    min_tokens: int = 0,
    second_sight: bool = False,
    max_write_rate: int = 0,
    partitions: int = 1,
    snapshot_share: float = SNAPSHOT_SHARE,
    quotas: Sequence[str] = (),
    clock: Clock = steady,
    background: bool = True,
    queue: int = 32,
) -> Store:
    """Open a store of computed state; close it when done.

    Common beginnings of prompts are stored once.

    Parameters
    ----------
    place : str | Path | None
        None or `memory:`: the memory of this process. `s3://BUCKET/PREFIX`, `gs://...`, `az://...`:
        a bucket, shared with other machines. Else a folder: empty, missing (created with mode 0700)
        or a store.
    disk_dir : str | Path | None
        Of a store in a bucket: folder for copies and for the index. None: no copies on disk, and
        the index in memory.
    disk_bytes : int
        Limit of the copies in `disk_dir`; 0: no limit.
    feed : str | None
        Of a store in a bucket: `redis://HOST:PORT/DB`, by which machines tell each other at once.
        None: they list.
    compress : bool
        Of a store in a bucket: put state in fewer bytes, which costs time.
    max_bytes, max_entries : int
        Budgets of all processes and machines together; 0: no limit.
    policy : str
        What is evicted beyond the budgets: `lru` or `lfu`.
    memory_bytes : int
        Of a store on disk or in a bucket: bytes that are also kept in memory; 0: none.
    memory_fill : str
        When state enters memory: on writing (`write`) or on the first read (`read`).
    min_tokens : int
        Shorter prompts are not stored; 0: no limit.
    second_sight : bool
        Whether a prompt is refused the first time (see `Admission`).
    max_write_rate : int
        Limit of stored bytes a second (see `Admission`); 0: no limit.
    partitions : int
        Number of shares of the budgets. Each partition is limited to one share and evicts only its
        own entries.
    snapshot_share : float
        Part of a budget of bytes that snapshots of a model's fixed state may take, 0 to 1.
    quotas : Sequence[str]
        Shares of named partitions as `NAME=BYTES[:ENTRIES]`; the others share the rest.
    clock : Clock
        Seconds since 1970.
    background : bool
        False: expired entries, which no read returns, are removed only by `Store.sweep`, and other
        machines' changes of a bucket are seen only by `Store.catch_up`.
    queue : int
        Most submissions that wait for the writer thread.

    Returns
    -------
    Store
        The open store.

    Raises
    ------
    StoreError
        If the place cannot be used.
    ConfigError
        For a wrong address or limit.
    MissingExtraError
        For a bucket, a feed or `compress` without the packages that they need.

    Examples
    --------
    >>> store = open_store(max_bytes=1 << 30)
    >>> store.stats().entries
    0
    >>> store.close()
    """
    # Refuses negative limits before they are divided.
    Budget(max_bytes, max_entries, policy, snapshot_share=snapshot_share)
    parts = PartitionBudgets(partitions, max_bytes, max_entries, parse_quotas(quotas))
    budget = Budget(max_bytes, max_entries, policy, parts, snapshot_share)
    rules = Admission(min_tokens, second_sight, max_write_rate)
    store_options: dict[str, Any] = {"budget": budget, "admission": rules, "clock": clock}
    store_options |= {"background": background, "queue": queue}
    if place is None or is_memory(str(place)):
        return Store(**store_options)
    if not in_bucket(str(place)):
        return _open_folder(
            Path(place).expanduser(),
            lambda path: (
                TieredObjects(FolderObjects(path), memory_bytes, memory_fill)
                if memory_bytes
                else FolderObjects(path)
            ),
            store_options,
        )

    objects, change_feed = open_bucket(str(place), feed, compress)
    store_options["feed"] = change_feed
    if disk_dir is None:
        return Store(TieredObjects(objects, memory_bytes, memory_fill), **store_options)
    return _open_folder(
        Path(disk_dir).expanduser(),
        lambda path: TieredObjects(
            objects, memory_bytes, memory_fill, LocalCopies(path, disk_bytes)
        ),
        store_options,
        str(place).rstrip("/"),
    )


def open_bucket(
    url: str, feed: str | None, compress: bool = False, make: bool = True
) -> tuple[Objects, ChangeFeed | None]:
    """Open the objects in a bucket, and the feed of their changes.

    Parameters
    ----------
    url : str
        Address of the bucket.
    feed : str | None
        Address of the feed; None: without one.
    compress, make : bool
        See `BucketObjects`.

    Returns
    -------
    tuple[Objects, ChangeFeed | None]
        The objects, which announce their changes in the feed; and the feed.

    Raises
    ------
    StoreError, MissingExtraError
        As `BucketObjects` and `ChangeFeed`.
    """
    # Here, since it needs packages of an extra, which a folder does without.
    from dejakv.store.remote.bucket import BucketObjects

    bucket = BucketObjects(url, compress, make)
    if feed is None:
        return bucket, None
    change_feed = ChangeFeed(feed, bucket.url)
    return AnnouncedObjects(bucket, change_feed), change_feed


def store_of(config: "SemanticCacheConfig", memory_fill: Fill = "write") -> Store:
    """Open the store of a cache's settings. Their meaning and errors are those of `open_store`."""
    return open_store(
        config.store,
        disk_dir=config.disk_dir,
        disk_bytes=config.disk_bytes,
        feed=config.feed,
        compress=config.compress,
        max_bytes=config.max_bytes,
        max_entries=config.max_cached_blocks,
        policy=config.policy,
        memory_bytes=config.memory_bytes,
        memory_fill=memory_fill,
        min_tokens=config.min_tokens,
        second_sight=config.second_sight,
        max_write_rate=config.max_write_rate,
        partitions=config.partitions,
        quotas=config.quotas,
        snapshot_share=config.snapshot_share,
    )


def find_stores(place: str | Path) -> dict[str | Path, int]:
    """Find a store and those of its tensor-parallel ranks. No folder is made.

    Returns
    -------
    dict[str | Path, int]
        Format of each store by address.

    Raises
    ------
    StoreError
        For a place without a store, or an unreadable one.
    ConfigError
        For a wrong address.
    MissingExtraError
        For a bucket without the package that it needs.
    """
    if is_memory(str(place)):
        raise StoreError(f"{place} is empty whenever a command begins: give a folder or a bucket")
    if in_bucket(str(place)):
        from dejakv.store.remote.bucket import BucketObjects

        stores = BucketObjects(str(place), make=False).stores()
        if not stores:
            raise StoreError(f"{place} holds no cache: give the address of one")
        return dict.fromkeys(stores, FORMAT)

    folder = Path(place).expanduser()
    formats: dict[str | Path, int] = {}
    try:
        with locked_folder(folder) as path:
            for address, below in (
                (folder, path),
                *((folder / rank.name, rank) for rank in ranks_in(path)),
            ):
                format = format_of(below)
                if format is not None:
                    formats[address] = format
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be read ({error.strerror}): give the folder of a cache"
        ) from error

    if not formats:
        raise StoreError(f"{folder} is empty, and no cache: give the folder of one")
    return formats


def open_existing(place: str | Path, feed: str | None = None) -> Store:
    """Open a store that `find_stores` has listed, without limits.

    Opening creates nothing in a bucket. Expired and damaged entries leave as at any opening.

    Parameters
    ----------
    place : str | Path
        Folder or address of the bucket.
    feed : str | None
        Address of a bucket's feed; None: without one.

    Raises
    ------
    StoreError, ConfigError, MissingExtraError
        As `open_store`.
    """
    if not in_bucket(str(place)):
        return open_store(place)
    objects, change_feed = open_bucket(str(place), feed, make=False)
    return Store(TieredObjects(objects, 0), feed=change_feed)


def purge_place(place: str) -> int:
    """Empty a store with those of its ranks, wherever it is.

    Returns
    -------
    int
        Number of removed files or objects.

    Raises
    ------
    StoreError
        If a folder cannot be emptied, or a bucket cannot be used.
    ConfigError
        For a wrong address.
    MissingExtraError
        For a bucket without the package that it needs.
    """
    if not in_bucket(place):
        return purge_folder(os.path.expanduser(place))
    from dejakv.store.remote.bucket import BucketObjects

    removed = 0
    try:
        for address in BucketObjects(place, make=False).stores():
            bucket = BucketObjects(address)
            # First: what other machines are storing in this moment must leave too.
            bucket.tombstones.write(Selection())
            names = list(bucket.list())
            bucket.delete(names)
            removed += len(names)
    except StoreUnavailable as error:
        raise StoreError(
            f"{place} was not emptied, since its service fails ({error}): {removed} objects were"
            " removed, purge again when it answers"
        ) from error

    return removed


def _open_folder(
    folder: Path, make: Callable[[Path], Objects], store_options: dict[str, Any], original: str = ""
) -> Store:
    """Open the store in a folder, or in a bucket whose index and copies are in the folder.

    Parameters
    ----------
    folder : Path
        The folder.
    make : Callable[[Path], Objects]
        Makes the objects, with the real path of the folder.
    store_options : dict[str, Any]
        Arguments of `Store`.
    original : str
        Address of the bucket; empty for a store in the folder.
    """
    # SQLite's write-ahead log needs memory shared by all of its processes: one machine.
    refuse_network(folder)
    try:
        with locked_folder(folder, make=True) as path:
            format = format_of(path)
            if format not in (None, FORMAT):
                raise StoreError(
                    f"the store in {folder} has format {format}, of an older DejaKV, and this one "
                    f"reads {FORMAT}: remove it "
                    f"with `dejakv cache purge --store {folder} --all`, or give another folder"
                )

            if format is not None and (recorded_original := bucket_copied_in(path)) != original:
                content = (
                    f"holds copies from {recorded_original}: give {recorded_original} as the store"
                    if recorded_original
                    else "is a store of its own"
                )
                raise StoreError(f"{folder} {content}, or another folder")

            _make_private(path)

            if format is None:
                write_marker(path, original)
            # The folder is still locked: nobody can delete the store before this lock is held.
            in_use = InUse(path / MARKER)
            try:
                objects = make(path)
                # Before the catalog: what a killed process was writing has no row.
                objects.sweep()
                return _open_with_catalog(
                    path, in_use, objects, store_options | {"release": in_use.close}
                )
            except BaseException:
                in_use.close()
                raise
    except BlockingIOError as error:
        raise StoreError(
            f"the store in {folder} is being deleted by another process: try again"
        ) from error
    except (OSError, sqlite3.Error) as error:
        raise StoreError(
            f"{folder} cannot be a cache folder ({error}): give a folder you may write to, with "
            "free space"
        ) from error


def _open_with_catalog(
    path: Path, in_use: InUse, objects: Objects, store_options: dict[str, Any]
) -> Store:
    """Open a store's catalog. A missing or damaged one is rebuilt from the objects."""
    catalog_file, damaged = path / CATALOG, path / DAMAGED

    def note_damage() -> None:
        try:
            os.close(open_file(damaged, os.O_WRONLY | os.O_CREAT))
        except OSError as error:
            logger.warning("the damage of the catalog of %s cannot be recorded: %s", path, error)

    def store() -> Store:
        opened_catalog = Catalog(catalog_file, noted_damage=note_damage)
        try:
            return Store(objects, opened_catalog, **store_options)
        except BaseException:
            opened_catalog.close()
            raise

    for name in CATALOG_FILES:
        if os.path.lexists(path / name) and not is_our_file((path / name).lstat()):
            raise StoreError(
                f"{path / name} is not a file that only you may change, so somebody else may have "
                "made this cache: give "
                "another folder"
            )

    cause: object = "it was found damaged when it was last used"
    existed = catalog_file.exists()
    if existed and not damaged.exists():
        try:
            return store()
        except sqlite3.Error as error:
            # With one damaged byte in the header SQLite takes a file for one that only a newer
            # version may write.
            read_only = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY
            if not is_damage(error) and not (read_only and os.access(catalog_file, os.W_OK)):
                raise
            cause = error

    # Other processes have the old file open, and would go on writing to it unseen.
    if not in_use.try_lock_exclusive():
        raise StoreError(
            f"the catalog of {path} is missing or damaged ({cause}) and other processes use it: "
            "end them, or give another folder"
        )

    if existed:
        logger.warning("the catalog of %s is made again from the stored objects: %s", path, cause)
    for name in CATALOG_FILES:
        (path / name).unlink(missing_ok=True)
    os.close(open_file(catalog_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    rebuilt = store()
    # Only now: until it is rebuilt nobody else may open the store.
    in_use.lock_shared()
    return rebuilt


def _make_private(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)

    if mode & NOT_FOR_OTHERS:
        logger.warning(
            "others could write to %s: files in it that others own or may change are not read", path
        )
    if mode & 0o077:
        path.chmod(0o700)
