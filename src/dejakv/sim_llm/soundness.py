"""For which models top-layer reuse is sound, and why not for others."""

from typing import Any

from dejakv.errors import ModelError
from dejakv.models.lckv.layout import KVLayout

REASON = (
    "in an ordinary model every layer attends to its own KV. A prompt that skips the layers below the top leaves them empty, "
    "so that generated tokens do not see it there (docs/sim-llm.md has the measured answers)"
)


def layout_of(model: Any) -> KVLayout | None:
    """The layout of a model whose condensed layers make the reuse sound; None for every other model."""
    layout = getattr(getattr(model, "model", None), "layout", None)
    return layout if isinstance(layout, KVLayout) and layout.loop else None


def check_sound(model: Any, unsound: bool) -> None:
    """Raises: ModelError for an ordinary model, unless `unsound` allows it for study."""
    if layout_of(model) is None and not unsound:
        raise ModelError(
            f"{type(model).__name__} cannot take the top layer's KV of a similar task: {REASON}. Use a layer-condensed model "
            "(docs-lckv is bundled), or blend for this one; unsound=True allows it for study and labels every output"
        )
