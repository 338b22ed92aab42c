"""What a blend starts from: the donors' state in the prompt's order, keys moved, and which rows must be computed.

Made in a thread, without a forward pass. The token map is made of the donors' token ids alone; then donor by donor is read, what
the map takes of it is copied into memory that is lent, and the donor is let go of. So a blend of any number of donors holds one of
them at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.blend.blend import find, not_worth
from dejakv.blend.recomputed import RecomputePlan
from dejakv.blend.settings import BlendConfig
from dejakv.blend.slices import copy_part, ranges_of
from dejakv.blend.token_map import Donors, Embed, Ids, TokenMap, new_text
from dejakv.decide.copied.fingerprints import GUARANTEED
from dejakv.engines.tensors import borrowed
from dejakv.engines.vllm.pages import Buffers, Lent
from dejakv.errors import InputError
from dejakv.identity import digest_of
from dejakv.store.base import Chunk, ChunkMeta, Rows

Read = Callable[[str, "Rows | None"], "Sequence[Chunk] | str"]
"""What holds at least these rows of a stored state of this model, by its id, first rows first (None: all, in one chunk); or why there
is none."""

Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Turns keys `[layers, kv_heads, n, head_dim]` of positions `[n]` to other positions `[n]`, in place."""


@dataclass(frozen=True)
class Draft:
    """What is known before the model runs.

    ids       target tokens `[n]`
    state     the donors', in target order and keys moved: `[2, layers, kv_heads, n, head_dim]`; undefined before `plan.first`
    plan      which rows are computed; `plan.first` rows are held by vLLM, and from `plan.stop` on it computes by itself
    tail      rows at the end that are the question, vLLM's among them
    donors    ids of the donors that the map was made of, the best first
    used      those that state was taken from
    generation of rows that attend to them, see `ChunkMeta`
    fresh     `[n]` bool: what no donor holds in a run that could be found there (`new_text`)
    mark      names donors, map and rows: ranks that have the same mark compute the same
    left_out  why donors that were planned are not in it
    proof     a donor to check the model with, None if none is longer than what was checked
    lent      the memory of `state`, to be given back after use
    ready     on a GPU: when `state` is complete there (not run on one yet)
    """

    ids: torch.Tensor
    state: torch.Tensor
    plan: RecomputePlan
    tail: int
    donors: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    generation: int = 1
    fresh: NDArray[np.bool_] | None = None
    mark: str = ""
    left_out: tuple[str, ...] = ()
    proof: Chunk | None = None
    lent: Lent | None = None
    ready: torch.cuda.Event | None = None

    @property
    def tokens(self) -> int:
        """How many tokens' state goes into blocks."""
        return self.plan.end - self.plan.first

    @property
    def asks(self) -> int:
        """How many rows are computed at most for the question, to choose the others."""
        return self.tail if self.plan.asks else 0

    def wait(self) -> None:
        """In the engine loop, before `state` is used: its kernels run after those of the thread that made the draft, and its
        memory is not given to others before they ran."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.state.device)
            stream.wait_event(self.ready)
            self.state.record_stream(stream)


@dataclass(frozen=True)
class Drafting:
    """Makes drafts for one model.

    dtype, device          of the KV cache
    ends                   ids of tokens that end a sentence
    checked                tokens of the longest state that the model was checked with
    checkable              tokens of the request's own blocks: no check with a donor goes further
    """

    config: BlendConfig
    dtype: torch.dtype
    device: torch.device
    embed: Embed
    move: Move
    buffers: Buffers
    ends: Ids | None = None
    checked: int = 0
    checkable: int = 0

    def draft(
        self,
        token_ids: Sequence[int],
        first: int,
        stop: int,
        donors: Sequence[ChunkMeta],
        read: Read,
        gone: Sequence[str] = (),
    ) -> Draft:
        """Of a whole prompt, of which vLLM holds the tokens before `first` and computes those from `stop` on. `gone`: why donors
        that were planned too are not among the donors.

        A donor that cannot be read, or is of another model, is left out, and the map is made of the rest.

        Raises: InputError for a prompt that has too little in common with the donors that are left, or is cheaper from its exact
        prefix.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        usable, left_out = list(donors), list(gone)
        while usable:
            among = Donors.of(*(meta.token_ids for meta in usable), first=[meta.position for meta in usable])
            exact = [meta.generation == meta.position == 0 for meta in usable]
            found, must = find(ids, among, self.embed, self.config, self.ends, exact, first)
            reason = not_worth(self.config, must)
            if reason:
                raise InputError("; ".join([reason, *left_out]))
            filled = self._filled(found, among, first, usable, read)
            if isinstance(filled, _Useless):
                usable.remove(filled.meta)
                left_out.append(filled.reason)
                continue
            plan = RecomputePlan.of(self.config, ids, among, found, must, self.device, first=first, stop=stop)
            there = torch.from_numpy(ids).to(self.device)
            names = tuple(meta.id for meta in usable)
            used = [usable[number] for number in np.unique(among.number[found.source[first:]]).tolist()]
            ready = torch.cuda.Event() if self.device.type == "cuda" else None
            if ready is not None:
                ready.record()
            return Draft(
                there,
                filled.state,
                plan,
                must.tail,
                names,
                tuple(meta.id for meta in used),
                1 + max(meta.generation for meta in used),
                new_text(ids, among, found, GUARANTEED),
                digest_of(*names, found.source.tobytes(), must.forced.tobytes()),
                tuple(left_out),
                filled.proof,
                filled.lent,
                ready,
            )
        raise InputError("; ".join(left_out) or "no donor of the blend is known any more")

    def _filled(
        self, found: TokenMap, among: Donors, first: int, metas: Sequence[ChunkMeta], read: Read
    ) -> "_Filled | _Useless":
        """The donors' rows of the tokens from `first` on, in target order; or the first donor that cannot be used."""
        lent: Lent | None = None
        proof, checked = None, self.checked
        state: torch.Tensor | None = None
        for number, rows, places in among.parts(found.source[first:]):
            meta = metas[number]
            shown = min(meta.num_tokens, self.checkable) if meta.generation == meta.position == 0 else 0
            proves = shown > checked
            parts, copied = read(meta.id, None if proves else ranges_of(places)), 0
            for part in () if isinstance(parts, str) else parts:
                held = borrowed(part.tensor)
                if state is None:
                    shape = (*held.shape[:3], len(found), held.shape[4])
                    lent = self.buffers.lend(shape, self.dtype) if self.device.type == "cpu" else None
                    state = lent.tensor if lent else torch.empty(shape, dtype=self.dtype, device=self.device)
                copied += copy_part(held.to(self.device), part.first, places, state, rows + first)
            if isinstance(parts, str) or copied < len(places):
                if lent is not None:
                    self.buffers.take_back(lent)
                return _Useless(meta, parts if isinstance(parts, str) else "the donor's state lacks rows")
            if proves:
                proof, checked = parts[0], shown
        assert state is not None
        positions = torch.from_numpy(among.positions[found.source[first:]]).to(self.device)
        self.move(state[0, :, :, first:], positions, torch.arange(first, len(found), device=self.device))
        return _Filled(state, proof, lent)


@dataclass(frozen=True)
class _Useless:
    meta: ChunkMeta
    reason: str


@dataclass(frozen=True)
class _Filled:
    state: torch.Tensor
    proof: Chunk | None
    lent: Lent | None
