# pyright: reportMissingImports=false
"""Counters of the connector, on the server's `/metrics` through vLLM's own seam for connectors."""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from dejakv.engines.vllm.messages import LoadResult
from dejakv.engines.vllm.request import LookupResult


class ConnectorCounts:
    """What happened since the last `take`. Used in the engine loop alone. Keys are `name` or `name|label`."""

    def __init__(self) -> None:
        self._values: defaultdict[str, float] = defaultdict(float)
        self._asked = time.monotonic()

    def add(self, name: str, label: str = "", amount: float = 1) -> None:
        key = f"{name}|{short(label)}" if label else name
        self._values[key] += amount

    def looked_up(self, lookup_result: LookupResult) -> None:
        self.add("lookups", lookup_result.method if lookup_result.method != "none" else "miss")
        self.add("lookup_seconds", amount=lookup_result.seconds)
        if lookup_result.withheld:
            self.add("withheld", lookup_result.reason)

    def loaded(self, load_result: LoadResult) -> None:
        if load_result.problem:
            self.add("load_failures", load_result.problem)
            return
        self.add("loads")
        self.add("loaded_bytes", amount=load_result.nbytes)
        self.add("load_seconds", amount=load_result.seconds)
        self.add("loaded_donors", amount=len(load_result.donors))
        for why in load_result.left_out:
            self.add("donors_left_out", why)

    def absent(self, absences: Mapping[str, float]) -> None:
        """Counts the part of each absence (`Store.absences`) since the last call."""
        now = time.monotonic()
        for name, seconds in absences.items():
            # An absence may be older than the last call, which counted its part.
            if seconds:
                self.add(name, amount=min(seconds, now - self._asked))
        self._asked = now

    def take(self) -> dict[str, float]:
        """Return the counters and start again at zero."""
        values, self._values = dict(self._values), defaultdict(float)
        return values


def short(label: str) -> str:
    """Return a label cut at a colon, before its variable part: the number of series stays small."""
    return label.split(":")[0][:60]


METRICS: dict[str, tuple[str, str]] = {
    "lookups": ("Lookups by what they found (exact, blend, miss).", "found"),
    "lookup_seconds": ("Seconds spent in lookups, off the engine loop.", ""),
    "withheld": ("Blends that the certificate withheld, by reason.", "reason"),
    "loads": ("Stored states put into the KV cache.", ""),
    "loaded_bytes": ("Bytes of state put into the KV cache.", ""),
    "loaded_donors": ("Stored prompts whose state was put in; of one load several where it is blended.", ""),
    "donors_left_out": ("Donors that a blend was to take state from and did not, by reason.", "reason"),
    "load_seconds": ("Seconds from the order of a load to its end.", ""),
    "load_failures": ("Loads that ended without state, by reason; of clients that left, too.", "reason"),
    "blends_refused": ("Prompts that were not blended though they could have been, by reason.", "reason"),
    "saves": ("Prompts whose state was stored and confirmed.", ""),
    "rows_kept": ("Rows of blended prompts that were stored for later blends.", ""),
    "saves_dropped": ("Saves that were not made, by reason.", "reason"),
    "bucket_away_seconds": ("Seconds for which the bucket's service failed.", ""),
    "feed_away_seconds": ("Seconds for which the feed's service failed.", ""),
}


@dataclass
class DejaKVStats(KVConnectorStats):
    """Counters of one interval, as `ConnectorCounts.take` gives them."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "DejaKVStats":
        assert isinstance(other, DejaKVStats)
        merged = dict(self.data)
        for key, value in other.data.items():
            merged[key] = merged.get(key, 0) + value
        return DejaKVStats(merged)

    def reduce(self) -> dict[str, int | float]:
        return {key.replace("|", ":"): value for key, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data
