"""Tells machines at once what others put into and took out of a bucket: a stream in Redis or Valkey.

dejakv:URL                 the stream: an event names one object
{dejakv:URL}:NAME          header of an object that was put, so that nobody reads it from the bucket; it leaves with the object, and after 30 s

Both are hints. Whoever may have missed an event lists the bucket, and a header that is missing or too large is read there. So the stream
keeps the latest events alone, and a server that is away or has lost everything costs a listing.
"""

import secrets
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cachetools import FIFOCache

from dejakv.errors import MissingExtraError, StoreError
from dejakv.settings import shown
from dejakv.store.counters import logger
from dejakv.store.forks import fork_safe_lock
from dejakv.store.remote.health import CircuitBreaker

if TYPE_CHECKING:
    from dejakv.store.remote.bucket import BucketObjects

_KEPT = 100_000
"""Events in the stream."""
HEADER_SECONDS = 30
_MOST_HEADER = 32 << 10
"""Bytes of a compressed header: of a prompt of about 5,000 tokens with its text. More would cost more, between zones, than to read it."""
_MOST_INFLATED = 1 << 20
_UNSENT = 10_000
_WAIT_MS = 500
_BATCH = 1000
LIST = "list"
USED = "used"
"""Event with the ids of the entries read."""

Header = tuple[bytes, int]
"""First bytes of an object, with all of its description, and the object's size."""
Put = dict[str, Header | None]
"""Objects by name; None: the header is in the bucket alone."""
Heard = tuple[Put, set[str], list[str]]
"""News of others: objects put, names of objects removed, ids of entries used."""


class FeedUnreachable(Exception):
    """The feed's server does not answer."""


class ChangeFeed:
    """The stream of one bucket's prefix. `tell` is thread-safe; one thread hears.

    url   `redis://HOST:PORT/DB`, or `rediss://`
    name  of the store, for the name of the stream

    Raises: MissingExtraError without the client; StoreError if the server does not answer, or refuses this user.
    """

    def __init__(self, url: str, name: str) -> None:
        try:
            import redis.exceptions
        except ImportError as error:
            raise MissingExtraError("redis", "remote", "the feed") from error

        self._errors = (redis.RedisError, OSError)
        self._stream, self._own = f"dejakv:{name}", secrets.token_hex(8)
        self.breaker = CircuitBreaker()
        self._lock = fork_safe_lock()
        self._unsent = deque[tuple[str, str]](maxlen=_UNSENT)
        self._unsure = False
        self.left = FIFOCache[str, None](_KEPT)
        """Names of objects that others removed."""
        try:
            client: Any = redis.Redis
            # A client of its own, since headers are bytes and events are text.
            self._bytes: Any = client.from_url(url, socket_timeout=5, socket_connect_timeout=1)
            self._client: Any = client.from_url(url, socket_timeout=5, socket_connect_timeout=1, decode_responses=True)
            self._last: str = self._newest()
            self._client.xtrim(self._stream, maxlen=_KEPT, approximate=True)  # who may not write learns it now
        except (*self._errors, ValueError) as error:
            remedy = "see that Redis or Valkey answers there"
            if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
                remedy = "give a user who may read and write there, as redis://USER:PASSWORD@HOST:PORT/DB"
            elif "unknown command" in str(error):
                remedy = "use Redis 6 or newer, or Valkey"
            elif "DB index" in str(error):
                remedy = "give a database that the server has"
            raise StoreError(f"feed={shown(url)} cannot be used ({error}): {remedy}, or leave the feed out") from error

    def tell(self, event_kind: str, names: Sequence[str], header: Header | None = None) -> None:
        """Tell the others that objects were `put` or `removed`, or that they must list them. What fails, and what comes in the
        pauses of `breaker`, is told with a later call.

        header  of the object that was put
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
                if event_kind == "put" and 0 < len(packed) <= _MOST_HEADER:
                    pipeline.set(self._key(names[0]), packed, ex=HEADER_SECONDS)

                for kind, name in self._unsent:
                    event = {"by": self._own, "what": kind, "name": name}
                    pipeline.xadd(self._stream, event, maxlen=_KEPT, approximate=True)
                    if kind == "removed":
                        pipeline.unlink(self._key(name))

                pipeline.execute()
                self._unsent.clear()
                self.breaker.worked()
            except self._errors as error:
                self._missed(error)

    def hear(self) -> Heard | None:
        """Return the others' news since the last call, after up to half a second; None if some may have been missed: then list all objects.
        Asks in pauses too: nobody waits for it. Raises: Away"""
        try:
            # The last event seen has been trimmed away, so later ones may have been too.
            if self._unsure or (self._last != "0-0" and not self._client.xrange(self._stream, self._last, self._last)):
                self._last, self._unsure = self._newest(), False
                self.breaker.worked()
                self.tell("", ())  # what is unsent
                return None
            stream_reply = self._client.xread({self._stream: self._last}, count=_BATCH, block=_WAIT_MS)
            events: list[tuple[str, dict[str, str]]] = stream_reply[0][1] if stream_reply else []

            put, removed, used = self._sorted([event for _, event in events if event.get("by") != self._own])
            headers: list[bytes | None] = self._bytes.mget(map(self._key, put)) if put else []
        except self._errors as error:
            self._unsure = True
            self._missed(error)
            raise FeedUnreachable(str(error)) from error
        # Only after the headers came: a failure reads the same events once more.
        self._last = events[-1][0] if events else self._last
        self.breaker.worked()
        return {name: _unpacked(packed) for name, packed in zip(put, headers, strict=True)}, removed, used

    def _sorted(self, events: Sequence[dict[str, str]]) -> tuple[list[str], set[str], list[str]]:
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
                self.left[name] = None

        return list(put), removed, used

    def _missed(self, error: Exception) -> None:
        self.breaker.failed()
        logger.info("the feed is away: %s", error)

    def _key(self, name: str) -> str:
        """Of an object's header; in a cluster it stands beside the stream."""
        return f"{{{self._stream}}}:{name}"

    def close(self) -> None:
        self._client.close()
        self._bytes.close()

    def _newest(self) -> str:
        latest_events = self._client.xrevrange(self._stream, count=1)
        return latest_events[0][0] if latest_events else "0-0"


