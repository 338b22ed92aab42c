"""Forward pre-hooks on the decoder layers. They do nothing unless the cache that came along is a pending BlendCache."""

from typing import Any

from torch import nn

from dejakv.engines.transformers.blend_cache import BlendCache
from dejakv.engines.transformers.blend_seams import Seams

_HOOKS = "_dejakv_blend_hooks"


def install(model: nn.Module, seams: Seams) -> None:
    """Puts the hooks on, once. No class, function or method of the model is replaced."""
    if getattr(model, _HOOKS, None):
        return
    handles = []
    for index, layer in enumerate(seams.layers):

        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], index: int = index) -> Any:
            cache = kwargs.get("past_key_values")
            if not isinstance(cache, BlendCache) or not cache.pending:
                return None
            hidden = args[0] if args else kwargs["hidden_states"]
            hidden, made = cache.enter(index, module, hidden, kwargs)
            if args:
                return (hidden, *args[1:]), made
            return (), {**made, "hidden_states": hidden}

        handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
    object.__setattr__(model, _HOOKS, handles)


def remove(model: nn.Module) -> None:
    """Takes the hooks off again."""
    for handle in getattr(model, _HOOKS, None) or []:
        handle.remove()
    object.__setattr__(model, _HOOKS, None)
