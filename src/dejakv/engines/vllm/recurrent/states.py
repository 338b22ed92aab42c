"""Blocks in which vLLM keeps the state of recurrent layers, as the worker side uses them."""

from collections.abc import Iterable, Mapping

import torch

from dejakv.engines.vllm.messages import Tables
from dejakv.errors import ConfigError


class StatePages:
    """Recurrent layers' caches, of which a block holds the state behind one place in a prompt.

    Parameters
    ----------
    caches : Mapping[str, Tensor]
        Cache of each layer, `[blocks, ...]`, of any dtype.
    groups : Mapping[str, int]
        KV cache group of each layer.
    blocks : int
        Number of vLLM's blocks.

    Raises
    ------
    ConfigError
        A cache has another number of blocks.

    Attributes
    ----------
    nbytes : int
        Bytes of a snapshot, the state of all layers.
    """

    def __init__(
        self, caches: Mapping[str, torch.Tensor], groups: Mapping[str, int], blocks: int
    ) -> None:
        self._groups = [groups[name] for name in caches]
        self._pages: list[torch.Tensor] = []
        for name, cache in caches.items():
            octets = cache.view(torch.uint8)
            if len(octets) != blocks:
                raise ConfigError(
                    f"the recurrent state of {name} has {len(octets)} blocks in place of {blocks}: "
                    "run without DejaKVConnector"
                )
            # Blocks may lie apart in memory, but each is one piece, or this raises.
            self._pages.append(octets.view(blocks, -1))
        self._sizes = [pages.shape[1] for pages in self._pages]
        self.nbytes = sum(self._sizes)
        self.device = self._pages[0].device

    def copy(self, blocks: Iterable[tuple[int, int]], out: torch.Tensor) -> None:
        """Copy a state out of its blocks, to `out` `[bytes]`.

        Parameters
        ----------
        blocks : Iterable[tuple[int, int]]
            Group and block of the state in each group.
        out : Tensor, shape [bytes], uint8
            Memory for the copy.
        """
        block_of = dict(blocks)
        for group, pages, part in zip(
            self._groups, self._pages, out.split(self._sizes), strict=True
        ):
            part.copy_(pages[block_of[group]])

    def put(self, tables: Tables, block: int, state: torch.Tensor) -> None:
        """Write a state `[bytes]` to the request's block number `block` in each group.

        Raises
        ------
        IndexError
            vLLM gave the request no such block.
        """
        parts = state.to(self.device, non_blocking=True).split(self._sizes)
        for group, pages, part in zip(self._groups, self._pages, parts, strict=True):
            id = tables[group][block]
            # Block 0 stands for a state that the request does not have.
            if not id:
                raise IndexError(f"the request has no block {block} for recurrent state")
            pages[id].copy_(part)
