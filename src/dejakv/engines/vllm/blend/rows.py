"""One ordinary forward of the served model over chosen rows of prompts whose KV lies in vLLM's blocks.

The rows are sequences of the attention metadata (`RowBatch`). All rows' K and V of a layer are written before the layer attends, so a
row sees the fresh state of those before it. Any model, weight format and attention backend that vLLM runs in this way can be
used; nothing here knows its layers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dejakv.blend.slices import contiguous
from dejakv.engines.vllm import upstream
from dejakv.errors import ModelError


@dataclass(frozen=True)
class PromptRows:
    """Rows of one prompt.

    ids        their tokens `[k]`
    places     where they are in the prompt `[k]`, ascending
    block_ids  the prompt's blocks; no row lies behind them
    shift      what the model is told to add to the places
    """

    ids: torch.Tensor
    places: torch.Tensor
    block_ids: Sequence[int]
    shift: int = 0

    @property
    def runs(self) -> int:
        return len(contiguous(self.places.cpu().numpy()))


@dataclass(frozen=True)
class RowBatch:
    """Input of a forward, on the host but for `of_prompt`. Short runs come first: backends that treat single rows as decoding expect that.

    ids, positions, slots  `[tokens]`
    starts, lengths        of the sequences: `[sequences + 1]` and `[sequences]`, int32
    blocks                 `[sequences, most blocks]` int32
    of_prompt              which of the tokens are each prompt's rows, in the order of the rows
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor
    of_prompt: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, prompts: Sequence[PromptRows], block_tokens: int) -> "RowBatch":
        places = np.concatenate([rows.places.cpu().numpy() for rows in prompts])
        prompt = np.repeat(np.arange(len(prompts)), [len(rows.places) for rows in prompts])
        tables = np.zeros((len(prompts), max(len(rows.block_ids) for rows in prompts)), dtype=np.int64)
        for number, rows in enumerate(prompts):
            tables[number, : len(rows.block_ids)] = rows.block_ids

        bounds = np.array(contiguous(places, prompt))
        sizes = bounds[:, 1] - bounds[:, 0]
        run_order = np.argsort(sizes, kind="stable")
        token_order = np.argsort(
            np.repeat(sizes, sizes), kind="stable"
        )  # runs of one size keep their order, and stay whole

        sorted_places, sorted_prompts = places[token_order], prompt[token_order]
        shifts = np.array([rows.shift for rows in prompts])
        # A sequence reaches back to the prompt's first token: its length is its last place and 1.
        ends = bounds[run_order, 1] - 1
        return cls(
            torch.cat([rows.ids.cpu() for rows in prompts])[torch.from_numpy(token_order)],
            torch.from_numpy(sorted_places + shifts[sorted_prompts]),
            torch.from_numpy(
                tables[sorted_prompts, sorted_places // block_tokens] * block_tokens + sorted_places % block_tokens
            ),
            torch.from_numpy(np.append(0, sizes[run_order].cumsum()).astype(np.int32)),
            torch.from_numpy((places[ends] + 1).astype(np.int32)),
            torch.from_numpy(tables[prompt[ends]].astype(np.int32)),
            tuple(
                torch.from_numpy(token_order.argsort()[prompt == number]).to(rows.places.device)
                for number, rows in enumerate(prompts)
            ),
        )


NULL_BLOCK = 0
"""vLLM's block for padding, never a request's; its content does not count (`v1/core/block_pool.py`)."""


EMBEDDED_AT_ONCE = 4096
"""Tokens whose embeddings are looked up at once where all are."""


More = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""K (rotated) and V `[kv_heads, n, head_dim]` of other rows, and their slots `[n]`."""
Written = Callable[[int, int, torch.Tensor, torch.Tensor], "More | None"]
"""Gets the number of a layer and of a prompt, and fresh K and V `[kv_heads, k, head_dim]` as they are written; returns more to write."""
Asked = Callable[[int, int, torch.Tensor], None]
"""Gets the number of a layer and of a prompt, and the rotated queries `[k, heads, head_dim]`, once K and V are written."""


class _AllWritten(Exception):
    """The last layer's K and V are written; what the model would make of them is not needed."""


class RowForward:
    """Forwards of one worker's model, whose KV caches are of one group.

    runner     vLLM's model runner, either of the two that there are
    model      what to call: the runner's model, without its adapters
    layers     attention layers by name, in order
    most_runs  contiguous runs of rows that a forward takes, None: any number

    Raises: ModelError for a backend that it cannot run, or a model that takes more than tokens and positions.
    """

    def __init__(self, runner: Any, model: Any, layers: Mapping[str, Any], block_tokens: int) -> None:
        why = upstream.no_forward(runner, model, layers)
        if why:
            raise ModelError(f"blend is not possible: {why}")
        self._runner = runner
        self._model = model
        self._layers = layers
        self._block_tokens = block_tokens
        self._config = runner.vllm_config.model_config
        self._device = runner.device

        on_cpu = self._device.type == "cpu"
        # FlashInfer and others keep buffers for so many sequences; the CPU backend keeps none.
        self.most_runs: int | None = None if on_cpu else runner.vllm_config.scheduler_config.max_num_seqs

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings of tokens, `[k, hidden]`."""
        return self._model.embed_input_ids(ids.to(self._device))

    @torch.inference_mode()
    def embedding_table(self) -> torch.Tensor:
        """All input embeddings, `[vocabulary, hidden]` in host memory. Of several ranks all must ask for it."""
        ids = torch.arange(self._config.get_vocab_size())
        return torch.cat([self.embed(id_batch).cpu() for id_batch in ids.split(EMBEDDED_AT_ONCE)])

    def forward(self, batch: RowBatch) -> None:
        """Runs the model."""
        upstream.forward_rows(self._runner, self._model, self._layers, batch)

    def run(
        self, prompts: Sequence[PromptRows], on_written: Written | None = None, on_queries: Asked | None = None
    ) -> None:
        """Computes the rows and writes their K and V to their blocks, in the engine loop. All prompts share one forward."""
        batch = RowBatch.of(prompts, self._block_tokens)
        with ExitStack() as stack:
            for number, layer in enumerate(self._layers.values()):
                stack.enter_context(self._watched(number, layer, batch, on_written, on_queries))
            stack.enter_context(suppress(_AllWritten))
            self.forward(batch)

    def _watched(
        self, number: int, layer: Any, batch: RowBatch, on_written: Written | None, on_queries: Asked | None
    ) -> AbstractContextManager[None]:
        """Record a layer's K, V and queries, and end the forward at the last layer."""
        last = number == len(self._layers) - 1

        def updating(
            update: Callable[..., None],
            layer: Any,
            key: torch.Tensor,
            value: torch.Tensor,
            cache: torch.Tensor,
            slots: torch.Tensor,
        ) -> None:
            update(layer, key, value, cache, slots)
            if on_written is not None:
                for prompt, rows in enumerate(batch.of_prompt):
                    extra_rows = on_written(number, prompt, key[rows].transpose(0, 1), value[rows].transpose(0, 1))
                    if extra_rows is not None:
                        # Moved rows of the same layer: written now, they are seen when it attends.
                        keys, values, extra_slots = extra_rows
                        keys, values = keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()
                        update(layer, keys, values, cache, extra_slots)

        def attending(forward: Callable[..., Any], layer: Any, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
            if on_queries is not None:
                for prompt, rows in enumerate(batch.of_prompt):
                    on_queries(number, prompt, query[rows])
            if last:
                raise _AllWritten
            return forward(layer, query, *rest, **options)

        return upstream.watched(layer, updating, attending)
