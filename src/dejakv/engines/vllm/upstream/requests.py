# pyright: reportMissingImports=false
"""What a request of vLLM tells, and where it keeps recurrent state."""

import re
from collections.abc import Mapping
from typing import Any


def shows_label(request: Any) -> bool:
    """Tell whether the client's answer contains the connector's parameters for this request.

    vLLM leaves them out in streams (`DELTA`), for the second and later prompts of one call
    (`cmpl-...-1`), and for the beams of its beam search. A program that steps the engine itself has
    the parameters in each result.
    """
    params = request.sampling_params
    kind = getattr(params, "output_kind", None)

    # `LLM.beam_search` numbers its steps like any request. Nobody else asks for one token
    # without a copy of the parameters.
    beam_step = (
        getattr(params, "skip_clone", False) and params.max_tokens == 1 and bool(params.logprobs)
    )
    return (
        getattr(kind, "name", "DELTA") != "DELTA"
        and not beam_step
        and _WITHOUT_LABEL.search(request.request_id) is None
    )


def sibling_of(request_id: str) -> str:
    """Return the request whose sample this is (`n` above 1: `0_ID`, `1_ID`, ...), else "".

    The samples' answers are given out together, with the parameters of the one that ends last.
    """
    number, underscore, parent = request_id.partition("_")
    return parent if underscore and number.isdecimal() else ""


_WITHOUT_LABEL = re.compile(
    r"^(?:\d+_)?cmpl-.*-[1-9]\d*(?:-[0-9a-f]{8})?$|-beam-\d+(?:-[0-9a-f]{8})?$"
)


def was_aborted(request: Any) -> bool:
    """Tell whether a finished request was ended from outside.

    A pause ends all requests and resets the prefix cache at once, so their blocks may not be held
    for a copy (`v1/engine/core.py`).
    """
    from vllm.v1.request import RequestStatus

    return request.status == RequestStatus.FINISHED_ABORTED


def boundary_states(output: Any) -> Mapping[str, list[tuple[int, int, int]]]:
    """Return the recurrent states that a step leaves at ends of blocks, by request.

    A request's table does not tell where they are, since vLLM moves and drops states
    (`v1/core/kv_cache_manager.py`).

    Returns
    -------
    Mapping[str, list[tuple[int, int, int]]]
        KV cache group, block, and number of the tokens before the state.
    """
    block_state = output.kv_connector_block_state
    return {} if block_state is None else block_state.boundary_state_offloads


def keep_state_at(request: Any, tokens: int) -> None:
    """Let vLLM end a step behind so many tokens, and keep the recurrent state there.

    vLLM does so itself where its own prefix cache sees prompts part.
    """
    request.shared_prefix_boundary = max(request.shared_prefix_boundary, tokens)


def event_extra_keys(request: Any, blocks: int, tokens: int) -> list[Any] | None:
    """Return what the hashes of a request's first blocks were made of beside tokens.

    Parameters
    ----------
    request : vllm.v1.request.Request
        The request.
    blocks : int
        Number of blocks.
    tokens : int
        Tokens of a block.
    """
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

    keys: list[Any] = []
    medium = 0
    for first in range(0, blocks * tokens, tokens):
        block_keys, medium = generate_block_hash_extra_keys(request, first, first + tokens, medium)
        keys.append(block_keys)
    return to_event_extra_keys(keys)
