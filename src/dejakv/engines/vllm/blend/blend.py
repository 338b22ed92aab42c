"""Blend inside vLLM's worker: the rows that differ are computed afresh among the state of similar prompts.

What can be done beforehand is a `BlendDraft`, made in a thread. In the engine loop the donors' state is put into the request's blocks,
and the model runs over the rows that need it (`rows`). They are the same rows in all layers, known before it runs. Maps,
forced tokens, ranking and choice are the transformers engine's (`dejakv.blend`), and are made for the whole prompt as there.
The last rows are computed by vLLM. `BlendWorker` says which blends are checked, begun and computed in a step, within its room.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.blend.blend import find, not_worth
from dejakv.blend.recomputed import RecomputePlan
from dejakv.blend.settings import BlendConfig
from dejakv.blend.slices import copy_rows, ranges_of
from dejakv.blend.token_map import DonorTokens, TokenMap, new_text
from dejakv.decide.copied.fingerprints import GUARANTEED
from dejakv.engines.tensors import borrowed
from dejakv.engines.vllm.blend.model import LayerRotaryTables, ModelCheck, question_attention
from dejakv.engines.vllm.blend.queue import TOKENS_A_ROW
from dejakv.engines.vllm.blend.rows import More, RowForward
from dejakv.engines.vllm.blend.state import BlendDraft, BlendPart, BlendState, Read
from dejakv.engines.vllm.pages import BufferPool, LentBuffer, PagedKV
from dejakv.engines.vllm.ranks import ALONE, SingleRank
from dejakv.errors import InputError, ModelError
from dejakv.identity import digest_of
from dejakv.store.base import KV, ChunkMeta, StoredState, consecutive

log = logging.getLogger("dejakv.vllm")

ELSEWHERE = "another rank could not go on"
FAILED = "the load failed"


@dataclass(frozen=True)
class _BlendUseless:
    meta: ChunkMeta
    reason: str


@dataclass(frozen=True)
class _PagesFilled:
    state: torch.Tensor
    proof: Sequence[StoredState]
    lent: LentBuffer | None


class BlendRunner:
    """Blends with one model.

    max_positions  number of the model's positions
    step_rows      maximum rows of a step
    ends           ids of tokens that end a sentence
    lockstep       the ranks that compute the same rows, each its own heads
    """

    def __init__(
        self,
        forward: RowForward,
        rotary: LayerRotaryTables,
        paged: PagedKV,
        config: BlendConfig,
        max_positions: int,
        step_rows: int,
        ends: NDArray[np.int64] | None = None,
        lockstep: SingleRank = ALONE,
    ) -> None:
        self.forward = forward
        self.rotary = rotary
        self.paged = paged
        self.config = config
        self.lockstep = lockstep
        self.model_check = ModelCheck(forward, paged, rotary, max_positions, self.lockstep)
        self._step_rows = step_rows
        self._ends = ends
        # A lookup in the model's own table would be a collective, and maps are made in threads.
        self._table = forward.embedding_table() if self.lockstep.ranks > 1 else None

    def draft(
        self,
        token_ids: Sequence[int],
        first: int,
        stop: int,
        donors: Sequence[ChunkMeta],
        read: Read,
        buffers: BufferPool,
        missing_reasons: Sequence[str] = (),
    ) -> BlendDraft:
        """Draft the blend of a prompt whose tokens before `first` vLLM holds and from `stop` on vLLM computes. Call it in a thread.

        The token map needs the donors' token ids alone. Then each donor is read, its mapped rows are copied into lent memory, and it is
        released: one is held at a time. A donor that is unreadable or of another model is left out, and the map made of the rest. `missing_reasons`:
        why planned donors are missing. Raises: InputError for a prompt that has too little in common with the donors left, is cheaper from
        its exact prefix, or has a question without room in any step.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        # Each round that fails drops one donor, so this ends after at most len(donors) rounds.
        usable, left_out = list(donors), list(missing_reasons)
        while usable:
            donor_tokens = DonorTokens.of(
                *(meta.token_ids for meta in usable), first=[meta.position for meta in usable]
            )
            exact = [meta.generation == meta.position == 0 for meta in usable]
            token_map, forced_tokens = find(ids, donor_tokens, self._embed, self.config, self._ends, exact, first)
            reason = not_worth(self.config, forced_tokens)
            if reason:
                raise InputError("; ".join([reason, *left_out]))
            filled = self._filled(token_map, donor_tokens, first, stop, usable, read, buffers)
            if isinstance(filled, _BlendUseless):
                usable.remove(filled.meta)
                left_out.append(filled.reason)
                continue

            plan = RecomputePlan.of(
                self.config, ids, donor_tokens, token_map, forced_tokens, self.paged.device, first=first, stop=stop
            )
            target_ids = torch.from_numpy(ids).to(self.paged.device)
            donor_ids = tuple(meta.id for meta in usable)
            # Rows that are stored of this blend leave the store with these donors.
            used_donors = [
                usable[number] for number in np.unique(donor_tokens.number[token_map.source[first:]]).tolist()
            ]
            ready_event = torch.cuda.Event() if self.paged.device.type == "cuda" else None
            if ready_event is not None:
                ready_event.record()

            draft = BlendDraft(
                target_ids,
                filled.state,
                plan,
                forced_tokens.tail,
                donor_ids,
                tuple(meta.id for meta in used_donors),
                1 + max(meta.generation for meta in used_donors),
                new_text(ids, donor_tokens, token_map, GUARANTEED),
                digest_of(*donor_ids, token_map.source.tobytes(), forced_tokens.forced.tobytes()),
                tuple(left_out),
                filled.proof,
                filled.lent,
                ready_event,
            )
            # A question is computed in one forward: without room in any step it would wait for ever.
            if draft.asks > self._step_rows:
                raise InputError(
                    f"the question is longer than a step: {draft.asks} tokens of at most {self._step_rows}; raise"
                    " max_num_batched_tokens, or choose blend_selector=similarity, which asks no question"
                )
            return draft
        raise InputError("; ".join(left_out) or "no donor of the blend is known any more")

    def _filled(
        self,
        token_map: TokenMap,
        donor_tokens: DonorTokens,
        first: int,
        stop: int,
        metas: Sequence[ChunkMeta],
        read: Read,
        buffers: BufferPool,
    ) -> "_PagesFilled | _BlendUseless":
        """The donors' rows of the tokens from `first` on, in target order; or the first unusable donor."""
        device, dtype, shape = self.paged.device, self.paged.dtype, self.paged.shape(len(token_map))
        buffer = buffers.lend(shape, dtype) if device.type == "cpu" else None
        state = buffer.tensor if buffer is not None else torch.empty(shape, dtype=dtype, device=device)
        # What other ranks have checked by now is not known in a thread, and all must check the same.
        proof, checked = (), self.model_check.checked if self.lockstep.ranks == 1 else 0
        # Tokens that fit in `_own` at least, where the blocks end with `stop`: no check with a donor goes further.
        checkable = max(0, self._blocks(stop) - self._blocks(first)) * self.paged.block_tokens

        for number, rows, places in donor_tokens.parts(token_map.source[first:]):
            meta = metas[number]
            proof_tokens = min(meta.num_tokens, checkable) if meta.generation == meta.position == 0 else 0
            # A state longer than any checked one proves the model further into prompts.
            proves = proof_tokens > checked
            parts, copied = read(meta.id, None if proves else ranges_of(places)), 0
            for part in () if isinstance(parts, str) else parts:
                in_part = (places >= part.first) & (places < part.stop)
                if not in_part.any():
                    continue  # the check of the model alone needs it
                part_rows, start = self._entries(part, int(places[in_part].min()), int(places[in_part].max()) + 1)
                copy_rows(part_rows.to(device), places[in_part] - start, state, rows[in_part] + first)
                copied += int(in_part.sum())
            if (
                isinstance(parts, str)
                or copied < len(places)
                or (proves and not consecutive(parts, 0, meta.num_tokens))
            ):
                # The map is made again without this donor, and another buffer lent.
                if buffer is not None:
                    buffers.take_back(buffer)
                return _BlendUseless(meta, parts if isinstance(parts, str) else "the donor's state lacks rows")
            if proves:
                proof, checked = parts, proof_tokens
        # Keys are stored rotated for the donors' places: all are turned at once to the new ones.
        positions = torch.from_numpy(donor_tokens.positions[token_map.source[first:]]).to(device)
        self.rotary.move(state[0, :, :, first:], positions, torch.arange(first, len(token_map), device=device))
        return _PagesFilled(state, proof, buffer)

    def _entries(self, part: StoredState, first: int, stop: int) -> tuple[torch.Tensor, int]:
        """KV entries of a part, of the pages that hold tokens `first` to `stop - 1`, and which token is the first of them."""
        state, block = borrowed(part.tensor), self.paged.block_tokens
        if part.meta.kind != KV:
            return state, part.first
        # Only whole pages can be read.
        low, high = (first - part.first) // block, -(-(stop - part.first) // block)
        start = part.first + low * block
        return self.paged.entries(state[0, 0, 0, low:high], min(part.first + high * block, part.stop) - start), start

    def rows_checked(self, blend: BlendState) -> int:
        """Maximum rows computed by `check`; 0 if there is nothing to check."""
        return 0 if blend.checked else self.model_check.rows(blend.draft.proof, self._own(blend))

    @torch.inference_mode()
    def check(self, blend: BlendState) -> None:
        """Check the model with a donor, in blocks of the request's own. Raises: ModelError if blends would be wrong."""
        blend.draft.wait()
        problem = self.model_check.check(blend.draft.proof, self._own(blend))
        if problem:
            raise ModelError(problem)

    def _own(self, blend: BlendState) -> tuple[int, ...]:
        """Blocks without a token that vLLM held before: others may share those."""
        return blend.block_ids[self._blocks(blend.draft.plan.first) :]

    def _blocks(self, tokens: int) -> int:
        """How many blocks so many tokens take."""
        return -(-tokens // self.paged.block_tokens)

    @torch.inference_mode()
    def begin(self, blend: BlendState) -> None:
        """Put the donors' state into the blocks and choose the rows; of several ranks the first one does. Tokens before `draft.plan.first`,
        whose blocks others may share, stay as vLLM holds them."""
        draft = blend.draft
        plan = draft.plan
        draft.wait()
        self.paged.scatter(blend.block_ids, plan.first, draft.state[:, :, :, plan.first : plan.end])
        if plan.asks:
            scores = question_attention(self.forward, self.paged, draft, blend.block_ids)
            plan = plan.with_attention(self.lockstep.summed(scores))
        # A mask, since a collective needs the same shape on every rank.
        chosen = torch.zeros(plan.end, dtype=torch.uint8, device=self.paged.device)
        chosen[plan.tokens] = 1
        blend.begin(plan, self.lockstep.of_first(chosen).nonzero().squeeze(1))

    @torch.inference_mode()
    def advance(self, blends: Sequence[BlendState], room: int) -> int:
        """Compute the next rows of these blends, at most `room`, in one forward of the model; return their number."""
        parts: list[BlendPart] = []
        runs = self.forward.most_runs
        for blend in blends:
            if room <= 0 or (runs is not None and runs <= 0):
                break
            if not len(blend.rows):
                continue
            part = blend.next(room, runs, self.paged.block_tokens)
            room -= len(part.rows.places)
            runs = None if runs is None else runs - part.rows.runs
            parts.append(part)

        if not parts:
            return 0

        def written(layer: int, prompt: int, keys: torch.Tensor, values: torch.Tensor) -> More | None:
            return parts[prompt].moved(layer, keys, values)

        self.forward.run([part.rows for part in parts], on_written=written)
        return sum(len(part.rows.places) for part in parts)

    def _embed(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        id_tensor = torch.from_numpy(np.ascontiguousarray(ids))
        vectors = self.forward.embed(id_tensor) if self._table is None else self._table[id_tensor]
        return vectors.float().cpu().numpy()


@dataclass
class BlendWorker:
    """The blends of one worker. All ranks call it in the same steps, with the same blends in the same order.

    problem  why blend must be switched off, until it is taken
    """

    blender: BlendRunner
    problem: str = ""

    def mix(self, blends: Sequence[BlendState], room: int, refused: str = "") -> None:
        """Compute at most `room` rows: checks of the model, questions, and the rows of all begun blends, in one forward.

        refused  why this rank may put nothing into blocks
        """
        if not blends:
            return
        # Agreed before anything is computed: a rank that went on alone would hang in a collective.
        if not self.blender.lockstep.each([not refused])[0]:
            for blend in blends:
                blend.problem = refused or ELSEWHERE
            return
        # First, so that blends which begin now get their first rows in the same step.
        room -= self._begun(blends, room)
        begun = [blend for blend in blends if blend.begun and not blend.over]
        if begun and room > 0:
            self._attempt(begun, lambda: self.blender.advance(begun, room))
            self._agree(begun)

    def _begun(self, blends: Sequence[BlendState], room: int) -> int:
        """Check and begin blends, in order, within the room beside the rows of begun ones; return the room taken. It counts the same if
        this rank fails: the others have gone on."""
        blend_runner, spent, moved = self.blender, 0, 0
        waiting = [blend for blend in blends if not blend.begun]
        for blend in waiting:
            rows = blend_runner.rows_checked(blend)
            if not blend.checked and rows <= room - spent:
                self._attempt([blend], lambda blend=blend: blend_runner.check(blend))
                blend.checked, spent = True, spent + rows
        self._agree(waiting)
        # Begun blends are finished before others begin, unless a step has room for both.
        pending = sum(len(blend.rows) for blend in blends)
        for blend in waiting:
            if blend.problem or not blend.checked:
                continue
            # Moving keys and writing blocks takes the engine's time, so it is counted as rows.
            asks, moves = blend.draft.asks, blend.draft.tokens // TOKENS_A_ROW
            used_room = pending + spent + moved
            if asks > room - spent:
                continue
            if used_room and used_room + asks + moves > room:
                break  # nor do those behind it begin, or it might wait for ever

            self._attempt([blend], lambda blend=blend: blend_runner.begin(blend))
            spent, moved, pending = spent + asks, moved + moves, pending + blend.draft.plan.least
        self._agree(waiting)
        return spent + moved

    def _agree(self, blends: Sequence[BlendState]) -> None:
        """Fail a blend on all ranks if one rank failed it."""
        for blend, agreed in zip(
            blends, self.blender.lockstep.each([not blend.problem for blend in blends]), strict=True
        ):
            if not agreed:
                blend.problem = blend.problem or ELSEWHERE

    def _attempt(self, blends: Sequence[BlendState], step: Callable[[], object]) -> None:
        """A blend that fails costs time, never the engine: vLLM computes its blocks."""
        try:
            step()
        except ModelError as error:
            # A fault of the model, not of this blend: no other one may be made either.
            self.problem = str(error)
            for blend in blends:
                blend.problem = f"{FAILED}: {error}"
        except Exception as error:
            log.debug("a step of a blend failed", exc_info=True)
            for blend in blends:
                blend.problem = f"{FAILED}: {type(error).__name__}"
