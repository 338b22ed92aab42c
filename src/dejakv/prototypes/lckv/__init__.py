"""Layer-condensed KV cache (LCKV): Llamas whose middle layers attend to the KV of the top one.

The method is that of arXiv 2405.10637.

    from dejakv.prototypes import lckv

    lckv.register()  # then AutoConfig and AutoModelForCausalLM know the model type "lckv-llama"

Importing this package loads neither torch nor transformers.
"""

from dejakv.prototypes.lckv.layout import KVLayout

__all__ = ["KVLayout", "register"]


def register() -> None:
    """Make `AutoConfig` and `AutoModelForCausalLM` load the model type `lckv-llama`.

    Repeated calls do nothing.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from dejakv.prototypes.lckv.configuration import LCKVLlamaConfig
    from dejakv.prototypes.lckv.modeling import LCKVLlamaForCausalLM

    AutoConfig.register(LCKVLlamaConfig.model_type, LCKVLlamaConfig, exist_ok=True)
    AutoModelForCausalLM.register(LCKVLlamaConfig, LCKVLlamaForCausalLM, exist_ok=True)
