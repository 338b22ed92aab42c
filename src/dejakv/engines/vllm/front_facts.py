# pyright: reportMissingImports=false
"""What a front reads of the server behind it, from the application's state."""

from dataclasses import dataclass
from typing import Any

from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.errors import ConfigError


@dataclass(frozen=True)
class Served:
    """epoch     of the model as it was at the start
    priority  whether vLLM schedules by priority
    """

    epoch: str
    priority: bool = False


def served_by(app: Any) -> Served:
    """Of vLLM's application. Reads the weight files once.

    Raises: ConfigError where the connector blends for requests that ask for nothing: on routes that carry no wish nobody could
    bound it.
    """
    from dejakv.engines.vllm.fingerprint import server_epoch

    config = app.state.vllm_config
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == "DejaKVConnector":
        mode = ConnectorSettings.from_extra(transfer.kv_connector_extra_config).mode
        if mode != "exact":
            raise ConfigError(
                f"an error bound in the front and mode={mode!r} in the connector: give the connector mode exact and blend in its modes, and "
                'the front {"mode": "blend"} in DEJAKV_ADOPT'
            )
    return Served(server_epoch(config), str(config.scheduler_config.policy) == "priority")
