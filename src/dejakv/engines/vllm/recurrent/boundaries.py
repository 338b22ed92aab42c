"""Ends of blocks behind which a prompt's recurrent state is stored and taken up.

vLLM keeps that state where a step ends with a block (`mamba_cache_mode` "align"). A prompt's last
such end is stored, and the end of what the store had of it, where prompts were seen to part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dejakv.cache import describe_snapshot
from dejakv.decide.plan import Decision
from dejakv.engines.base import NO_SNAPSHOT, Prepared
from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.request import LookupResult
from dejakv.identity import MediumSpan, exact_key
from dejakv.store.base import StateInfo
from dejakv.store.prefix_keys import PrefixKeys, stored_snapshots
from dejakv.store.store import Store

BoundaryStates = Mapping[int, tuple[tuple[int, int], ...]]
"""By number of tokens: KV cache group and block of each state that a step leaves behind them."""


def unserved(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return why no state of a model with recurrent layers can be stored; empty if it can.

    Also empty for a model without such layers.
    """
    if not upstream.recurrent_groups(kv_cache_config):
        return ""
    if not upstream.is_tested():
        return f"recurrent layers were not tested with vLLM {upstream.vllm_version()}"
    if not upstream.keeps_boundary_states(vllm_config):
        return (
            "the model has recurrent layers, whose state vLLM keeps at ends of blocks with "
            "--enable-prefix-caching alone"
        )
    if vllm_config.speculative_config is not None:
        return "not shown: recurrent layers beside speculative decoding"
    if upstream.replays_inputs(vllm_config):
        return "not shown: recurrent layers whose latest inputs are kept beside the state"
    if len({group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}) != 1:
        return "not shown: recurrent layers with blocks of several sizes"
    return ""


def boundary_states(
    output: Any, groups: Sequence[int], block_tokens: int
) -> dict[str, BoundaryStates]:
    """Return the recurrent states that a step leaves at ends of blocks, by request.

    Parameters
    ----------
    output : SchedulerOutput
        The step as vLLM's scheduler has planned it.
    groups : Sequence[int]
        KV cache groups of recurrent layers. Only states of all of them are of use.
    block_tokens : int
        Tokens of a block.
    """
    states: dict[str, BoundaryStates] = {}
    for name, offers in upstream.boundary_states(output).items():
        blocks: dict[int, dict[int, int]] = {}
        for group, block, tokens in offers:
            if tokens % block_tokens == 0:
                blocks.setdefault(tokens, {})[group] = block
        whole = {
            tokens: tuple((group, found[group]) for group in groups)
            for tokens, found in blocks.items()
            if all(group in found for group in groups)
        }
        if whole:
            states[name] = whole
    return states


def last_boundary(tokens: int, spans: Sequence[MediumSpan], block_tokens: int) -> int:
    """Return the last end of a block within a prompt's first `tokens` tokens, outside of media."""
    stop = tokens // block_tokens * block_tokens
    for span in sorted(spans, key=lambda each: -each.start):
        if span.start < stop < span.start + span.length:
            stop = span.start // block_tokens * block_tokens
    return stop


def at_snapshot(
    lookup_result: LookupResult,
    prepared: Prepared,
    decision: Decision,
    store: Store,
    block_tokens: int,
) -> LookupResult:
    """End an exact hit where the recurrent state is stored, and say what is to be stored.

    Parameters
    ----------
    lookup_result : LookupResult
        What to load of the prompt's KV entries.
    prepared : Prepared
        The prompt.
    decision : Decision
        The cache's decision, with the stored prefix.
    store : Store
        The store with the snapshots.
    block_tokens : int
        Tokens of a block.
    """
    entry, spans, prefix = decision.entry, prepared.spans, decision.donor_search.prefix
    # The last token is computed in any case, and a state cannot be taken up before its end.
    longest = len(prepared.token_ids) - 1
    kv_tokens = 0
    if prefix is not None:
        kv_tokens = last_boundary(min(prefix[0].tokens, longest), spans, block_tokens)

    keys = PrefixKeys(entry.partition, entry.epoch, prepared.token_ids, spans)
    stored_ids = store.snapshots(entry.partition, entry.epoch) if kv_tokens else frozenset[str]()
    ends = range(block_tokens, kv_tokens + 1, block_tokens)
    start, snapshot = next(stored_snapshots(keys, stored_ids, ends), (0, ""))

    end = last_boundary(longest, spans, block_tokens)
    # Here the prompt parts from a stored one, as the next ones may.
    places = [place for place in sorted({kv_tokens, end}) if start < place]
    kept: StateInfo | None = None
    if places:
        # State behind the last end of a block cannot be taken up.
        token_ids = entry.token_ids[:end]
        spans_kept = tuple(span for span in spans if span.start + span.length <= end)
        id = exact_key(
            entry.partition, entry.epoch, token_ids, [span.digest for span in spans_kept]
        )
        kept = replace(entry, id=id, token_ids=token_ids, spans=spans_kept)
    befores = [start, *places]
    snapshots = {
        place: describe_snapshot(kept, place, keys.prefix_key(place), place - before)
        for before, place in zip(befores, places, strict=False)
        if kept is not None
    }

    result = replace(lookup_result, kv_tokens=kv_tokens, snapshots=snapshots, save=kept)
    if result.method != "exact":
        return result
    if snapshot:
        return replace(result, tokens=start, snapshot=snapshot)
    return replace(
        result, method="none", donors=(), tokens=0, reason=NO_SNAPSHOT if kv_tokens else ""
    )
