"""Every setting of the cache, checked when it is made. Each default stands once, in the class that its part of the work owns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dejakv.config.find import FindSettings
from dejakv.config.keep import KeepSettings
from dejakv.config.media import MediaSettings
from dejakv.config.reuse import ReuseSettings
from dejakv.settings import check_fields, from_mapping


@dataclass(frozen=True)
class SemanticCacheConfig(FindSettings, ReuseSettings, KeepSettings, MediaSettings):
    """Settings of a `HierarchicalCache`: see the classes it is made of."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.enable_fusion_cache is None:
            object.__setattr__(self, "enable_fusion_cache", bool(self.fusion_cache_dir or self.fusion_provider))
        self.check_costs()
        self.check_parts()
        self.check_layers()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SemanticCacheConfig":
        """A config from plain values (JSON, flags). Lists become tuples; an unknown name is an error that lists the known."""
        return from_mapping(cls, values, "the cache's settings")
