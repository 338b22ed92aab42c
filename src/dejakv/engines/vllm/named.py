# pyright: reportMissingImports=false
"""Blend from named donors: what `VLLMEngine` asks of the connector in its own process, and what that says it did.

The pipeline finds the donors, with the levels, guards and planner of every engine; the connector blends. Their ids of one
prompt differ, since the connector knows the partition as a digest of the `cache_salt`; the one follows from the other.
"""

import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dejakv.engines.base import NO_STATE, Completion, ComputedRows, Prepared
from dejakv.engines.vllm.keys import partition_of
from dejakv.engines.vllm.settings import ConnectorSettings
from dejakv.identity import exact_key
from dejakv.reuse.blend import BlendConfig, BlendReport
from dejakv.store.base import ROWS, Chunk, ChunkMeta, Tensor
from dejakv.store.lineage import PROMPT

CAPTURE_TIMEOUT_S = 10.0
"""Seconds for which a state is waited for that the connector is storing."""


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


@dataclass(frozen=True)
class FromDonors:
    """A prompt that is to be blended from named donors.

    donors  stored prompts, and new text of blended ones
    salt    under which the connector has them
    kept    what the connector calls new text, by the salt, the key of its prompt and its place there; `completed` adds to it
    """

    prepared: Prepared
    donors: Sequence[ChunkMeta]
    salt: str
    epoch: str
    kept: MutableMapping[tuple[str, str, int], str]

    @cached_property
    def wish(self) -> dict[str, Any]:
        """`kv_transfer_params.dejakv` of the request."""
        return {"mode": "blend", "donors": [self._id_of(donor) for donor in self.donors]}

    def completed(self, completion: Completion) -> Completion:
        """The completion with the `BlendReport` of what the connector says (`details["vllm"]`), and what later blends may take."""
        told, tokens = completion.details["vllm"], completion.prompt_tokens
        if told.get("method") != "blend":
            report = BlendReport(tokens, reason=told.get("reason") or "the connector said nothing of this request")
        else:
            report = BlendReport(tokens, computed=completion.computed_tokens)
        return replace(completion, rows=self._rows(told), details={**completion.details, "blend": report})

    def _rows(self, told: dict[str, Any]) -> ComputedRows | None:
        kept = told.get("kept")
        if not kept:
            return None
        request, ids = self.prepared.request, self.prepared.token_ids
        prompt = exact_key(request.partition, self.prepared.epoch, ids, ())
        self.kept.update({(self.salt, prompt, first): id for first, _, id in kept["runs"]})
        ours = dict(zip(self.wish["donors"], (donor.id for donor in self.donors), strict=True))
        names = {first: id for first, _, id in kept["runs"]}
        return ComputedRows(
            tuple((first, stop) for first, stop, _ in kept["runs"]),
            tuple(ours[id] for id in kept["donors"]),
            kept["generation"],
            lambda first, _: stored(names[first]),
        )

    def _id_of(self, donor: ChunkMeta) -> str:
        if donor.kind == ROWS:
            return self.kept.get((self.salt, donor.metadata[PROMPT], donor.position), donor.id)
        return exact_key(partition_of(self.salt), self.epoch, donor.token_ids, ())


def stored(id: str) -> Tensor | None:
    """Says that the connector has stored a state, once it has; None if it does not."""
    side = worker_side()
    deadline = time.monotonic() + CAPTURE_TIMEOUT_S
    while time.monotonic() < deadline and side.saver.flush(CAPTURE_TIMEOUT_S):
        if side.store.meta(id) is not None:
            return NO_STATE
        time.sleep(0.01)
    return None
