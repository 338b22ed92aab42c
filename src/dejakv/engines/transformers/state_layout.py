"""State layouts: which tensors the layers of a model's cache hold, and how they are stored.

Most models need none: each of their layers has keys and values of one shape, which one tensor holds
(`kv.stacked_state`). A model with latent attention, unequal heads, an index of keys, or recurrent
layers has a layout.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from dejakv.engines.tensors import DTYPE_NAMES, tensor_view, to_store
from dejakv.engines.transformers.kv import PartsLayer
from dejakv.engines.transformers.model_settings import text_config
from dejakv.errors import ModelError
from dejakv.store.base import RawTensor

Tensors = Mapping[str, torch.Tensor]
"""Tensors of one layer by name: `keys`, `values`, `indexer_keys`, `conv_states.0`, ..."""

_AXES = {"keys": 2, "values": 2, "indexer_keys": 1}
"""Axis that counts tokens in each growing tensor of a layer, `[batch, ...]`."""
_FIXED = ("conv_states", "recurrent_states")
"""Attributes of a layer with fixed state: tensors by number."""
_KEEPING = {
    "DynamicLayer": "DynamicLayer",
    "PartsLayer": "DynamicLayer",
    # A window is hidden by the model's mask as well, so its layer may keep every token.
    "DynamicSlidingWindowLayer": "DynamicLayer",
    "DynamicIndexedLayer": "DynamicIndexedLayer",
    # Of a layer without attention, or with the state of an earlier one.
    "DummyLayer": "DummyLayer",
    "LinearAttentionLayer": "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer": "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer": "LinearAttentionAndFullAttentionLayer",
}
"""By class of a layer: the class that holds the same state and forgets no token."""


@dataclass(frozen=True)
class LayerState:
    """One tensor that a layer keeps.

    Attributes
    ----------
    layer : int
        Index of the layer.
    name : str
        Name in the layer (see `Tensors`).
    shape : tuple[int, ...]
        Shape without batch, and of growing state without tokens.
    dtype : torch.dtype
        Dtype of the numbers.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        """Numbers in the tensor; of growing state, in one token's part."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class StateLayout:
    """State of every layer of a model: growing with the tokens, or fixed.

    Growing state is stored as one row for each token, `[1, 1, 1, tokens, numbers]`. Fixed state is
    that of one place in the prompt alone: a snapshot, `[bytes]`.

    Attributes
    ----------
    classes : tuple[type, ...]
        Class of each layer of the cache; empty for layers that appear with their first tokens.
    states : tuple[int, ...]
        Number of fixed states of each of these layers.
    growing, fixed : tuple[LayerState, ...]
        Tensors in the order in which they are stored.
    token_by_token : bool
        Whether the model reads its fixed state only where it computes a single token, so that a
        prompt must be continued by one token at a time.
    """

    classes: tuple[type[Any], ...] = ()
    states: tuple[int, ...] = ()
    growing: tuple[LayerState, ...] = ()
    fixed: tuple[LayerState, ...] = ()
    token_by_token: bool = False

    def empty_cache(self) -> Cache:
        """Return an empty cache that keeps every token."""
        cache: Any = DynamicCache()
        if self.classes:
            cache.layer_class_to_replicate = None
            cache.layers = [
                kind(number_of_states=states) if states else kind()
                for kind, states in zip(self.classes, self.states, strict=True)
            ]
        return cache

    def read_from(self, cache: Cache) -> "StateLayout":
        """Return the layout with the tensors that a filled cache holds.

        Raises
        ------
        ModelError
            The cache holds no growing state, or numbers that cannot be stored.
        """
        growing: list[LayerState] = []
        fixed: list[LayerState] = []
        for index, layer in enumerate(cache.layers):
            for name, tensor in _tensors_of(layer):
                shape = list(tensor.shape[1:])
                if name in _AXES:
                    del shape[_AXES[name] - 1]
                state = LayerState(index, name, tuple(shape), tensor.dtype)
                (growing if name in _AXES else fixed).append(state)

        if not growing:
            raise ModelError("its layers keep no per-token KV")
        if len({state.dtype for state in growing}) > 1 or growing[0].dtype not in DTYPE_NAMES:
            raise ModelError("its layers keep state in dtypes that are not stored together")
        return replace(self, growing=tuple(growing), fixed=tuple(fixed))

    def random_cache(self, into: Cache, tokens: int, device: torch.device) -> Cache:
        """Fill a cache with the same random state of so many tokens each time.

        Parameters
        ----------
        into : Cache
            The empty cache that is filled.
        tokens : int
            Tokens of the growing state.
        device : torch.device
            Where the state is.
        """
        generator = torch.Generator().manual_seed(0)
        tensors: dict[int, dict[str, torch.Tensor]] = {}
        for state in (*self.growing, *self.fixed):
            shape = [1, *state.shape]
            if state.name in _AXES:
                shape.insert(_AXES[state.name], tokens)
            numbers = torch.randn(shape, generator=generator).to(device, state.dtype)
            tensors.setdefault(state.layer, {})[state.name] = numbers
        return fill(into, tensors)

    @property
    def layers(self) -> int:
        """Layers with state, counted to the last one."""
        return 1 + max(state.layer for state in (*self.growing, *self.fixed))

    @property
    def width(self) -> int:
        """Numbers of the growing state of one token."""
        return sum(state.numbers for state in self.growing)

    @property
    def token_bytes(self) -> int:
        """Bytes of the growing state of one token."""
        return sum(state.numbers * state.dtype.itemsize for state in self.growing)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of all fixed state."""
        return sum(state.numbers * state.dtype.itemsize for state in self.fixed)

    def views(self, rows: torch.Tensor) -> Iterator[tuple[LayerState, torch.Tensor]]:
        """Yield each growing tensor in packed state `[1, 1, 1, tokens, numbers]`, without batch."""
        for state, numbers in zip(
            self.growing, rows[0, 0, 0].split([s.numbers for s in self.growing], 1), strict=True
        ):
            yield state, numbers.unflatten(1, state.shape).movedim(0, _AXES[state.name] - 1)

    def pack(self, cache: Cache, tokens: int, first: int = 0) -> RawTensor | None:
        """Copy the growing state of tokens `first` to `tokens - 1` to the CPU.

        Returns
        -------
        RawTensor or None
            Shape `[1, 1, 1, tokens - first, numbers]`; None if the cache holds fewer tokens, or
            other tensors than the layout.
        """
        rows: list[torch.Tensor] = []
        tensors = _tensors_by_place(cache)
        for state in self.growing:
            tensor = tensors.get((state.layer, state.name))
            if tensor is None or tensor.shape[_AXES[state.name]] < tokens:
                return None
            # Of beams, the first row of the batch: all began with the same prompt.
            by_token = tensor[0].movedim(_AXES[state.name] - 1, 0)[first:tokens]
            if tuple(by_token.shape[1:]) != state.shape or by_token.dtype != state.dtype:
                return None
            rows.append(by_token.flatten(1))
        return to_store(torch.cat(rows, dim=1)[None, None, None].detach().cpu().contiguous())

    def snapshot(self, cache: Cache) -> RawTensor | None:
        """Copy the fixed state of a cache as it is now to the CPU.

        Returns
        -------
        RawTensor or None
            Shape `[bytes]`; None if the cache holds other tensors than the layout.
        """
        parts: list[torch.Tensor] = []
        tensors = _tensors_by_place(cache)
        for state in self.fixed:
            tensor = tensors.get((state.layer, state.name))
            if (
                tensor is None
                or tuple(tensor.shape[1:]) != state.shape
                or tensor.dtype != state.dtype
            ):
                return None
            part = tensor[0].detach().cpu().contiguous().reshape(-1)
            parts.append(part.view(torch.uint8))
        return to_store(torch.cat(parts))

    def fits(self, snapshot: RawTensor) -> bool:
        """Tell whether a stored snapshot has the bytes of the model's fixed state."""
        return snapshot.dtype == "U8" and snapshot.shape == (self.snapshot_bytes,)

    def filled_cache(
        self,
        rows: Sequence[RawTensor],
        tokens: int,
        device: torch.device,
        snapshot: RawTensor | None = None,
    ) -> Cache:
        """Return a cache that holds the first `tokens` tokens of stored state.

        Parameters
        ----------
        rows : Sequence[RawTensor]
            Growing state, in parts that follow each other.
        tokens : int
            Tokens of the state to use.
        device : torch.device
            Where the cache is.
        snapshot : RawTensor or None
            Fixed state after exactly these tokens, where the layout has fixed state.

        Raises
        ------
        ModelError
            The state is of another layout, or holds too few tokens.
        """
        parts = [tensor_view(part).to(device) for part in rows]
        dtype = self.growing[0].dtype
        if any(
            part.shape[:3] != (1, 1, 1) or part.shape[-1] != self.width or part.dtype != dtype
            for part in parts
        ):
            raise ModelError(
                "the state has another layout than the model: it was stored by something else; "
                "clear the cache directory"
            )
        if sum(part.shape[3] for part in parts) < tokens:
            raise ModelError(f"the state has fewer than {tokens} tokens: compute the prompt anew")

        tensors: dict[int, dict[str, torch.Tensor]] = {}
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)
        for state, tensor in self.views(whole[:, :, :, :tokens]):
            tensors.setdefault(state.layer, {})[state.name] = tensor[None]

        for state, tensor in self._fixed_tensors(snapshot, device):
            tensors.setdefault(state.layer, {})[state.name] = tensor

        return fill(self.empty_cache(), tensors)

    def _fixed_tensors(
        self, snapshot: RawTensor | None, device: torch.device
    ) -> Iterator[tuple[LayerState, torch.Tensor]]:
        """Yield the tensors of a snapshot, `[1, ...]`."""
        if not self.fixed:
            return
        if snapshot is None or not self.fits(snapshot):
            raise ModelError(
                "a snapshot does not fit the model's fixed state: clear the cache directory"
            )
        octets = tensor_view(snapshot)
        sizes = [state.numbers * state.dtype.itemsize for state in self.fixed]
        for state, part in zip(self.fixed, octets.split(sizes), strict=True):
            # A copy: the part may not lie at a multiple of its numbers' size.
            numbers = part.clone().view(state.dtype)
            yield state, numbers.view(1, *state.shape).to(device)

    def repeat(self, cache: Cache, rows: int) -> None:
        """Repeat a cache's state for so many beams."""
        layers: list[Any] = list(cache.layers)
        for layer in layers:
            if any(name in _AXES for name, _ in _tensors_of(layer)):
                layer.batch_repeat_interleave(rows)
            for attribute in _FIXED:
                for number, tensor in getattr(layer, attribute, {}).items():
                    if tensor is not None:
                        getattr(layer, attribute)[number] = tensor.repeat_interleave(rows, dim=0)


