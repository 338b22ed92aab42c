# pyright: reportMissingImports=false
"""The part of `compat` that acts on vLLM's scheduler: its budget and failed loads. Read for 0.32."""

from typing import Any


def recompute_failed_loads(scheduler: Any) -> None:
    """A state that cannot be read must cost a recomputation, never the request (`v1/core/sched/scheduler.py` reads the
    policy right after it made the connector; vLLM's default is to fail the request)."""
    scheduler.vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"


def fail_loads(scheduler: Any, request_ids: set[str]) -> None:
    """Makes vLLM recompute what is being loaded, or was loaded and not scheduled since, as after a load that failed."""
    scheduler._handle_failed_recving(request_ids)


def leave_room(scheduler: Any, tokens: int) -> None:
    """Keeps so many tokens of the next steps' budget free, but for those that running requests need to go on decoding
    (`v1/core/sched/scheduler.py` reads the attribute at the beginning of each step). A prompt that is not computed in chunks needs the
    whole budget, so that none is kept free there."""
    config = scheduler.scheduler_config
    whole = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    most = whole - config.max_num_seqs if config.enable_chunked_prefill else 0
    scheduler.max_num_scheduled_tokens = whole - max(0, min(tokens, most))
