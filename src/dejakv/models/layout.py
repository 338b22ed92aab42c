"""Types of models that packages add, and the layout of models whose layers share KV."""

from typing import Any

from dejakv import plugins


class CacheLayout:
    """Layers of a model that have KV, where not every layer has its own.

    Prompts of such a model need a cache of its own.
    """

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers that compute KV, ascending."""
        raise NotImplementedError

    def empty_cache(self) -> Any:
        """Return an empty cache, whose content must not depend on how a prompt is divided.

        Returns
        -------
        Cache
            A cache of transformers with one layer for each of `kv_layers`.
        """
        raise NotImplementedError


class ModelType:
    """A type of models, as an object of the group `dejakv.model_types` (`dejakv.plugins`)."""

    def register(self) -> None:
        """Make the type known to transformers. Repeated calls do nothing."""
        raise NotImplementedError

    def layout_of(self, model: Any) -> CacheLayout | None:
        """Return the layout of a model of this type.

        Parameters
        ----------
        model : PreTrainedModel
            A model of the type.

        Returns
        -------
        CacheLayout or None
            None (the default) for a model in which every layer has KV of its own.
        """
        return None


def layout_of(model: Any) -> CacheLayout | None:
    """Return the layout of a model whose layers share KV; None for every other model."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type not in plugins.names(plugins.MODEL_TYPES):
        return None
    return plugins.load(plugins.MODEL_TYPES, model_type).layout_of(model)
