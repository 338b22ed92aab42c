# pyright: reportMissingImports=false
"""Wrapping another exact connector: it is asked first, and ours when it has nothing.

Two connectors side by side (vLLM's MultiConnector) are not enough: an exact connector that keys by token ids or block hashes
would save a blended request's state as exact. Here it never sees such a request.
"""

import copy
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


def open_inner(
    settings: ConnectorSettings, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any
) -> "Inner | None":
    """The connector that `settings.inner` names, None if it names none. Raises ConfigError if it cannot be made."""
    if not settings.inner:
        return None
    config = copy.copy(vllm_config)
    outer = vllm_config.kv_transfer_config
    try:
        config.kv_transfer_config = KVTransferConfig(
            **{"engine_id": outer.engine_id, "kv_role": outer.kv_role, **settings.inner}
        )
        connector = KVConnectorFactory.get_connector_class(config.kv_transfer_config)(config, role, kv_cache_config)
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        raise ConfigError(f"the inner connector {settings.inner['kv_connector']!r} cannot be made: {error}") from error
    return Inner(connector, settings.inner_isolated)


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

    def plan_step(self, output: Any) -> Any:
        """The inner connector's orders for this step; requests that it may not see are taken out of what it is shown."""
        hidden = self._hidden(output)
        return self.connector.build_connector_meta(_without(output, hidden) if hidden else output)

    def finished(self, request: Any, block_ids: list[int]) -> bool:
        """True if the inner connector keeps the request's blocks for a while."""
        seen = request.request_id not in self._barred
        self._chosen.pop(request.request_id, None)
        self._barred.discard(request.request_id)
        if not seen:
            return False
        if supports_hma(self.connector):
            return bool(self.connector.request_finished_all_groups(request, (block_ids,))[0])  # pyright: ignore
        return bool(self.connector.request_finished(request, block_ids)[0])

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
