"""DejaKV inside vLLM: a KV connector, an encoder-cache connector, and prompt rewriting for `adopt`.

Exact reuse needs one flag:

    --kv-transfer-config '{"kv_connector": "DejaKVConnector",
                           "kv_connector_module_path": "dejakv.engines.vllm.connector", "kv_role": "kv_both",
                           "kv_connector_extra_config": {"store_dir": "/var/lib/dejakv"}}'

docs/vllm.md has all keys. Importing this package imports neither vLLM nor torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dejakv.engines.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]


def __getattr__(name: str) -> Any:
    if name == "VLLMEngine":
        from dejakv.engines.vllm.engine import VLLMEngine

        return VLLMEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
