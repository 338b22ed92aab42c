"""Fields of a model's configuration, each of which may be missing or raise when it is read.

A recurrent model has no heads; a model whose layers differ refuses to name one value for all of
them.
"""

from typing import Any


def setting(config: Any, name: str) -> Any:
    """Return a field; None for one that is missing or raises."""
    try:
        return getattr(config, name, None)
    # The configuration's own code may raise anything.
    except Exception:
        return None


def text_config(model: Any) -> Any:
    """Return the language model's part of a configuration; the whole if it has no readable part."""
    try:
        return model.config.get_text_config(decoder=True)
    # As above.
    except Exception:
        return model.config


def text_setting(model: Any, name: str) -> Any:
    """Return a field of the language model's configuration; None if it is missing or raises."""
    return setting(text_config(model), name)