def planned_layout(model: Any) -> StateLayout:
    """Return the classes of a model's cache, without tensors yet.

    Raises
    ------
    ModelError
        A layer's class is unknown: what it keeps, and when it forgets, cannot be told.
    """
    try:
        layers = DynamicCache(config=text_config(model)).layers
    # The configuration's own code may raise anything.
    except Exception as error:
        raise ModelError(f"its cache cannot be made: {type(error).__name__}: {error}") from error

    classes: list[type[Any]] = []
    for layer in layers:
        name = type(layer).__name__
        kind = getattr(cache_utils, _KEEPING.get(name, ""), None)
        # By identity too: somebody's own class may have the same name.
        if kind is None or type(layer) is not getattr(cache_utils, name, None):
            raise ModelError(f"layers of class {name} keep a state that is no per-token KV")
        classes.append(kind)

    states = tuple(int(getattr(layer, "number_of_states", 0)) for layer in layers)
    return StateLayout(tuple(classes), states)


def fill(cache: Any, tensors: Mapping[int, Tensors]) -> Cache:
    """Put state into an empty cache, by layer, and return the cache.

    An ordinary layer is replaced by one that copies nothing before its first new token.
    """
    if not cache.layers:
        cache.layers = [DynamicLayer() for _ in range(max(tensors) + 1)]
    for index, layer_tensors in tensors.items():
        if type(cache.layers[index]) is DynamicLayer:
            parts = ([layer_tensors["keys"]], [layer_tensors["values"]])
            cache.layers[index] = PartsLayer(*parts)
        else:
            _fill_layer(cache.layers[index], layer_tensors)
    return cache