def _packed(head: bytes, size: int) -> bytes:
    return size.to_bytes(8, "little") + zlib.compress(head, 1)


def _unpacked(packed: bytes | None) -> Header | None:
    """A damaged one is told from a description by who reads it."""
    if packed is None:
        return None
    try:
        # Bounded: anybody who may write to the feed could send a zip bomb.
        return zlib.decompressobj().decompress(packed[8:], _MOST_INFLATED), int.from_bytes(packed[:8], "little")
    except zlib.error:
        return b"", 0


class AnnouncedObjects:
    """Objects whose changes are told to others."""

    def __init__(self, objects: "BucketObjects", feed: ChangeFeed) -> None:
        self.shared, self.link, self.tombstones = objects.shared, objects.link, objects.tombstones
        self.breaker = objects.breaker
        self._objects, self._feed = objects, feed
        self.get, self.head, self.sweep = objects.get, objects.head, objects.sweep

    def put(self, name: str, parts: Sequence[Any]) -> bool:
        # First the object: who hears of it may read it at once.
        created = self._objects.put(name, parts)
        header = (bytes(parts[0]), sum(memoryview(part).nbytes for part in parts)) if len(parts) == 2 else None
        self._feed.tell("put", [name], header)
        return created

    def delete(self, names: Sequence[str]) -> None:
        """Remove and announce objects, but for those that others have removed."""
        names_to_remove = [name for name in names if name not in self._feed.left]
        self._objects.delete(names_to_remove)
        if names_to_remove:
            self._feed.tell("removed", names_to_remove)

    def list(self) -> Iterator[str]:
        return self._objects.list()

    def close(self) -> None:
        self._objects.close()
        self._feed.close()
