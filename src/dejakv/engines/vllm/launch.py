# pyright: reportMissingImports=false
"""The arguments that put DejaKV's connectors into a vLLM: for `vllm.LLM(...)` and as command-line flags."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dejakv.engines.vllm.bind import EXTENSION
from dejakv.engines.vllm.settings import ConnectorSettings

KV_CONNECTOR = {
    "kv_connector": "DejaKVConnector",
    "kv_connector_module_path": "dejakv.engines.vllm.connector",
    "kv_role": "kv_both",
}
ENCODER_CONNECTOR = {
    "ec_connector": "DejaKVEncoderConnector",
    "ec_connector_module_path": "dejakv.engines.vllm.encoder_connector",
    "ec_role": "ec_both",
}


def extra_config(settings: ConnectorSettings) -> dict[str, Any]:
    """What differs from the defaults, as `kv_connector_extra_config` takes it."""
    plain = ConnectorSettings()
    values = asdict(settings)
    return {item.name: values[item.name] for item in fields(settings) if values[item.name] != getattr(plain, item.name)}


def server_flags(settings: ConnectorSettings, encoder_dir: str | None = None) -> list[str]:
    """Flags for `vllm serve`."""
    flags = ["--kv-transfer-config", json.dumps({**KV_CONNECTOR, "kv_connector_extra_config": extra_config(settings)})]
    if settings.may_blend:
        flags += ["--worker-extension-cls", EXTENSION]
    if encoder_dir is not None:
        extra = {"ec_connector_extra_config": {"store_dir": encoder_dir}}
        flags += ["--ec-transfer-config", json.dumps({**ENCODER_CONNECTOR, **extra})]
    return flags


def transfer_configs(settings: ConnectorSettings, folder: str) -> Callable[[str, bool], dict[str, Any]]:
    """Arguments for `vllm.LLM`, for a model and whether its code is trusted; the encoder connector where it has pictures."""

    def arguments(model: str, trust_remote_code: bool) -> dict[str, Any]:
        from transformers import AutoConfig
        from vllm.config import ECTransferConfig, KVTransferConfig

        made: dict[str, Any] = {
            "kv_transfer_config": KVTransferConfig(**KV_CONNECTOR, kv_connector_extra_config=extra_config(settings)),
            "worker_extension_cls": EXTENSION,
        }
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        if hasattr(config, "vision_config"):
            extra = {"store_dir": str(Path(folder) / "encoder")}
            made["ec_transfer_config"] = ECTransferConfig(**ENCODER_CONNECTOR, ec_connector_extra_config=extra)
        return made

    return arguments


def checkpoint_dtype(model: str, trust_remote_code: bool) -> str:
    """`fp32` for a checkpoint in float32, else `auto`: vLLM's own `auto` halves float32, and a comparison of engines would
    then be one of precisions too."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    dtypes = (getattr(part, "dtype", None) for part in (config, config.get_text_config()))
    return "fp32" if "float32" in str(next((dtype for dtype in dtypes if dtype is not None), "")) else "auto"
