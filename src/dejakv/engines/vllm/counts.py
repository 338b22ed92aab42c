"""Counters of one connector side, handed to vLLM between steps."""

import threading
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dejakv.engines.vllm.found import LookupResult
    from dejakv.engines.vllm.messages import LoadResult


class ConnectorCounts:
    """What happened since the last `take`. Thread-safe. Keys are `name` or `name|label`."""

    def __init__(self) -> None:
        self._values: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, name: str, label: str = "", amount: float = 1) -> None:
        key = f"{name}|{_short(label)}" if label else name
        with self._lock:
            self._values[key] += amount

    def looked_up(self, found: "LookupResult") -> None:
        self.add("lookups", found.method if found.method != "none" else "miss")
        self.add("lookup_seconds", amount=found.seconds)

    def loaded(self, loaded: "LoadResult") -> None:
        if loaded.problem:
            self.add("load_failures", loaded.problem)
            return
        self.add("loads")
        self.add("loaded_bytes", amount=loaded.nbytes)
        self.add("load_seconds", amount=loaded.seconds)
        self.add("loaded_donors", amount=len(loaded.donors))
        for why in loaded.left_out:
            self.add("donors_left_out", why)

    def take(self) -> dict[str, float]:
        """The counters, which start at nothing again."""
        with self._lock:
            values, self._values = dict(self._values), defaultdict(float)
        return values


def _short(label: str) -> str:
    """A label without what differs from case to case (after a colon), so that the number of series stays small."""
    return label.split(":")[0][:60]
