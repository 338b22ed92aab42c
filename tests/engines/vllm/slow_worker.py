"""A worker of vLLM whose store takes seconds for each part of a prompt, and whose saves are counted in a file."""

import os
import time
from pathlib import Path
from typing import Any

from dejakv.engines.vllm.bind import WorkerExtension
from dejakv.store.base import Chunk
from dejakv.store.store import Store

SECONDS, STORED = "DEJAKV_TEST_SECONDS", "DEJAKV_TEST_STORED"
EXTENSION = "slow_worker.SlowWorker"


class SlowWorker(WorkerExtension):
    """Its store is slow."""

    def __new__(cls, *given: Any, **named: Any) -> Any:
        put = Store.put

        def slowly(store: Store, chunk: Chunk) -> bool:
            time.sleep(float(os.environ[SECONDS]))
            done = put(store, chunk)
            with Path(os.environ[STORED]).open("a") as file:
                file.write(f"{chunk.meta.id}\n")
            return done

        Store.put = slowly
        return super().__new__(cls, *given, **named)
