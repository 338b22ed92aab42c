"""The model type `lckv-llama`, as `dejakv.plugins` finds it."""

from dataclasses import dataclass
from typing import Any

from dejakv.models.layout import CacheLayout, ModelType
from dejakv.prototypes.lckv import register
from dejakv.prototypes.lckv.layout import KVLayout, layout_of


@dataclass(frozen=True)
class CondensedCacheLayout(CacheLayout):
    """Layers with KV of a layer-condensed model."""

    layout: KVLayout

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers that compute KV, ascending."""
        return self.layout.kv_layers

    def empty_cache(self) -> Any:
        """Return an empty cache that iterates until its layers settle.

        After a fixed number of iterations the state would depend on how the prompt was divided.
        """
        from dejakv.prototypes.lckv.cache import LCKVCache

        return LCKVCache(self.layout, settled=True)


class CondensedModelType(ModelType):
    """Layer-condensed Llamas."""

    def register(self) -> None:
        """Make `AutoConfig` and `AutoModelForCausalLM` load the type."""
        register()

    def layout_of(self, model: Any) -> CacheLayout | None:
        """Return the layout of a model with condensed layers; None without any."""
        layout = layout_of(model)
        return CondensedCacheLayout(layout) if layout is not None else None


LCKV_LLAMA = CondensedModelType()
