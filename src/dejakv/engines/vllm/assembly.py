# pyright: reportMissingImports=false
"""Puts the two sides of the connector together from a vLLM config. Whatever is wrong with the settings is said here."""

import math
from typing import Any

from dejakv.blend.sentences import sentence_ends
from dejakv.cache import HierarchicalCache
from dejakv.engines.vllm import compat
from dejakv.engines.vllm.adapters import Adapters
from dejakv.engines.vllm.bind import bound_runner
from dejakv.engines.vllm.blend import Blender
from dejakv.engines.vllm.counts import ConnectorCounts
from dejakv.engines.vllm.fingerprint import server_epoch
from dejakv.engines.vllm.lockstep import ALONE, Ranks
from dejakv.engines.vllm.long_saves import PartSize
from dejakv.engines.vllm.lookups import Lookups
from dejakv.engines.vllm.paged import PagedKV
from dejakv.engines.vllm.ranks import EveryRank, rank_count, settings_of_rank
from dejakv.engines.vllm.rotary import Rotary
from dejakv.engines.vllm.row_forward import RowForward
from dejakv.engines.vllm.saver import Saver
from dejakv.engines.vllm.scheduler import SchedulerSide
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.engines.vllm.stores import open_store
from dejakv.engines.vllm.worker import WorkerSide
from dejakv.errors import ConfigError
from dejakv.identity import BLOCK_TOKENS

_RUNTIME = "VLLM_ALLOW_RUNTIME_LORA_UPDATING lets other weights be loaded behind an adapter's id: unset it for reuse"


def make_scheduler_side(
    vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings, counts: ConnectorCounts
) -> SchedulerSide:
    """Raises ConfigError, StoreError or MissingExtraError."""
    base = server_epoch(vllm_config)
    adapters = Adapters(
        base,
        compat.adapters_applied(vllm_config),
        _RUNTIME if compat.adapters_change_at_runtime() else "",
        compat.adapters_leak(vllm_config),
    )
    ranks = rank_count(vllm_config)
    stores = [open_store(settings_of_rank(settings, rank, ranks), vllm_config) for rank in range(ranks)]
    store = stores[0] if ranks == 1 else EveryRank(stores)
    config = settings.cache_config()
    lookups = Lookups(HierarchicalCache(store, config=config), settings, adapters)
    budget = vllm_config.scheduler_config.max_num_batched_tokens
    tokens = compat.hash_block_tokens(kv_cache_config)
    size = part_size(settings_of_rank(settings, 0, ranks), kv_cache_config)
    return SchedulerSide(
        settings,
        lookups,
        tokens,
        counts,
        max_tokens=budget,
        ranks=ranks,
        size=size,
        arithmetic=compat.arithmetic(vllm_config),
        bitwise=compat.is_batch_invariant(),
    )


def part_size(settings: ConnectorSettings, kv_cache_config: Any) -> PartSize:
    """Which prompts one rank stores in parts: those whose copy is larger than `max_pending_bytes`. A part is half of that, since its
    state is put in order in memory of its own."""
    row = compat.bytes_per_token(kv_cache_config)
    align = math.lcm(compat.block_tokens(kv_cache_config), BLOCK_TOKENS)
    most = max(1, settings.max_bytes // row) if settings.max_bytes else 0
    tokens = settings.max_pending_bytes // 2 // row
    return PartSize(max(align, tokens) if settings.max_pending_bytes else 0, align, most)


def make_worker_side(vllm_config: Any, settings: ConnectorSettings) -> WorkerSide:
    """Raises ConfigError or StoreError."""
    settings = settings_of_rank(settings, compat.rank(), rank_count(vllm_config))
    store = open_store(settings, vllm_config, writing=True)
    return WorkerSide(
        store, Saver(store, settings.max_pending_bytes), settings.load_timeout_s, settings.max_pending_bytes
    )


def blender_for(vllm_config: Any, settings: ConnectorSettings, paged: PagedKV) -> Blender | None:
    """What blends with the worker's model; None if no request may ask for it.

    Raises: ConfigError if the worker was not handed over, ModelError if keys of the model cannot be moved.
    """
    if not settings.may_blend:
        return None
    runner = bound_runner(vllm_config)
    model = runner.get_model()
    if vllm_config.lora_config is not None:
        model = compat.without_adapters(model)
    rotary = Rotary.of(model, list(paged.layers.values()))
    forward = RowForward(runner, model, paged.layers, paged.block_tokens)
    ends = sentence_ends(tokenizer_of(vllm_config))
    return Blender(
        forward,
        rotary,
        paged,
        settings.blend_config(),
        vllm_config.model_config.max_model_len,
        vllm_config.scheduler_config.max_num_batched_tokens,
        ends,
        Ranks(compat.ranks_group()) if rank_count(vllm_config) > 1 else ALONE,
    )


def tokenizer_of(vllm_config: Any) -> Any:
    """The server's tokenizer. Raises ConfigError where it was told to have none."""
    from vllm.tokenizers import cached_tokenizer_from_config

    if vllm_config.model_config.skip_tokenizer_init:
        raise ConfigError(
            "blend looks for the ends of sentences and needs the tokenizer: run without --skip-tokenizer-init"
        )
    return cached_tokenizer_from_config(vllm_config.model_config)
