"""One ordinary forward of the served model over chosen rows of prompts whose KV lies in vLLM's blocks.

The rows are sequences of the attention metadata (`row_batch`). All rows' K and V of a layer are written before the layer attends, so a
row sees the fresh state of those before it. Any model, weight format and attention backend that vLLM runs in this way can be
used; nothing here knows its layers.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from dejakv.engines.vllm.compat_forward import RunnerInputs
from dejakv.engines.vllm.row_batch import Batch, PromptRows
from dejakv.errors import ModelError

More = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""K (rotated) and V `[kv_heads, n, head_dim]` of other rows, and their slots `[n]`."""
Written = Callable[[int, int, torch.Tensor, torch.Tensor], "More | None"]
"""Sees, of a layer and a prompt by their numbers, the fresh K and V `[kv_heads, k, head_dim]` that are being written, and says
what is to be written beside them."""
Asked = Callable[[int, int, torch.Tensor], None]
"""Sees, of a layer and a prompt by their numbers, the rotated queries `[k, heads, head_dim]` once K and V are written."""


class _AllWritten(Exception):
    """The last layer's K and V are written; what the model would make of them is not needed."""


class RowForward:
    """Forwards of one worker's model.

    runner   vLLM's model runner
    model    what to call: the runner's model, without its adapters
    layers   attention layers by name, in order

    Raises: ModelError for a backend or a model that it cannot run.
    """

    def __init__(self, runner: Any, model: Any, layers: Mapping[str, Any], block_tokens: int) -> None:
        for layer in layers.values():
            if layer.attn_backend.forward_includes_kv_cache_update:
                raise ModelError(
                    f"blend is not possible: {type(layer.impl).__name__} writes K and V while it attends. Choose another"
                    " attention backend, or leave blend out of mode and modes"
                )
        self._inputs = RunnerInputs(runner, model, tuple(layers))
        self._layers = list(layers.values())
        self._block_tokens = block_tokens
        self.most_runs = self._inputs.most_sequences

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings `[k, hidden]`."""
        return self._inputs.embed(ids)

    def embedding_table(self) -> torch.Tensor:
        """All input embeddings `[vocabulary, hidden]` in host memory. Of several ranks all must ask for it."""
        return self._inputs.embedding_table()

    def run(self, prompts: Sequence[PromptRows], written: Written | None = None, asked: Asked | None = None) -> None:
        """Computes the rows and writes their K and V to their blocks, in the engine loop. All prompts share one forward."""
        batch = Batch.of(prompts, self._block_tokens)
        with ExitStack() as stack:
            for number, layer in enumerate(self._layers):
                stack.enter_context(self._watched(number, layer.impl, batch, written, asked))
            stack.enter_context(suppress(_AllWritten))
            self._inputs.forward(batch)

    @contextmanager
    def _watched(
        self, number: int, impl: Any, batch: Batch, written: Written | None, asked: Asked | None
    ) -> Generator[None]:
        """Has a layer's attention tell what it writes and asks, and the last one end the forward."""
        update, forward = impl.do_kv_cache_update, impl.forward
        last = number == len(self._layers) - 1

        def updating(
            layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            update(layer, key, value, cache, slots)
            if written is not None:
                for prompt, rows in enumerate(batch.of_prompt):
                    more = written(number, prompt, key[rows].transpose(0, 1), value[rows].transpose(0, 1))
                    if more is not None:
                        keys, values, where = more
                        keys, values = keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()
                        update(layer, keys, values, cache, where)

        def attending(layer: Any, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
            if asked is not None:
                for prompt, rows in enumerate(batch.of_prompt):
                    asked(number, prompt, query[rows])
            if last:
                raise _AllWritten
            return forward(layer, query, *rest, **options)

        impl.do_kv_cache_update, impl.forward = updating, attending
        try:
            yield
        finally:
            del impl.do_kv_cache_update, impl.forward  # the class's own are seen again
