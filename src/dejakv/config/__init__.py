"""Every setting of the cache, checked when it is made. Each default stands once, in the class that its part of the work owns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dejakv.config.expiry import ExpirySettings
from dejakv.config.find import FindSettings
from dejakv.config.keep import KeepSettings
from dejakv.config.media import MediaSettings
from dejakv.config.reuse import ReuseSettings
from dejakv.config.text import DEFAULT_ENCODER
from dejakv.errors import ConfigError
from dejakv.settings import check_fields, from_mapping
from dejakv.trust.differs import differs_of
from dejakv.trust.settings import TrustSettings


@dataclass(frozen=True)
class SemanticCacheConfig(FindSettings, ReuseSettings, KeepSettings, ExpirySettings, MediaSettings, TrustSettings):
    """Settings of a `HierarchicalCache`: see the classes it is made of."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.enable_fusion_cache is None:
            object.__setattr__(self, "enable_fusion_cache", bool(self.fusion_cache_dir or self.fusion_provider))
        if self.semantic_text is None:
            needed = self.reuse in ("adopt", "top_layer") or (self.reuse == "blend" and not self.copied_text)
            object.__setattr__(self, "semantic_text", needed or self.index_encoder != DEFAULT_ENCODER)
        self.check_method()
        self.check_costs()
        _ = self.parts  # raises where a partition has none
        self.check_layers()
        self.check_bound()

    def check_bound(self) -> None:
        """Raises ConfigError for groups or a way to differ that cannot be read, and for what no bound can hold for."""
        self.check_groups()
        differs_of(self.differs)
        if self.error_bound is not None and self.prune != "none":
            raise ConfigError(
                f"error_bound={self.error_bound} is a bound on reuse, and prune={self.prune} changes answers without any: leave one out"
            )
        if self.error_bound is not None and self.unsound:
            raise ConfigError(
                f"error_bound={self.error_bound} is for answers that are served, and unsound=True for study: leave one out"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SemanticCacheConfig":
        """A config from plain values (JSON, flags). Lists become tuples; an unknown name is an error that lists the known."""
        return from_mapping(cls, values, "the cache's settings")
