# pyright: reportMissingImports=false
"""The part of `compat` that runs a forward of the served model outside of vLLM's own: what of the model runner that takes.

Read for 0.32 in `v1/worker/gpu_model_runner.py` (`_build_attention_metadata`, `_preprocess`, `execute_model`), `forward_context.py`
and `model_executor/layers/attention`. The forward is not compiled: it has other shapes each time, and what is fused there
would pass the functions by in which a layer's K, V and queries are seen.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dejakv.engines.vllm.row_batch import Batch
from dejakv.errors import ModelError

NULL_BLOCK = 0
"""The block that vLLM gives to no request: padding refers to it, and nothing in it counts (`v1/core/block_pool.py`)."""


EMBEDDED_AT_ONCE = 4096
"""Tokens whose embeddings are looked up at once where all are."""


class RunnerInputs:
    """Forwards of one model runner, whose KV caches are of one group.

    runner  vLLM's model runner, either of the two that there are
    model   what to call
    names   of the attention layers

    Raises: ModelError for a model that takes more than tokens and positions.
    """

    def __init__(self, runner: Any, model: Any, names: Sequence[str]) -> None:
        self._runner = runner
        self._model = model
        self._names = names
        self._config = runner.vllm_config.model_config
        self._device = runner.device
        if getattr(runner, "lookback_token_ids", None) is not None:
            raise ModelError(
                f"blend is not possible: {type(model).__name__} looks at tokens before the rows that it computes"
            )
        on_cpu = self._device.type == "cpu"
        # FlashInfer and others keep buffers for so many sequences; the CPU backend keeps none.
        self.most_sequences: int | None = None if on_cpu else runner.vllm_config.scheduler_config.max_num_seqs

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings of tokens, `[k, hidden]`."""
        return self._model.embed_input_ids(ids.to(self._device))

    @torch.inference_mode()
    def embedding_table(self) -> torch.Tensor:
        """All of them, `[vocabulary, hidden]` in host memory."""
        ids = torch.arange(self._config.get_vocab_size())
        return torch.cat([self.embed(some).cpu() for some in ids.split(EMBEDDED_AT_ONCE)])

    def forward(self, batch: Batch) -> None:
        """Runs the model. The connectors' own hooks around each attention layer, which belong to a step, are not called."""
        from vllm.forward_context import set_forward_context

        positions = batch.positions.to(self._device)
        slots = batch.slots.to(self._device)
        metadata = self._attention_metadata(batch, positions, slots)
        ids: torch.Tensor | None = batch.ids.to(self._device)
        embeddings: torch.Tensor | None = None
        if self._config.supports_multimodal_inputs:  # such a model takes embeddings for text as well
            ids, embeddings = None, self._model.embed_input_ids(ids)
        if self._config.uses_mrope:  # text alone has the same position in all dimensions
            positions = positions.expand(self._config.mrope_num_dims, -1)
        context = set_forward_context(
            metadata,
            self._runner.vllm_config,
            num_tokens=len(batch.ids),
            slot_mapping=dict.fromkeys(self._names, slots),
            skip_compiled=True,
        )
        with _without_layer_hooks(), context:
            self._model(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=embeddings)

    def _attention_metadata(self, batch: Batch, positions: torch.Tensor, slots: torch.Tensor) -> dict[str, Any]:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        counts = batch.starts.diff()
        common = CommonAttentionMetadata(
            query_start_loc=batch.starts.to(self._device),
            query_start_loc_cpu=batch.starts,
            seq_lens=batch.lengths.to(self._device),
            seq_lens_cpu_upper_bound=batch.lengths,
            num_reqs=len(batch.lengths),
            num_actual_tokens=len(batch.ids),
            max_query_len=int(counts.max()),
            max_seq_len=int(batch.lengths.max()),
            block_table_tensor=batch.blocks.to(self._device),
            slot_mapping=slots,
            causal=True,
            is_prefilling=torch.ones(len(batch.lengths), dtype=torch.bool),
            positions=positions,
        )
        made: dict[str, Any] = {}
        for group in self._runner.attn_groups[0]:
            made.update(dict.fromkeys(group.layer_names, group.build_metadata(common)))
        return made


@contextmanager
def _without_layer_hooks() -> Generator[None]:
    """vLLM calls a connector around each attention layer while it has a step's orders (`kv_transfer_utils.py`): a wrapped or
    neighbouring connector would save rows that are no request's of this step."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group: Any = get_kv_transfer_group()
    orders, group._connector_metadata = group._connector_metadata, None
    try:
        yield
    finally:
        group._connector_metadata = orders
