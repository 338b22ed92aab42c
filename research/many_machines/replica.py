"""A process with a model and a cache, which answers one request at a time and may be killed."""

import logging
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

from dejakv.config import SemanticCacheConfig
from dejakv.errors import DejaKVError
from dejakv.request import Request

_AGAIN_SECONDS = 0.5
_LOADED = (
    "dejakv.build",
    "dejakv.engines.transformers",
    "dejakv.pipeline",
    "transformers.models.llama.modeling_llama",
)
READY = "ready"
Told = dict[str, Any]
"""Of an answer: `token_ids`, `method`, `prompt_tokens`, `computed_tokens`, `reused_tokens`,
`ttft_ms`, `plans`, `reason`; `error` of a request that failed.
"""


class Replica:
    """Replica of a model of this name, in a process of its own.

    Without a config it has no cache until `open`.
    """

    def __init__(
        self,
        model: str,
        config: SemanticCacheConfig | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._given = model, config, dict(environment or {})
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Begin to start the process, from one that has loaded the libraries.

        That takes a minute on a busy machine, and `ready` tells when it answers.
        """
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__, *_LOADED])
        self._connection, its = context.Pipe()
        self._process = context.Process(target=_serve, args=(its, *self._given), daemon=True)
        self._process.start()
        its.close()
        self._ready = False
        self.starts += 1

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def ready(self, seconds: float = 0.0) -> bool:
        """Wait up to `seconds`, and tell whether the replica answers."""
        with suppress(EOFError, OSError):
            self._ready = self._ready or (
                self._connection.poll(seconds) and self._connection.recv() == READY
            )
        return self._ready and self.alive

    def open(self, config: SemanticCacheConfig, seconds: float = 120.0) -> None:
        """Take another cache; a DejaKVError tells that it failed."""
        told = self._said(("open", config), seconds)
        if told is None or "error" in told:
            raise DejaKVError(f"a replica did not open its cache: {told}")

    def ask(self, request: Request, seconds: float = 120.0, *, settle: bool = False) -> Told | None:
        """Return an answer; None if the process died or did not answer in time: then it is killed.

        With `settle`, state is stored before this returns.
        """
        return self._said(("ask", request, settle), seconds)

    def purge(self, seconds: float = 120.0) -> Told | None:
        """Empty the store; the answer has an `error` if that is not possible now."""
        return self._said(("purge",), seconds)

    def counts(self, seconds: float = 120.0) -> Told | None:
        """Return `corrupt` and `misses` of its store."""
        return self._said(("counts",), seconds)

    def entries(self, seconds: float = 120.0) -> Told | None:
        """Return how many `entries` the replica knows and can find, also of others."""
        return self._said(("entries",), seconds)

    def kill(self) -> None:
        """End the process with signal 9."""
        self._process.kill()

    def close(self) -> None:
        with suppress(OSError):
            self._connection.send(None)
        self._process.join(30)
        self._process.kill()
        self._process.join()

    def _said(self, message: tuple[Any, ...], seconds: float) -> Told | None:
        try:
            self._connection.send(message)
            if self._connection.poll(seconds):
                return self._connection.recv()
            self.kill()  # what it would say later is no answer to the next
        except (EOFError, OSError):
            pass
        self._process.join()
        return None


def _serve(
    connection: Any, model: str, config: SemanticCacheConfig | None, environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process's parent ends it
    logging.getLogger("dejakv").setLevel(logging.ERROR)
    import torch

    from dejakv.build import build_cache
    from dejakv.engines.transformers import TransformersEngine
    from dejakv.pipeline import Pipeline
    from dejakv.store.selection import Selection

    torch.set_num_threads(1)
    engine = TransformersEngine.from_pretrained(model, dtype="fp32", device="cpu")

    def opened(config: SemanticCacheConfig) -> Pipeline:
        cache = build_cache(config, engine)
        cache.flush()
        return Pipeline(engine, cache)

    pipeline: Pipeline | None = None
    while config is not None and pipeline is None:
        try:
            pipeline = opened(config)
        except DejaKVError:  # a service is away
            time.sleep(_AGAIN_SECONDS)
    connection.send(READY)
    while (message := connection.recv()) is not None:
        try:
            cache = pipeline.cache if pipeline is not None else None
            if message[0] == "open":
                if cache is not None:
                    cache.close()
                pipeline = opened(message[1])
                connection.send({})
                continue
            assert pipeline is not None
            assert cache is not None
            if message[0] == "purge":
                connection.send({"prompts": pipeline.purge(Selection()).prompts})
            elif message[0] == "entries":
                cache.flush()
                connection.send({"entries": cache.store.stats().entries})
            elif message[0] == "counts":
                stats = cache.store.stats()
                connection.send({"corrupt": stats.corrupt, "misses": stats.misses})
            else:
                answer = pipeline.answer(message[1])
                if message[2]:
                    cache.flush()
                names = (
                    "method",
                    "prompt_tokens",
                    "computed_tokens",
                    "reused_tokens",
                    "ttft_ms",
                    "plans",
                    "reason",
                )
                told = {name: getattr(answer.record, name) for name in names}
                connection.send({"token_ids": tuple(answer.token_ids), **told})
        except Exception as error:  # the parent counts it
            connection.send({"error": f"{type(error).__name__}: {error}"})
    if pipeline is not None and pipeline.cache is not None:
        pipeline.cache.close()
