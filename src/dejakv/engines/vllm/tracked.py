"""What the connector's scheduler side knows of one live request."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from dejakv.engines.vllm.finder import Found
from dejakv.engines.vllm.messages import Loaded
from dejakv.engines.vllm.settings import Wish


@dataclass
class Tracked:
    """What is known of a live request.

    used      tokens that a load was ordered for; the request is `approximate` as soon as blended state may be in its blocks
    rekeyed   hash block from which on its blocks are private, None: none is
    loaded    what the worker said of the last load
    settled   no further load: it was loaded, it failed, or there is nothing to load
    generation in which the request came; after a reset its state is of no use (`generations`)
    repeats   it repeats a request to measure it (see `SchedulerSide.repeating`)
    """

    request: Any
    wish: Wish
    lookup: "Future[Found] | None"
    deadline: float
    found: Found | None = None
    settled: bool = False
    approximate: bool = False
    rekeyed: int | None = None
    used: int = 0
    loaded: Loaded | None = None
    reason: str = ""
    saved: bool = False
    inner: bool = False
    generation: int = 0
    repeats: bool = False

    def told(self) -> dict[str, Any]:
        """What the client is told."""
        found = Found("exact", level="inner") if self.inner else self.found or Found()
        used = self.used
        loaded = self.loaded or Loaded("", 0, 0.0)
        return {
            "method": found.method if used else "none",
            "level": found.level if used else "",
            "donor": found.donor if used else None,
            "score": found.score if used else None,
            "tokens_reused": max(0, used - loaded.computed),
            "tokens_recomputed": loaded.computed,
            "bytes_loaded": loaded.nbytes,
            "load_s": loaded.seconds,
            "approximate": self.approximate,
            "reason": self.reason,
            "prompt_key": found.key,
        }
