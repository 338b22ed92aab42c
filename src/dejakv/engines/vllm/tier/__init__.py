"""The store as a secondary tier of vLLM's own offloading, for exact reuse.

vLLM copies pages between the KV cache and host memory, and DejaKV stores them from there:

    --kv-transfer-config '{"kv_connector": "DejaKVOffloadingConnector",
                           "kv_connector_module_path": "dejakv.engines.vllm.tier",
                           "kv_role": "kv_both",
                           "kv_connector_extra_config": {
                               "spec_name": "TieringOffloadingSpec",
                               "cpu_bytes_to_use": 34359738368,
                               "secondary_tiers": [{"type": "DejaKVTier",
                                                    "module_path": "dejakv.engines.vllm.tier",
                                                    "store": "/var/lib/dejakv"}]}}'
"""

from dejakv.engines.vllm import upstream

# Before vLLM's modules: an ImportError would not say which version to install.
upstream.usable("tier")

from dejakv.engines.vllm.tier.connector import DejaKVOffloadingConnector  # noqa: E402
from dejakv.engines.vllm.tier.manager import DejaKVTier  # noqa: E402

__all__ = ["DejaKVOffloadingConnector", "DejaKVTier"]
