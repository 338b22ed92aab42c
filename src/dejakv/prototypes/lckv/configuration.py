"""Configuration of LCKV models. Names of settings follow the checkpoints of whyNLP/LCKV."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from dejakv.prototypes.lckv.layout import KVLayout


@strict
class LCKVLlamaConfig(LlamaConfig):
    """Configuration of a Llama, and of its condensed layers.

    Attributes
    ----------
    kv_layout : str, optional
        The KV that each layer attends to (`KVLayout`); None: an ordinary Llama. Published
        checkpoints call it `layer_types`, a name that transformers 5 has for something else; both
        are read.
    forward_passes : int
        Iterations of a prefill or training step without gradient (m in the paper).
    backward_passes : int
        Iterations after them, with gradient in training (b).
    force_nodiag : bool
        Whether no layer of a token sees that token's own KV.
    """

    model_type = "lckv-llama"

    kv_layout: str | None = None
    forward_passes: int = 7
    backward_passes: int = 2
    force_nodiag: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        published = kwargs.pop("layer_types", None)
        # A setting of the published code for its tests.
        kwargs.pop("use_sequential", None)
        if self.kv_layout is None:
            self.kv_layout = published or "_".join(map(str, range(self.num_hidden_layers)))
        super().__post_init__(**kwargs)

    def validate_layout(self) -> None:
        """Check the layout and the passes. `@strict` calls this method.

        Raises
        ------
        ConfigError
            For a wrong layout.
        ValueError
            For wrong numbers of passes.
        """
        # Parsing raises for a wrong layout.
        self.layout  # noqa: B018
        if self.forward_passes < 0 or self.backward_passes < 1:
            raise ValueError(
                f"forward_passes={self.forward_passes} and backward_passes={self.backward_passes}: "
                "give at least 0 and 1 (the paper uses 7 and 2)"
            )

    @property
    def layout(self) -> KVLayout:
        """Layout of the layers, parsed from `kv_layout`."""
        return KVLayout.parse(self.kv_layout or "", self.num_hidden_layers)
