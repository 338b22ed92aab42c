"""Which model, in which engine, loaded how: the settings that a run and a server have in common."""

from dataclasses import dataclass
from typing import Literal

from dejakv.settings import check_fields

EngineName = Literal["transformers", "vllm"]


@dataclass(frozen=True)
class ModelChoice:
    """A bundled or fetched model by name, a folder, or a hub id; `dtype` auto|fp32|bf16|fp16, `device` auto|cpu|cuda, `attn`
    sdpa|eager (the last two of the transformers engine alone)."""

    model: str
    engine: EngineName = "transformers"
    dtype: str = "auto"
    device: str = "auto"
    attn: str = "sdpa"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_fields(self, flags=True)
