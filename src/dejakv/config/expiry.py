"""Settings of expiry: for how long what is stored may be used."""

from dataclasses import dataclass

from dejakv.settings import Seconds


@dataclass(frozen=True)
class LifetimeSettings:
    """For how long what is stored may be used, in the cache and in vLLM's connector.

    ttl  seconds for which an entry may be used, from the moment in which it was computed; 0: without a limit. A request may shorten
         it for what it leaves. An entry that is used does not live longer
    """

    ttl: Seconds = 0.0


@dataclass(frozen=True)
class ExpirySettings(LifetimeSettings):
    """The same for classes of entries; None: `ttl`.

    ttl_prompts  of exact state of prompts
    ttl_rows     of rows that blends computed; never longer than that of the prompts they were made from
    ttl_encoder  of encoder outputs
    ttl_fusion   of states of fusion modules
    """

    ttl_prompts: Seconds | None = None
    ttl_rows: Seconds | None = None
    ttl_encoder: Seconds | None = None
    ttl_fusion: Seconds | None = None

    def lifetime(self, own: float | None) -> float:
        """The limit of a class of entries: its own, or that of all."""
        return self.ttl if own is None else own
