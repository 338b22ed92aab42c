"""A stream in Redis or Valkey that tells machines at once what others put into a bucket or removed.

    dejakv:URL           the stream: an event names one object
    {dejakv:URL}:NAME    header of an object that was put, so that nobody reads it from the
                         bucket; it leaves with the object, or after 30 s

Events and headers are hints. A machine that may have missed an event lists the bucket, and a header
that is missing or too large is read there. So the stream keeps only the latest events, and a server
that is away or has lost everything costs a listing.
"""

import secrets
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cachetools import FIFOCache

from dejakv.errors import MissingExtraError, StoreError
from dejakv.settings import display
from dejakv.store.counters import logger
from dejakv.store.forks import fork_safe_lock
from dejakv.store.remote.health import CircuitBreaker

if TYPE_CHECKING:
    from dejakv.store.remote.bucket import BucketObjects

_STREAM_EVENTS = 100_000
"""Most events that the stream keeps, roughly."""
HEADER_SECONDS = 30
"""Seconds for which a header is kept."""
_MAX_HEADER = 32 << 10
"""Bytes of a compressed header: of a prompt of about 5,000 tokens with its text.

A larger one would cost more, between zones, than to read it from the bucket.
"""
_MAX_INFLATED = 1 << 20
"""Bytes of a header at most."""
_UNSENT = 10_000
"""Most events that wait for a server that is away."""
_WAIT_MS = 500
"""Milliseconds that `receive` waits for events."""
_BATCH = 1000
"""Most events of one `receive`."""
LIST = "list"
"""Event that has the others list all objects."""
USED = "used"
"""Event with the ids of the entries read."""

Header = tuple[bytes, int]
"""First bytes of an object, with all of its description, and the object's size."""
Put = dict[str, Header | None]
"""Headers by object; None: the header is in the bucket alone."""
FeedNews = tuple[Put, set[str], list[str]]
"""News of others: objects put, names of objects removed, ids of entries used."""


class FeedUnreachable(Exception):
    """The feed's server does not answer."""


