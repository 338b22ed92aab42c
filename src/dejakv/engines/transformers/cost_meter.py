"""What a model's work takes on this machine: counted from its shape, timed once, and corrected by what requests took."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dejakv.decide.costs import Costs, Rate
from dejakv.engines.transformers.kv import empty_cache
from dejakv.models.lckv.layout import layout_of

FIRST, MORE = 8, 64
"""Rows of the first timed pass, and of the ones after it if they take no more than `LIMIT` seconds together."""

LIMIT = 0.3
PASSES = 2
COUNTED = 5e-11
"""Seconds for an operation, where nothing can be timed: 20 GFLOP/s, about a core of a CPU."""

BLEND_ROWS = 0.05
"""Rows that a token of a blended prompt costs beside those that are computed, until blends have been seen."""

COPIES = 3
"""Loading reads, checks and moves each byte."""

LEAST_SECONDS = 0.05
"""What takes less is mostly the call itself, and tells nothing of rows."""

LEAST_BYTES = 1 << 20

MASKED = 1.3
"""`Costs.masked` of torch's attention on a CPU, in pieces (`hidden_keys`): 1.2 to 1.5 on SmolLM2's heads with 1,300 tokens."""


@dataclass(frozen=True)
class Shape:
    """Floating-point operations of one model, embeddings left out.

    row          of one token in all layers, attention to other tokens apart
    pair         of one token that attends to one other in all layers; 0 where pairs are not counted
    whole        see `Costs`
    token_bytes  bytes of one token's state
    """

    row: int
    pair: int
    whole: float
    token_bytes: int

    @classmethod
    def of(cls, model: Any, attention: str) -> "Shape":
        """On a GPU, and with eager attention, pairs are not counted: a prefix always pays there. A layer-condensed model attends to the
        whole prompt."""
        embeddings = model.get_input_embeddings().weight
        config = model.config.get_text_config(decoder=True)
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        layout = layout_of(model)
        with_kv = len(layout.kv_layers) if layout is not None else layers
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        named = [(name, p.numel()) for name, p in model.named_parameters() if "vision" not in name]
        weights = sum(size for name, size in named if "layers." in name)
        weights = weights or max(1, sum(size for _, size in named) - embeddings.numel())  # layers by another name
        held = 2 * with_kv * (getattr(config, "num_key_value_heads", None) or heads) * width * embeddings.element_size()
        masked = attention == "sdpa" and embeddings.device.type == "cpu"
        return cls(
            2 * weights, 4 * layers * heads * width if masked else 0, 0.5 if masked and layout is None else 1.0, held
        )


class CostMeter:
    """The costs of one model. `forward(rows)` computes so many rows without a state; None: it cannot be timed.

    Until `time` was called they are counted: as if every machine were equally fast, and nothing but rows took time.
    """

    def __init__(self, shape: Shape, forward: Callable[[int], object] | None) -> None:
        self.shape = shape
        self.timed = False
        self._forward = forward
        self._operation, self._byte, self._blend = Rate(COUNTED), Rate(0.0), Rate(BLEND_ROWS)

    def time(self) -> None:
        """Times the model and the memory, once; a fraction of a second."""
        if not self.timed and self._forward is not None:
            self._operation = Rate(self._of_operation(self._forward))
            self._byte = Rate(COPIES * _copy_seconds())
        self.timed = True

    def costs(self) -> Costs:
        operation, shape = self._operation.value, self.shape
        return Costs(
            row=operation * shape.row, pair=operation * shape.pair, byte=self._byte.value,
            blend=operation * shape.row * self._blend.value, whole=shape.whole, masked=MASKED, token_bytes=shape.token_bytes,
        )  # fmt: skip

    def computed(self, rows: int, tokens: int, seconds: float) -> None:
        """A prompt of which so many rows were computed, the rest loaded."""
        if seconds >= LEAST_SECONDS:
            self._operation.add(seconds / self._operations(rows, tokens))
        if rows == tokens:
            self._blend.missed()
            self._byte.missed()

    def blended(self, rows: float, tokens: int, seconds: float) -> None:
        """A prompt of which so many rows were computed, the mean over layers, in a blend."""
        if seconds >= LEAST_SECONDS:
            left = seconds - self.costs().rows(rows, tokens)
            self._blend.add(left / (self._operation.value * tokens * self.shape.row))

    def loaded(self, nbytes: int, seconds: float) -> None:
        """State of so many bytes, from the store into the engine."""
        if nbytes >= LEAST_BYTES:
            self._byte.add(seconds / nbytes)

    def _operations(self, rows: int, tokens: int) -> float:
        counted = Costs(row=self.shape.row, pair=self.shape.pair, whole=self.shape.whole, masked=MASKED)
        return counted.full(tokens) if rows == tokens else counted.prefix(tokens - rows, tokens)

    def _of_operation(self, forward: Callable[[int], object]) -> float:
        """Seconds for an operation: the best of a few passes, after a short one that warms up."""
        forward(FIRST)
        rows, took = FIRST, _seconds(forward, FIRST)
        if took * PASSES * MORE / FIRST <= LIMIT:
            rows, took = MORE, min(_seconds(forward, MORE) for _ in range(PASSES))
        return max(took, 1e-9) / self._operations(rows, rows)


def _seconds(forward: Callable[[int], object], rows: int) -> float:
    began = time.perf_counter()
    forward(rows)
    return time.perf_counter() - began


def _copy_seconds() -> float:
    """Seconds for a byte that is copied in memory."""
    source = np.ones(4 << 20, np.uint8)
    target = np.empty_like(source)
    best = min(_seconds(lambda _: np.copyto(target, source), 0) for _ in range(3))
    return best / source.nbytes


def forward_of(model: Any, ids: Callable[[int], torch.Tensor]) -> Callable[[int], object]:
    """Computes so many rows of a model, as an engine does; `ids(n)` are token ids `[1, n]`. Waits for the device."""

    @torch.inference_mode()
    def forward(rows: int) -> object:
        return (
            model(input_ids=ids(rows), past_key_values=empty_cache(layout_of(model)), use_cache=True)
            .logits[0, -1]
            .float()
            .cpu()
        )

    return forward