def _fill_layer(layer: Any, tensors: Tensors) -> None:
    """Put state into an empty layer through the layer's own methods."""
    if "keys" in tensors:
        layer.update(tensors["keys"], tensors["values"])
    if "indexer_keys" in tensors:
        layer.update_indexer(tensors["indexer_keys"])
    for name, tensor in tensors.items():
        attribute, _, number = name.partition(".")
        if attribute == "conv_states":
            layer.update_conv_state(tensor, int(number))
        elif attribute == "recurrent_states":
            layer.update_recurrent_state(tensor, int(number))


def _tensors_by_place(cache: Cache) -> dict[tuple[int, str], torch.Tensor]:
    """Return the tensors of a cache by layer and name."""
    return {
        (index, name): tensor
        for index, layer in enumerate(cache.layers)
        for name, tensor in _tensors_of(layer)
    }


def _tensors_of(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a layer that hold state, by name."""
    for name in _AXES:
        tensor = getattr(layer, name, None)
        # An empty layer may have tensors without tokens.
        if isinstance(tensor, torch.Tensor) and tensor.dim() > _AXES[name]:
            yield name, tensor
    for attribute in _FIXED:
        for number, tensor in getattr(layer, attribute, {}).items():
            if tensor is not None:
                yield f"{attribute}.{number}", tensor
