"""DejaKV inside vLLM: a KV connector and an encoder-cache connector.

Exact reuse needs one flag:

    --kv-transfer-config '{"kv_connector": "DejaKVConnector",
                           "kv_connector_module_path": "dejakv.engines.vllm.connector",
                           "kv_role": "kv_both",
                           "kv_connector_extra_config": {"store": "/var/lib/dejakv"}}'

docs/reference/settings.md has all keys. Importing this package imports neither vLLM nor torch.
"""
