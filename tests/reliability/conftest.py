"""The server that the store's tests use, and this folder's modules by their names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tests.store.conftest import redis_server, redis_session

__all__ = ["redis_server", "redis_session"]
