"""One ordinary forward of the served model over chosen rows of prompts in vLLM's blocks.

The rows are sequences of the attention metadata (`RowBatch`). All rows' K and V of a layer are
written before the layer attends, so a row sees the fresh state of those before it. Any model,
weight format and attention backend that vLLM runs in this way can be used, since nothing here knows
its layers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.blend.slices import contiguous
from dejakv.engines.vllm import upstream
from dejakv.engines.vllm.device import DeviceCopies
from dejakv.errors import ModelError

MERGED_GAP = 2
"""Rows between two runs up to which a GPU computes both as one sequence.

There a sequence costs as much as two or three rows (docs/explanation/vllm.md)."""
NO_SLOT = -1
"""Slot of a row that is written nowhere, as vLLM's padding."""


@dataclass(frozen=True)
class PromptRows:
    """Rows of one prompt, in host memory.

    Attributes
    ----------
    ids : Tensor, shape [k]
        Token ids of the rows.
    places : Tensor, shape [k]
        Places of the rows in the prompt, ascending.
    block_ids : Sequence[int]
        Blocks of the prompt; no row lies behind them.
    shift : int
        Number that the model is told to add to the places.
    """

    ids: torch.Tensor
    places: torch.Tensor
    block_ids: Sequence[int]
    shift: int = 0

    def cost(self, gap: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return how many tokens and sequences a forward has with the first row, two, and so on.

        Gaps of at most `gap` rows are filled (see `bridged`).
        """
        steps = np.diff(self.places.numpy(), prepend=self.places[:1] - gap - 2)
        ends = steps > gap + 1
        return np.where(ends, 1, steps).cumsum(), ends.cumsum()

    def bridged(self, gap: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fill gaps of at most `gap` rows, each with copies of the row before it.

        Returns
        -------
        ids, places : Tensor, shape [k + filled]
            Token ids and places. What is computed for a filling is of no use.
        is_row : Tensor, shape [k + filled], bool
            False for fillings.
        """
        steps = self.places.diff()
        counts = torch.cat(
            [torch.where(steps <= gap + 1, steps, 1), torch.ones(1, dtype=torch.int64)]
        )
        firsts = counts.cumsum(0) - counts
        behind = torch.arange(int(counts.sum())) - firsts.repeat_interleave(counts)
        places = self.places.repeat_interleave(counts) + behind
        return self.ids.repeat_interleave(counts), places, behind == 0


@dataclass(frozen=True)
class RowBatch:
    """Input of a forward, in host memory.

    Short runs come first, since backends that treat single rows as decoding expect that.

    Attributes
    ----------
    ids, positions, slots : Tensor, shape [tokens]
        Token ids, positions for the model, and slots in the KV cache.
    starts : Tensor, shape [sequences + 1], int32
        First token of each sequence, and the end.
    lengths : Tensor, shape [sequences], int32
        Tokens that each sequence reaches back to, from the prompt's first one.
    blocks : Tensor, shape [sequences, most blocks], int32
        Blocks of each sequence's prompt.
    of_prompt : tuple[Tensor, ...]
        For each prompt, which of the tokens are its rows, in their order.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor
    of_prompt: tuple[torch.Tensor, ...]

    @classmethod
    def from_prompts(
        cls, prompts: Sequence[PromptRows], block_tokens: int, gap: int = 0
    ) -> "RowBatch":
        """Arrange rows of prompts as sequences, one for each run.

        Runs that lie at most `gap` rows apart are one sequence. The rows between them are computed
        with the others and written nowhere, so that no row sees another state than without them.
        """
        bridged = [rows.bridged(gap) for rows in prompts]
        places = np.concatenate([each.numpy() for _, each, _ in bridged])
        is_row = np.concatenate([each.numpy() for _, _, each in bridged])
        prompt = np.repeat(np.arange(len(prompts)), [len(each) for _, each, _ in bridged])

        tables = np.zeros(
            (len(prompts), max(len(rows.block_ids) for rows in prompts)), dtype=np.int64
        )
        for number, rows in enumerate(prompts):
            tables[number, : len(rows.block_ids)] = rows.block_ids

        bounds = np.array(contiguous(places, prompt))
        sizes = bounds[:, 1] - bounds[:, 0]
        run_order = np.argsort(sizes, kind="stable")
        # Runs of one size keep their order, and stay whole.
        token_order = np.argsort(np.repeat(sizes, sizes), kind="stable")

        sorted_places, sorted_prompts = places[token_order], prompt[token_order]
        slots = (
            tables[sorted_prompts, sorted_places // block_tokens] * block_tokens
            + sorted_places % block_tokens
        )
        shifts = np.array([rows.shift for rows in prompts])
        # A sequence reaches back to the prompt's first token: its length is its last place and 1.
        ends = bounds[run_order, 1] - 1

        return cls(
            torch.cat([ids for ids, _, _ in bridged])[torch.from_numpy(token_order)],
            torch.from_numpy(sorted_places + shifts[sorted_prompts]),
            torch.from_numpy(np.where(is_row[token_order], slots, NO_SLOT)),
            torch.from_numpy(np.append(0, sizes[run_order].cumsum()).astype(np.int32)),
            torch.from_numpy((places[ends] + 1).astype(np.int32)),
            torch.from_numpy(tables[prompt[ends]].astype(np.int32)),
            tuple(
                torch.from_numpy(token_order.argsort()[is_row & (prompt == number)])
                for number in range(len(prompts))
            ),
        )


NULL_BLOCK = 0
"""vLLM's block for padding, never a request's; its content does not count (`block_pool.py`)."""


EMBEDDED_AT_ONCE = 4096
"""Number of embeddings to look up at once for a table of all of them."""


ExtraRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""K (rotated) and V `[kv_heads, n, head_dim]` of other rows, and their slots `[n]`."""
WriteHook = Callable[[int, int, torch.Tensor, torch.Tensor, torch.Tensor], "ExtraRows | None"]
"""Called with a layer's and a prompt's number, and K and V `[tokens, kv_heads, head_dim]`.

The last argument is which of these tokens are the prompt's rows, in their order. The call comes
when K and V are written; it writes further rows, or returns them to be written."""
QueryHook = Callable[[int, int, torch.Tensor, torch.Tensor], None]
"""Called with a layer's and a prompt's number, and rotated queries `[tokens, heads, head_dim]`.

The last argument is which of these tokens are the prompt's rows, in their order. The call comes
once K and V are written."""


class _AllWritten(Exception):
    """Signal that the last layer's K and V are written, so that the rest is not needed."""


class RowForward:
    """Forwards of one worker's model, whose KV caches are of one group.

    Parameters
    ----------
    runner : GPUModelRunner
        vLLM's model runner, either of the two that there are.
    model : torch.nn.Module
        The model to call: the runner's, without its adapters.
    layers : Mapping[str, Attention]
        Attention layers by name, in order.
    block_tokens : int
        Tokens of a KV block.

    Attributes
    ----------
    max_runs : int or None
        Sequences that a forward takes; None for any number.
    gap : int
        Rows between two runs up to which they are one sequence.

    Raises
    ------
    ModelError
        The attention backend cannot run this, or the model takes more than tokens and positions.
    """

    def __init__(
        self, runner: Any, model: Any, layers: Mapping[str, Any], block_tokens: int
    ) -> None:
        why = upstream.no_forward(runner, model, layers)
        if why:
            raise ModelError(f"blend is not possible: {why}")
        self._runner = runner
        self._model = model
        self._layers = layers
        self._block_tokens = block_tokens
        self._config = runner.vllm_config.model_config
        self._device = runner.device
        self._copies = DeviceCopies.of(self._device)

        on_cpu = self._device.type == "cpu"
        # FlashInfer and others keep buffers for so many sequences; the CPU backend keeps none.
        self.max_runs: int | None = (
            None if on_cpu else runner.vllm_config.scheduler_config.max_num_seqs
        )
        # On a CPU a row costs more than a sequence.
        self.gap = 0 if on_cpu else MERGED_GAP

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the input embeddings of tokens, `[k, hidden]`."""
        return self._model.embed_input_ids(ids.to(self._device))

    @torch.inference_mode()
    def embedding_table(self) -> torch.Tensor:
        """Return all input embeddings, `[vocabulary, hidden]` in host memory.

        Of several ranks all must ask for it.
        """
        ids = torch.arange(self._config.get_vocab_size())
        return torch.cat([self.embed(id_batch).cpu() for id_batch in ids.split(EMBEDDED_AT_ONCE)])

    def forward(self, batch: RowBatch) -> None:
        """Run the model over a batch."""
        upstream.forward_rows(self._runner, self._model, self._layers, batch)

    def run(
        self,
        prompts: Sequence[PromptRows],
        on_written: WriteHook | None = None,
        on_queries: QueryHook | None = None,
    ) -> None:
        """Compute rows and write their K and V to their blocks, in the engine loop.

        All prompts share one forward.

        Parameters
        ----------
        prompts : Sequence[PromptRows]
            Rows to compute.
        on_written : WriteHook or None
            Sees K and V of each layer and prompt, and may add rows to write.
        on_queries : QueryHook or None
            Sees the queries of each layer and prompt.
        """
        batch = RowBatch.from_prompts(prompts, self._block_tokens, self.gap)
        of_prompt = [self._copies.upload(rows) for rows in batch.of_prompt]
        with ExitStack() as stack:
            for number, layer in enumerate(self._layers.values()):
                stack.enter_context(self._watched(number, layer, of_prompt, on_written, on_queries))
            # Innermost, so that the layers are restored after the signal was caught.
            stack.enter_context(suppress(_AllWritten))
            self.forward(batch)

    def _watched(
        self,
        number: int,
        layer: Any,
        of_prompt: Sequence[torch.Tensor],
        on_written: WriteHook | None,
        on_queries: QueryHook | None,
    ) -> AbstractContextManager[None]:
        """Return a context in which the hooks see a layer's K, V and queries.

        Rows that `on_written` returns are written, too. The last layer raises `_AllWritten` in
        place of its attention, which ends the forward.
        """
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
                for prompt, rows in enumerate(of_prompt):
                    extra_rows = on_written(number, prompt, key, value, rows)
                    if extra_rows is not None:
                        # Moved rows of the same layer: written now, they are seen when it attends.
                        write_extra(update, layer, cache, extra_rows)

        def write_extra(
            update: Callable[..., None], layer: Any, cache: torch.Tensor, extra_rows: ExtraRows
        ) -> None:
            keys, values, slots = extra_rows
            keys, values = (part.transpose(0, 1).contiguous() for part in (keys, values))
            update(layer, keys, values, cache, slots)

        def attending(
            forward: Callable[..., Any], layer: Any, query: torch.Tensor, *rest: Any, **options: Any
        ) -> Any:
            if on_queries is not None:
                for prompt, rows in enumerate(of_prompt):
                    on_queries(number, prompt, query, rows)

            if last:
                # The last layer's attention and the head would be computed for nothing.
                raise _AllWritten
            return forward(layer, query, *rest, **options)

        return upstream.hook_attention(layer, updating, attending)
