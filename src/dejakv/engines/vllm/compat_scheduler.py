# pyright: reportMissingImports=false
"""The part of `compat` that acts on vLLM's scheduler: its budget, failed loads, and requests that nobody sent. Read for 0.32."""

import sys
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


def add_again(scheduler: Any, request: Any, request_id: str) -> None:
    """Adds a prompt to the scheduler once more, for one token that nobody waits for: vLLM's front drops outputs of requests that it
    does not know (`v1/engine/output_processor.py`)."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    scheduler.add_request(
        Request(
            request_id,
            list(request.prompt_token_ids),
            SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
            None,
            client_index=request.client_index,
            cache_salt=request.cache_salt,
            priority=sys.maxsize,
            block_hasher=request._block_hasher,
        )
    )


def abort(scheduler: Any, request_id: str) -> None:
    """Ends a request from outside."""
    from vllm.v1.request import RequestStatus

    scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)


def is_paused(scheduler: Any, engine: Any) -> bool:
    """Whether requests that wait are not begun (`v1/core/sched/interface.py`), or the engine waits for the last ones to end itself
    (`v1/engine/core.py`; an engine in its caller's process ends at once)."""
    from vllm.v1.core.sched.interface import PauseState

    is_running = getattr(engine, "is_running", lambda: True)
    return scheduler.pause_state != PauseState.UNPAUSED or not is_running()
