# pyright: reportMissingImports=false
"""Blend from named donors: what `VLLMEngine` asks of the connector in its own process, and what that says it did.

The pipeline finds the donors, with the levels, guards and planner of every engine; the connector blends. Their ids of one
prompt differ, since the connector knows the partition as a digest of the `cache_salt`; the one follows from the other.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dejakv.engines.base import Completion, Prepared
from dejakv.engines.vllm.keys import partition_of
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.identity import exact_key
from dejakv.reuse.blend import BlendConfig, BlendReport
from dejakv.store.base import Chunk, ChunkMeta


def why_not(
    prepared: Prepared, donors: Sequence[Chunk], settings: ConnectorSettings, epoch: str, config: BlendConfig
) -> str:
    """Why this prompt cannot be blended, as far as it is known before it is run; empty if it may be."""
    if not settings.may_blend:
        return "this vLLM was started without blend: open it with modes=('off', 'exact', 'blend') or --reuse blend"
    if prepared.spans or any(chunk.meta.spans for chunk in donors):
        return "blend is for prompts without media"
    if any(chunk.meta.epoch not in ("", epoch) for chunk in donors):
        return "a donor's state is of another model"
    return config.varying()


def blend_as(asked: BlendConfig | None) -> None:
    """Has the connector of this process blend the next request in this way, if it is to be blended. Nothing else runs beside it."""
    if asked is not None:
        worker_side().blender.config = asked


def worker_side() -> Any:
    """The worker's side of the connector in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_side


def wish_for(donors: Sequence[ChunkMeta], salt: str, epoch: str) -> dict[str, Any]:
    """`kv_transfer_params.dejakv` of a request under `salt` that is to be blended from these donors (without media)."""
    partition = partition_of(salt)
    return {"mode": "blend", "donors": [exact_key(partition, epoch, donor.token_ids, ()) for donor in donors]}


def with_report(completion: Completion) -> Completion:
    """The completion with the `BlendReport` of what the connector says: `details["vllm"]`."""
    told = completion.details["vllm"]
    tokens = completion.prompt_tokens
    if told.get("method") == "blend":
        report = BlendReport(tokens, computed=completion.computed_tokens)
    else:
        report = BlendReport(tokens, reason=told.get("reason") or "the connector said nothing of this request")
    return replace(completion, details={**completion.details, "blend": report})
