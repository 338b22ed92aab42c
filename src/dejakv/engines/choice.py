"""Which model, in which engine, loaded how: the settings that a run and a server have in common."""

from dataclasses import dataclass
from typing import Literal

from dejakv.settings import check_fields

EngineName = Literal["transformers", "vllm"]


@dataclass(frozen=True)
class ModelChoice:
    """A model, and how it is loaded.

    model              name from `dejakv models`, local folder, .gguf file or hub id
    engine             `transformers` or `vllm`
    dtype              `auto`, `fp32`, `bf16` or `fp16`
    device             `auto`, `cpu`, `cuda` or `cuda:N`; of the transformers engine
    attn               attention implementation of the transformers engine: `sdpa` or `eager`
    trust_remote_code  run Python code from the model's repository
    """

    model: str
    engine: EngineName = "transformers"
    dtype: str = "auto"
    device: str = "auto"
    attn: str = "sdpa"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_fields(self, flags=True)
