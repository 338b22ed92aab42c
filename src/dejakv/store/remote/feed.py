"""Tells machines at once what others put into and took out of a bucket: a stream in Redis or Valkey.

An event names one object. The stream is a hint: whoever may have missed one lists the bucket. So it keeps the latest events alone, and a
server that is away or has lost them costs a listing.
"""

import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cachetools import FIFOCache

from dejakv.errors import MissingExtraError, StoreError
from dejakv.settings import shown
from dejakv.store.counters import logger

if TYPE_CHECKING:
    from dejakv.store.remote.bucket import Bucket

_KEPT = 100_000
"""Events in the stream."""
_UNSENT = 10_000
_WAIT_MS = 500
_BATCH = 1000
LIST = "list"
USED = "used"
"""Says which entries were read, by id, in one event."""

Heard = tuple[set[str], set[str], list[str]]
"""Names of objects that others put and removed, and ids of what they used."""


class Away(Exception):
    """The feed's server does not answer."""


class Feed:
    """The stream of one bucket's prefix. `tell` is thread-safe; one thread hears.

    url   `redis://HOST:PORT/DB`, or `rediss://`
    name  of the store, for the name of the stream

    Raises: MissingExtraError without the client; StoreError if the server does not answer.
    """

    def __init__(self, url: str, name: str) -> None:
        try:
            import redis
        except ImportError as error:
            raise MissingExtraError("redis", "remote", "the feed") from error
        self._errors = (redis.RedisError, OSError)
        self._stream, self._own = f"dejakv:{name}", secrets.token_hex(8)
        self._lock = threading.Lock()
        self._unsent = deque[tuple[str, str]](maxlen=_UNSENT)
        self._unsure = False
        self.left = FIFOCache[str, None](_KEPT)
        """Names of objects that others removed."""
        try:
            client: Any = redis.Redis
            self._client: Any = client.from_url(url, socket_timeout=5, socket_connect_timeout=1, decode_responses=True)
            self._last = self._newest()
        except (*self._errors, ValueError) as error:
            raise StoreError(
                f"feed={shown(url)} cannot be used ({error}): see that Redis or Valkey answers there, or leave the feed out"
            ) from error

    def tell(self, what: str, names: Sequence[str]) -> None:
        """Tells the others that objects were `put` or `removed`, or that they are to list them. What cannot be told now is told with the next."""
        with self._lock:
            if what == USED:
                names = [" ".join(names)] if names and not self._unsent else []
            if len(self._unsent) + len(names) > _UNSENT:
                self._unsent.clear()
                names, what = [""], LIST
            self._unsent.extend((what, name) for name in names)
            try:
                pipeline = self._client.pipeline()
                for kind, name in self._unsent:
                    event = {"by": self._own, "what": kind, "name": name}
                    pipeline.xadd(self._stream, event, maxlen=_KEPT, approximate=True)
                pipeline.execute()
                self._unsent.clear()
            except self._errors as error:
                logger.info("the feed is away: %s", error)

    def hear(self) -> Heard | None:
        """What others told since the last call, waited for half a second; None if some may have been missed: then all objects are
        listed. Raises: Away"""
        try:
            if self._unsure or (self._last != "0-0" and not self._client.xrange(self._stream, self._last, self._last)):
                self._last, self._unsure = self._newest(), False
                self.tell("", ())  # what is unsent
                return None
            found = self._client.xread({self._stream: self._last}, count=_BATCH, block=_WAIT_MS)
        except self._errors as error:
            self._unsure = True
            raise Away(str(error)) from error
        put, removed, used = set[str](), set[str](), list[str]()
        for id, event in found[0][1] if found else ():
            self._last = id
            name, what = event.get("name", ""), event.get("what")
            if event.get("by") == self._own:
                continue
            if what == LIST:
                self._unsure = True
            elif what == USED:
                used += name.split()
            elif what == "put":
                put.add(name)
            elif what == "removed":
                removed.add(name)
                put.discard(name)
                self.left[name] = None
        return put, removed, used

    def close(self) -> None:
        self._client.close()

    def _newest(self) -> str:
        found = self._client.xrevrange(self._stream, count=1)
        return found[0][0] if found else "0-0"


class Announced:
    """Objects whose changes are told to others."""

    def __init__(self, objects: "Bucket", feed: Feed) -> None:
        self.shared, self.link, self.tombstones = objects.shared, objects.link, objects.tombstones
        self._objects, self._feed = objects, feed
        self.get, self.head, self.sweep = objects.get, objects.head, objects.sweep

    def put(self, name: str, parts: Sequence[Any]) -> bool:
        made = self._objects.put(name, parts)
        self._feed.tell("put", [name])
        return made

    def delete(self, names: Sequence[str]) -> None:
        """What others have removed is neither removed nor told again."""
        own = [name for name in names if name not in self._feed.left]
        self._objects.delete(own)
        if own:
            self._feed.tell("removed", own)

    def list(self) -> Iterator[str]:
        return self._objects.list()

    def close(self) -> None:
        self._objects.close()
        self._feed.close()
