"""Layer-condensed KV cache (LCKV, arXiv 2405.10637): Llamas whose middle layers all attend to the KV of the top one.

    from dejakv.models import lckv

    lckv.register()  # then AutoConfig and AutoModelForCausalLM know the model type "lckv-llama"

Importing this package loads neither torch nor transformers.
"""

from dejakv.models.lckv.layout import KVLayout

__all__ = ["KVLayout", "register"]


def register() -> None:
    """`AutoConfig` and `AutoModelForCausalLM` load the model type `lckv-llama` from now on. Repeated calls do nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from dejakv.models.lckv.configuration import LCKVLlamaConfig
    from dejakv.models.lckv.modeling import LCKVLlamaForCausalLM

    AutoConfig.register(LCKVLlamaConfig.model_type, LCKVLlamaConfig, exist_ok=True)
    AutoModelForCausalLM.register(LCKVLlamaConfig, LCKVLlamaForCausalLM, exist_ok=True)
