"""Makes the Auto classes of transformers know LCKV models."""


def register() -> None:
    """`AutoConfig` and `AutoModelForCausalLM` load the model type `lckv-llama` from now on. Repeated calls do nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from dejakv.models.lckv.configuration import LCKVLlamaConfig
    from dejakv.models.lckv.modeling import LCKVLlamaForCausalLM

    AutoConfig.register(LCKVLlamaConfig.model_type, LCKVLlamaConfig, exist_ok=True)
    AutoModelForCausalLM.register(LCKVLlamaConfig, LCKVLlamaForCausalLM, exist_ok=True)
