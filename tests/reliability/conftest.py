"""The Redis server that the store's tests use."""

from tests.store.conftest import redis_server, redis_session

__all__ = ["redis_server", "redis_session"]
