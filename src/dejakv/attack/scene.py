"""What attacks are made on: a model in this process with caches over it, and a server, this process's own or another's."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

from dejakv.attack.effort import Effort
from dejakv.attack.material import Material
from dejakv.attack.target import Target
from dejakv.build import build_cache
from dejakv.cache import HierarchicalCache
from dejakv.config import SemanticCacheConfig
from dejakv.pipeline import Pipeline

COSTS = (1e-4, 0.0, 0.0, 0.0)
"""Rows alone cost time: whatever saves rows runs, so that every way of reuse is attacked."""


class Scene:
    """Loads the model when it is first needed, and starts a server when there is none. Close it when done.

    server    the server to attack; None: one is started in this process when an attack asks for it
    build     what makes caches from their settings
    encoders  index encoders whose keys are attacked; empty: the usual ones that are here
    """

    def __init__(
        self,
        effort: Effort,
        *,
        seed: int = 0,
        model: str = "docs-lm",
        server: Target | None = None,
        build: Callable[..., HierarchicalCache] = build_cache,
        engine: Any = None,
        encoders: tuple[str, ...] = (),
    ) -> None:
        self.effort = effort
        self.seed = seed
        self.model = model
        self.remote = server is not None
        self.build = build
        self.encoders = encoders
        self._server = server
        self._engine = engine
        self._opened = ExitStack()

    def rng(self, name: str) -> random.Random:
        """A generator that no other attack uses."""
        return random.Random(f"{self.seed}/{name}")

    @cached_property
    def material(self) -> Material:
        return Material(self.model)

    @cached_property
    def engine(self) -> Any:
        """The model in fp32, in which exact reuse is exact."""
        if self._engine is not None:
            return self._engine
        from dejakv.engines.choice import ModelChoice
        from dejakv.engines.open import open_engine

        return open_engine(ModelChoice(self.model, dtype="fp32"), SemanticCacheConfig())

    @cached_property
    def server(self) -> Target:
        """Raises: MissingExtraError without the packages of the server."""
        if self._server is not None:
            return self._server
        from dejakv.attack.local_server import local_server

        return self._opened.enter_context(local_server(self.model, self.engine, COSTS))

    @contextmanager
    def pipeline(self, **settings: Any) -> Iterator[Pipeline]:
        """A pipeline over a cache of its own that stores before it returns."""
        config = SemanticCacheConfig(**{"index_encoder": "model", "costs": COSTS, **settings})
        cache = self.build(config, self.engine, background=False)
        try:
            yield Pipeline(self.engine, cache)
        finally:
            cache.close()

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> "Scene":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
