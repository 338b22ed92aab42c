"""Layer-condensed KV cache (LCKV, arXiv 2405.10637): Llamas whose middle layers all attend to the KV of the top one.

    from dejakv.models import lckv

    lckv.register()  # then AutoConfig and AutoModelForCausalLM know the model type "lckv-llama"

Importing this package loads neither torch nor transformers.
"""

from dejakv.models.lckv.layout import KVLayout
from dejakv.models.lckv.register import register

__all__ = ["KVLayout", "register"]
