"""The Redis server of the store's tests, for isolation in that store too."""

from tests.store.conftest import redis_server, redis_session

__all__ = ["redis_server", "redis_session"]
