"""A store in Redis or Valkey, for several machines. Optional: `pip install 'dejakv[redis]'`.

The server sees the content of prompts: use a password and TLS (`rediss://`) on a shared network.
Keys, all in one hash slot: `dejakv:{<namespace>}:` and
    m:<id>  c:<id>       description (`metacodec`) and tensor (a safetensors file, `codec`)
    n:<id>               a prompt's description as a node, should it become one
    order  nodes         sorted set of ids in the order of eviction, and the set of those that are nodes
    sizes  parts  held   hashes id -> bytes, id -> partition, partition -> bytes
    p:<partition>  q:<partition>  sets of its ids, and of those that are nodes
    parents  k:<id>      hash id -> its parent's id, and the set of an id's children
    bytes  clock         total, and a count of uses
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import numpy as np

from dejakv.errors import StoreError
from dejakv.identity import digest_of
from dejakv.store import redis_answers as answers
from dejakv.store.base import KV, NODE, Chunk, ChunkMeta, StoreStats, as_node
from dejakv.store.breaker import Breaker
from dejakv.store.codec import CorruptChunk, decode, encode
from dejakv.store.counters import Counters, Listeners, logger
from dejakv.store.eviction import Budget, PolicyName, policy_named
from dejakv.store.memory import stamped
from dejakv.store.metacodec import decode_meta, encode_meta
from dejakv.store.redis_client import connect, reason_of
from dejakv.store.redis_scripts import DISCARD, DROP, PUT, SPLIT, TOUCH
from dejakv.store.redis_wire import BESIDE

_PAGE = 256
_UNANSWERED = b"no answer"
"""In place of a value that a server which does not answer may well have."""

T = TypeVar("T")


class Unreachable(StoreError):
    """The server does not answer, or failed lately and is not asked. Stores catch it."""


class TooLarge(StoreError):
    """A chunk is above a limit. Stores catch it."""


class RedisStore:
    """Chunks in a server. Thread-safe; any number of clients may share a namespace, each with its own budgets.

    url           `redis://[:password@]host:port/db`, `rediss://...` or `unix:///path`
    max_bytes, max_entries  budgets for all clients together, 0 for none
    max_chunk     larger tensors are refused (`too_large`): Redis stores no value above 512 MB
    timeout       time limit of a connection attempt or a read, in seconds
    breaker       decides when to ask a failed server again

    An unreachable server is a miss, or a refusal `unreachable`; it need not be up for opening. So is a server whose answers
    are too large, too slow (`redis_wire`) or none that Redis gives (`redis_answers`). What other clients or the server remove
    shows as a miss, and is then announced to the listeners.
    Raises: MissingExtraError without the package, ConfigError for a wrong url.
    """

    def __init__(
        self,
        url: str,
        max_bytes: int = 0,
        max_entries: int = 0,
        policy: PolicyName = "lru",
        *,
        namespace: str = "default",
        max_chunk: int = 256 << 20,
        timeout: float = 0.5,
        breaker: Breaker | None = None,
    ) -> None:
        self._budget = Budget(max_bytes, max_entries)
        self._policy = policy_named(policy)
        self._max_chunk = max_chunk
        self._breaker = breaker or Breaker()
        self._prefix = f"dejakv:{{{digest_of(namespace)[:12]}}}:"
        self._counters = Counters()
        self._listeners = Listeners()
        self._seen: set[str] = set()
        self._client, self._errors = connect(url, timeout, max_chunk + BESIDE)

    def put(self, chunk: Chunk) -> bool:
        if not self._write(PUT, chunk):
            return False
        self._counters.put(chunk.meta.partition)
        return True

    def split(self, node: Chunk, rest: Chunk) -> bool:
        """See `Parents`."""
        return self._write(SPLIT, node, rest)

    def get(self, id: str) -> Chunk | None:
        def read(client: Any) -> list[Any]:
            pipe = client.pipeline(transaction=False)
            pipe.mget(self._key("m", id), self._key("c", id))
            pipe.eval(TOUCH, 1, self._prefix, id, self._policy.name)
            return pipe.execute()[0]

        blob, body = self._try(read, partial(answers.blobs, count=2), [_UNANSWERED] * 2)
        if blob is None or body is None or blob is _UNANSWERED:
            if (blob is None) != (body is None):
                # The server itself evicted one of the two: the rest of the entry is useless.
                self.discard(id)
            elif blob is None:
                self._note(id, None)
            self._counters.miss()
            return None
        meta = self._decoded(id, blob)
        if meta is not None:
            try:
                tensor = decode(id, np.frombuffer(body, dtype=np.uint8))
                self._counters.hit(meta.partition)
                return Chunk(meta, tensor)
            except CorruptChunk as error:
                self._discard(id, error, meta.partition)
        self._counters.miss(meta.partition if meta else None)
        return None

    def meta(self, id: str) -> ChunkMeta | None:
        blob = self._try(lambda client: client.get(self._key("m", id)), answers.blob, _UNANSWERED)
        if blob is None:
            self._note(id, None)
        return self._decoded(id, blob) if blob is not None and blob is not _UNANSWERED else None

    def metas(self, partition: str | None = None, epoch: str | None = None) -> Iterator[ChunkMeta]:
        ids = self._ids(partition)
        for start in range(0, len(ids), _PAGE):
            page = ids[start : start + _PAGE]
            keys = [self._key("m", id) for id in page]
            shape = partial(answers.blobs, count=len(page))
            blobs = self._try(lambda client, keys=keys: client.mget(keys), shape, [])
            for id, blob in zip(page, blobs, strict=False):
                meta = self._decoded(id, blob) if blob is not None else None
                if meta is not None and partition in (None, meta.partition) and epoch in (None, meta.epoch):
                    yield meta

    def delete(self, id: str) -> bool:
        gone = self._try(lambda client: client.eval(DROP, 1, self._prefix, id), answers.gone, [])
        self._tell(gone)
        return any(other == id for other, _, _ in gone)

    def discard(self, id: str) -> None:
        """See `Parents`."""
        self._tell(self._try(lambda client: client.eval(DISCARD, 1, self._prefix, id), answers.gone, []))

    def clear(self, partition: str | None = None) -> int:
        return sum(self.delete(id) for id in self._ids(partition))

    def scrub(self, partition: str | None = None) -> None:
        """See `Scrubs`: Redis leaves no traces, but a server that does not answer has removed nothing."""
        try:
            self._ask(lambda client: client.zcard(self._prefix + "order"), answers.count)
        except (Unreachable, self._errors.RedisError) as error:
            raise StoreError(f"the Redis server does not answer ({error}): start it and purge again") from error

    def stats(self, partition: str | None = None) -> StoreStats:
        """Entries and bytes of all clients (0 while the server is unreachable), counters of this one."""

        def read(client: Any) -> Any:
            pipe = client.pipeline(transaction=False)
            if partition is None:
                pipe.zcard(self._prefix + "order").scard(self._prefix + "nodes").get(self._prefix + "bytes")
            else:
                pipe.scard(self._key("p", partition)).scard(self._key("q", partition))
                pipe.hget(self._prefix + "held", partition)
            return pipe.execute()

        entries, nodes, held = self._try(read, lambda found: [answers.count(number) for number in found], [0, 0, 0])
        return self._counters.stats(partition, entries=max(0, entries - nodes), bytes=held)

    def on_evict(self, listener: Callable[[str], None]) -> None:
        self._listeners.add(listener)

    def flush(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        self._client.close()

    def _key(self, kind: str, name: str) -> str:
        return f"{self._prefix}{kind}:{name}"

    def _ids(self, partition: str | None) -> list[str]:
        def read(client: Any) -> Any:
            if partition is None:
                return client.zrange(self._prefix + "order", 0, -1)
            return client.smembers(self._key("p", partition))

        return self._try(read, answers.names, [])

    def _ask(self, call: Callable[[Any], Any], shape: Callable[[Any], T]) -> T:
        """The server's answer in its shape. Raises: Unreachable, or RedisError for a refusal of the server's."""
        if not self._breaker.allow():
            raise Unreachable("the server did not answer lately")
        try:
            answer = shape(call(self._client))
        except (answers.Nonsense, ValueError, RecursionError) as error:
            # redis-py takes a length for a number, and reads lists in lists by calling itself.
            self._breaker.failed()
            self._client.connection_pool.disconnect()
            logger.warning("the Redis server answers with nonsense: %s", error)
            raise Unreachable(str(error)) from error
        except (self._errors.ConnectionError, self._errors.TimeoutError, OSError) as error:
            self._breaker.failed()
            logger.warning("the Redis server does not answer: %s", error)
            raise Unreachable(str(error)) from error
        except self._errors.RedisError:
            self._breaker.succeeded()
            raise
        self._breaker.succeeded()
        return answer

    def _try(self, call: Callable[[Any], Any], shape: Callable[[Any], T], otherwise: T) -> T:
        try:
            return self._ask(call, shape)
        except Unreachable:
            return otherwise
        except self._errors.RedisError as error:
            logger.warning("the Redis server refused: %s", error)
            return otherwise

    def _decoded(self, id: str, blob: bytes) -> ChunkMeta | None:
        try:
            meta = decode_meta(blob)
            if meta.id != id:
                raise CorruptChunk(f"chunk {id}: its description belongs to another chunk")
            self._note(id, meta)
            return meta
        except CorruptChunk as error:
            self._discard(id, error, None)
            return None

    def _note(self, id: str, meta: ChunkMeta | None) -> None:
        """What the server has of an entry. One that was seen as a prompt and is none any more was removed by another client, or
        by the server."""
        if meta is not None and meta.kind != NODE:
            self._seen.add(id)
        elif id in self._seen:
            self._tell([(id, "", "")])

    def _discard(self, id: str, cause: CorruptChunk, partition: str | None) -> None:
        logger.warning("a damaged chunk is removed: %s", cause)
        self._counters.corrupt(partition)
        self.discard(id)

    def _write(self, script: str, *chunks: Chunk) -> bool:
        """Runs a script that takes chunks. False if they are refused, which is counted."""
        partition = chunks[0].meta.partition
        limits = (self._budget.max_bytes, self._budget.max_entries)
        try:
            values = [value for chunk in chunks for value in self._values(chunk)]
            answer = self._ask(lambda client: client.eval(script, 1, self._prefix, *limits, *values), answers.written)
        except TooLarge:
            return self._refuse(partition, "too_large")
        except Unreachable:
            return self._refuse(partition, "unreachable")
        except (StoreError, UnicodeError) as error:
            logger.warning("a chunk cannot be stored: %s", str(error))
            return self._refuse(partition, "invalid")
        except self._errors.RedisError as error:
            return self._refuse(partition, reason_of(error))
        if isinstance(answer, str):
            return self._refuse(partition, answer)
        for _, of, reason in answer:
            if reason:
                self._counters.evicted(of, reason)
        self._tell(answer)
        for chunk in chunks:
            self._note(chunk.meta.id, chunk.meta)
        return True

    def _values(self, chunk: Chunk) -> tuple[Any, ...]:
        """A chunk as the scripts take it. Raises: StoreError; TooLarge for one above a limit."""
        meta = stamped(chunk.meta, chunk.tensor)
        encoded, blob = encode(meta.id, chunk.tensor), encode_meta(meta)
        left = encode_meta(as_node(meta)) if meta.kind == KV else b""
        size = encoded.nbytes + len(blob) + len(left)
        if self._budget.excess_bytes(size) or chunk.tensor.nbytes > self._max_chunk:
            raise TooLarge(f"chunk {meta.id} has {size} bytes")
        body = encoded.header + encoded.data.tobytes()
        return meta.id, meta.partition, size, meta.parent, int(meta.kind == NODE), blob, body, left

    def _tell(self, gone: Iterable[tuple[str, str, str]]) -> None:
        ids = [id for id, _, _ in gone]
        self._seen.difference_update(ids)
        self._listeners.tell(ids)

    def _refuse(self, partition: str, reason: str) -> bool:
        self._counters.refused(partition, reason)
        return False