class ChangeFeed:
    """The stream of one bucket's prefix. `publish` is thread-safe; one thread calls `receive`.

    Parameters
    ----------
    url : str
        `redis://HOST:PORT/DB`, or `rediss://`.
    name : str
        Name of the store, for the name of the stream.

    Raises
    ------
    MissingExtraError
        Without the client.
    StoreError
        If the address is wrong, or the server does not answer or refuses this user.
    """

    def __init__(self, url: str, name: str) -> None:
        try:
            import redis.exceptions
        except ImportError as error:
            raise MissingExtraError("redis", "remote", "the feed") from error

        self._errors = (redis.RedisError, OSError)
        self._stream, self._sender_id = f"dejakv:{name}", secrets.token_hex(8)
        self.breaker = CircuitBreaker()
        self._lock = fork_safe_lock()
        self._unsent = deque[tuple[str, str]](maxlen=_UNSENT)
        self._unsure = False
        self.removed_names = FIFOCache[str, None](_STREAM_EVENTS)
        """Names of objects that others removed."""
        try:
            client: Any = redis.Redis
            # A client of its own, since headers are bytes and events are text.
            self._bytes: Any = client.from_url(url, socket_timeout=5, socket_connect_timeout=1)
            self._client: Any = client.from_url(
                url, socket_timeout=5, socket_connect_timeout=1, decode_responses=True
            )
            self._last: str = self._newest()
            # A user who may not write learns it now.
            self._client.xtrim(self._stream, maxlen=_STREAM_EVENTS, approximate=True)
        except (*self._errors, ValueError) as error:
            remedy = "see that Redis or Valkey answers there"
            if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
                remedy = (
                    "give a user who may read and write there, as "
                    "redis://USER:PASSWORD@HOST:PORT/DB"
                )
            elif "unknown command" in str(error):
                remedy = "use Redis 6 or newer, or Valkey"
            elif "DB index" in str(error):
                remedy = "give a database that the server has"

            raise StoreError(
                f"feed={display(url)} cannot be used ({error}): {remedy}, or leave the feed out"
            ) from error

    def publish(self, event_kind: str, names: Sequence[str], header: Header | None = None) -> None:
        """Tell the others what happened to objects or entries.

        Events that fail, and those in the pauses of `breaker`, are sent with a later call, without
        headers; `USED` is not sent while others wait. Beyond 10,000, one `LIST` replaces them.

        Parameters
        ----------
        event_kind : str
            `put`, `removed`, `LIST` or `USED`.
        names : Sequence[str]
            Names of objects, or ids of entries.
        header : Header | None
            Header of the object that was put.
        """
        # Outside of the lock: compressing takes a while.
        packed = _packed(*header) if header is not None else b""
        with self._lock:
            if event_kind == USED:
                # Uses only order evictions: they do not queue up while the server is away.
                names = [" ".join(names)] if names and not self._unsent else []
            # Too many to remember: one event that has the others list everything says it all.
            if len(self._unsent) + len(names) > _UNSENT:
                self._unsent.clear()
                names, event_kind = [""], LIST

            self._unsent.extend((event_kind, name) for name in names)
            if not self.breaker.allows():
                return

            try:
                pipeline = self._client.pipeline()
                if event_kind == "put" and 0 < len(packed) <= _MAX_HEADER:
                    pipeline.set(self._key(names[0]), packed, ex=HEADER_SECONDS)

                for kind, name in self._unsent:
                    event = {"by": self._sender_id, "what": kind, "name": name}
                    pipeline.xadd(self._stream, event, maxlen=_STREAM_EVENTS, approximate=True)
                    if kind == "removed":
                        pipeline.unlink(self._key(name))

                pipeline.execute()
                self._unsent.clear()
                self.breaker.worked()
            except self._errors as error:
                self._note_failure(error)

    def receive(self) -> FeedNews | None:
        """Return the others' news since the last call, after up to half a second.

        It asks in the pauses of `breaker`, too: no request waits for it.

        Returns
        -------
        FeedNews | None
            None if some news may have been missed: then list all objects.

        Raises
        ------
        FeedUnreachable
            If the server does not answer.
        """
        try:
            # The last event seen has been trimmed away, so later ones may have been too.
            if self._unsure or (
                self._last != "0-0"
                and not self._client.xrange(self._stream, self._last, self._last)
            ):
                self._last, self._unsure = self._newest(), False
                self.breaker.worked()
                # Sends what waited while the server was away.
                self.publish("", ())
                return None

            stream_reply = self._client.xread(
                {self._stream: self._last}, count=_BATCH, block=_WAIT_MS
            )
            events: list[tuple[str, dict[str, str]]] = stream_reply[0][1] if stream_reply else []

            put, removed, used = self._sort_events(
                [event for _, event in events if event.get("by") != self._sender_id]
            )
            headers: list[bytes | None] = self._bytes.mget(map(self._key, put)) if put else []
        except self._errors as error:
            self._unsure = True
            self._note_failure(error)
            raise FeedUnreachable(str(error)) from error

        # Only after the headers came: a failure reads the same events once more.
        self._last = events[-1][0] if events else self._last
        self.breaker.worked()
        return (
            {name: _unpacked(packed) for name, packed in zip(put, headers, strict=True)},
            removed,
            used,
        )

    def _sort_events(
        self, events: Sequence[dict[str, str]]
    ) -> tuple[list[str], set[str], list[str]]:
        put, removed, used = dict[str, None](), set[str](), list[str]()
        for event in events:
            name, event_kind = event.get("name", ""), event.get("what")
            if event_kind == LIST:
                self._unsure = True
            elif event_kind == USED:
                used += name.split()
            elif event_kind == "put":
                put[name] = None
            elif event_kind == "removed":
                removed.add(name)
                # Put and removed within one batch: nobody needs to read it.
                put.pop(name, None)
                self.removed_names[name] = None

        return list(put), removed, used

    def _note_failure(self, error: Exception) -> None:
        self.breaker.failed()
        logger.info("the feed is away: %s", error)

    def _key(self, name: str) -> str:
        """Return the key of an object's header; in a cluster it stands beside the stream."""
        return f"{{{self._stream}}}:{name}"

    def close(self) -> None:
        """Close both clients."""
        self._client.close()
        self._bytes.close()

    def _newest(self) -> str:
        latest_events = self._client.xrevrange(self._stream, count=1)
        return latest_events[0][0] if latest_events else "0-0"


def _packed(head: bytes, size: int) -> bytes:
    return size.to_bytes(8, "little") + zlib.compress(head, 1)


def _unpacked(packed: bytes | None) -> Header | None:
    """Unpack a header. A damaged one becomes empty bytes, which are no description."""
    if packed is None:
        return None
    try:
        # Bounded: anybody who may write to the feed could send a zip bomb.
        return zlib.decompressobj().decompress(packed[8:], _MAX_INFLATED), int.from_bytes(
            packed[:8], "little"
        )
    except zlib.error:
        return b"", 0


class AnnouncedObjects:
    """Objects of a bucket whose changes are told to other machines."""

    def __init__(self, objects: "BucketObjects", feed: ChangeFeed) -> None:
        self.shared, self.link, self.tombstones = objects.shared, objects.link, objects.tombstones
        self.breaker = objects.breaker
        self._objects, self._feed = objects, feed
        self.get, self.head, self.sweep = objects.get, objects.head, objects.sweep

    def put(self, name: str, parts: Sequence[Any]) -> bool:
        """Create an object, and announce it with its header."""
        # First the object: who hears of it may read it at once.
        created = self._objects.put(name, parts)
        header = (
            (bytes(parts[0]), sum(memoryview(part).nbytes for part in parts))
            if len(parts) == 2
            else None
        )
        self._feed.publish("put", [name], header)
        return created

    def delete(self, names: Sequence[str]) -> None:
        """Remove and announce objects, except those that others have removed."""
        names_to_remove = [name for name in names if name not in self._feed.removed_names]
        self._objects.delete(names_to_remove)
        if names_to_remove:
            self._feed.publish("removed", names_to_remove)

    def list(self) -> Iterator[str]:
        """Yield the names of all objects."""
        return self._objects.list()

    def close(self) -> None:
        """Close the objects and the feed."""
        self._objects.close()
        self._feed.close()
