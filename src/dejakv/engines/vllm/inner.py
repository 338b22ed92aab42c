# pyright: reportMissingImports=false
"""Wrapping another exact connector: it is asked first, and ours when it has nothing.

Two connectors side by side (vLLM's MultiConnector) are not enough: an exact connector that keys by token ids or block hashes
would save a blended request's state as exact. Here it never sees such a request.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    supports_hma,
)

from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.errors import ConfigError


def inner_class(extra: Mapping[str, Any]) -> type[KVConnectorBase_V1] | None:
    """The class of the connector that `inner` in `kv_connector_extra_config` names, None if it names none.

    Raises: ConfigError for a name that vLLM does not know.
    """
    config = extra.get("inner")
    return _class_of(_config(config, "kv_both", None), config) if config else None


def inner_config(vllm_config: Any, extra: Mapping[str, Any]) -> tuple[type[KVConnectorBase_V1], Any] | None:
    """The class of the connector that `inner` names, and the configuration that it is made with; None if it names none.

    Raises: ConfigError for a name or fields that vLLM does not know.
    """
    inner = extra.get("inner")
    if not inner:
        return None
    config, outer = copy.copy(vllm_config), vllm_config.kv_transfer_config
    config.kv_transfer_config = _config(inner, outer.kv_role, outer.engine_id)
    return _class_of(config.kv_transfer_config, inner), config


def open_inner(
    settings: ConnectorSettings, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any
) -> "Inner | None":
    """The connector that `settings.inner` names, None if it names none. Raises ConfigError if it cannot be made."""
    found = inner_config(vllm_config, {"inner": settings.inner})
    if found is None:
        return None
    made, config = found
    try:
        return Inner(made(config, role, kv_cache_config), settings.inner_isolated)
    except _ERRORS as error:
        raise _unusable(settings.inner, error) from error


_ERRORS = (TypeError, ValueError, AttributeError, ImportError)


def _config(inner: Mapping[str, Any], role: str, engine_id: str | None) -> KVTransferConfig:
    try:
        return KVTransferConfig(**{"kv_role": role, "engine_id": engine_id, **inner})
    except _ERRORS as error:
        raise _unusable(inner, error) from error


def _class_of(config: KVTransferConfig, inner: Mapping[str, Any]) -> type[KVConnectorBase_V1]:
    try:
        return KVConnectorFactory.get_connector_class(config)
    except _ERRORS as error:
        raise _unusable(inner, error) from error


def _unusable(inner: Mapping[str, Any], error: Exception) -> ConfigError:
    return ConfigError(f"the inner connector {inner['kv_connector']!r} cannot be made: {error}")


class Inner:
    """One wrapped connector, on one side.

    isolated  it keys by cache_salt and LoRA itself; without that, requests that have either never reach it
    closed    it may hold state of other weights than the model's, so it sees no new request
    """

    def __init__(self, connector: KVConnectorBase_V1, isolated: bool) -> None:
        self.connector = connector
        self._isolated = isolated
        self.closed = False
        self._chosen: dict[str, int] = {}
        self._barred: set[str] = set()
        self._told: set[str] = set()

    # Scheduler side

    def admits(self, request: Any) -> bool:
        """Whether the inner connector may see this request."""
        if self.closed:
            return False
        foreign = not self._isolated and (request.cache_salt or request.lora_request is not None)
        return not foreign and request.request_id not in self._barred

    def bar(self, request_id: str) -> None:
        """Its state is approximate from now on, or belongs to a tenant that the inner connector does not know: hide it."""
        self._barred.add(request_id)

    def new_request(self, request: Any) -> None:
        if self.admits(request):
            self._told.add(request.request_id)
            self.connector.on_new_request(request)
        else:
            self.bar(request.request_id)

    def reset(self, clean: bool) -> None:
        """The weights may have changed. A connector that cannot forget what it holds is closed."""
        self.closed = self.connector.reset_cache() is not True or not clean

    def matched_tokens(self, request: Any, local: int) -> tuple[int | None, bool]:
        if not self.admits(request) or request.sampling_params.prompt_logprobs is not None:
            return 0, False
        tokens, later = self.connector.get_num_new_matched_tokens(request, local)
        if tokens is None:
            return None, False
        self._chosen[request.request_id] = max(0, tokens)
        return (tokens, later) if tokens > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, external: int) -> int:
        """Tokens of an allocation that are the inner connector's to load."""
        if not self.admits(request):
            return 0
        mine = external if self._chosen.get(request.request_id) == external and external > 0 else 0
        self.connector.update_state_after_alloc(request, blocks, mine)
        return mine

    def loads(self, request_id: str) -> bool:
        """Whether the state that is loaded for this request is the inner connector's."""
        return self._chosen.get(request_id, 0) > 0

    def plan_step(self, output: Any) -> Any:
        """The inner connector's orders for this step; requests that it may not see are taken out of what it is shown."""
        hidden = self._hidden(output)
        return self.connector.build_connector_meta(_without(output, hidden) if hidden else output)

    def finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the inner connector keeps the request's blocks for a while, and what it tells the client.

        One that it knew of and may not see any more has no blocks for it: it is to forget the request, and save nothing.
        """
        told, barred = request.request_id in self._told, request.request_id in self._barred
        self._chosen.pop(request.request_id, None)
        self._barred.discard(request.request_id)
        self._told.discard(request.request_id)
        if not told:
            return False, None
        blocks = [] if barred else block_ids
        if supports_hma(self.connector):
            held, params = self.connector.request_finished_all_groups(request, (blocks,))  # pyright: ignore
        else:
            held, params = self.connector.request_finished(request, blocks)
        return (False, None) if barred else (bool(held), params)

    def _hidden(self, output: Any) -> set[str]:
        return self._barred & set(output.num_scheduled_tokens)

    # Worker side

    def bind(self, plan: Any) -> None:
        self.connector.bind_connector_metadata(plan)

    def results(self, finished: set[str], ours: KVConnectorTransferResults) -> KVConnectorTransferResults:
        theirs = self.connector.get_transfer_results(finished)
        return KVConnectorTransferResults(
            ours.finished_sending | theirs.finished_sending,
            ours.finished_recving | theirs.finished_recving,
            ours.failed_recving | theirs.failed_recving,
        )


def _without(output: Any, hidden: set[str]) -> Any:
    cached = output.scheduled_cached_reqs
    kept = [index for index, request_id in enumerate(cached.req_ids) if request_id not in hidden]
    return replace(
        output,
        scheduled_new_reqs=[item for item in output.scheduled_new_reqs if item.req_id not in hidden],
        scheduled_cached_reqs=replace(
            cached,
            req_ids=[cached.req_ids[i] for i in kept],
            resumed_req_ids=set(cached.resumed_req_ids) - hidden,
            new_token_ids=[cached.new_token_ids[i] for i in kept] if cached.new_token_ids else cached.new_token_ids,
            new_block_ids=[cached.new_block_ids[i] for i in kept],
            all_token_ids={k: v for k, v in cached.all_token_ids.items() if k not in hidden},
            num_computed_tokens=[cached.num_computed_tokens[i] for i in kept],
            num_output_tokens=[cached.num_output_tokens[i] for i in kept],
        ),
        num_scheduled_tokens={k: v for k, v in output.num_scheduled_tokens.items() if k not in hidden},
        total_num_scheduled_tokens=sum(v for k, v in output.num_scheduled_tokens.items() if k not in hidden),
    )
