"""The connection of a `RedisStore`, and what its server's refusals mean."""

from typing import Any, cast

from dejakv.errors import ConfigError, MissingExtraError
from dejakv.store.redis_wire import bounded


def connect(url: str, timeout: float, largest: int) -> tuple[Any, Any]:
    """A client that reads no value above `largest` bytes and none for longer than `timeout` seconds, and the module of its errors.

    Raises: MissingExtraError without the package, ConfigError for a wrong url.
    """
    try:
        import redis
        from redis import exceptions
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise MissingExtraError("redis", "redis", "a store in Redis") from error
    try:
        # No retries: the breaker decides when to try again, without delaying a request.
        make = cast(Any, redis.Redis).from_url
        client = make(url, socket_connect_timeout=timeout, socket_timeout=timeout, retry=Retry(NoBackoff(), 0))
    except ValueError as error:
        raise ConfigError(f"redis url {url!r} is wrong ({error}): give redis://host:port/db") from error
    client.response_callbacks.clear()  # they rely on the answer's type
    pool = client.connection_pool
    pool.connection_class = bounded(pool.connection_class, largest, timeout)
    return client, exceptions


def reason_of(error: Exception) -> str:
    """Why the server refused to write, in the words of `StoreStats.refused`."""
    words = str(error)
    if words.startswith("OOM") or "maxmemory" in words:
        return "full"
    return "read_only" if words.startswith("READONLY") else "error"
