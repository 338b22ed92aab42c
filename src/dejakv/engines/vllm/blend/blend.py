"""Blends inside vLLM's worker: rows that differ are computed among the state of similar prompts.

What can be done beforehand is a `BlendDraft`, made in a thread. In the engine loop the donors'
state is put into the request's blocks, and the model runs over the rows that need it (`rows`).
These rows are the same in all layers and known before the model runs. Maps, forced tokens, ranking
and choice are those of the transformers engine (`dejakv.blend`), and are made for the whole prompt
as there. The last rows are computed by vLLM. `BlendWorker` decides which blends are checked, begun
and computed in a step, within its room.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dejakv.blend.blend import map_donors, refusal_reason
from dejakv.blend.recomputed import RecomputePlan
from dejakv.blend.settings import BlendConfig
from dejakv.blend.slices import ranges_of
from dejakv.blend.token_map import DonorTokens, TokenMap, mark_new_text
from dejakv.decide.copied.fingerprints import SHORTEST_FINDABLE_RUN
from dejakv.decide.copied.foreign import ForeignContext
from dejakv.engines.vllm.blend.donor_rows import DonorRows, donor_rows
from dejakv.engines.vllm.blend.fused import FusedCopy
from dejakv.engines.vllm.blend.model import ModelCheck, question_attention
from dejakv.engines.vllm.blend.queue import TOKENS_A_ROW
from dejakv.engines.vllm.blend.rotary import LayerRotaryTables
from dejakv.engines.vllm.blend.rows import ExtraRows, RowForward
from dejakv.engines.vllm.blend.state import BlendDraft, BlendPart, BlendState, StateReader
from dejakv.engines.vllm.pages import BufferPool, PagedKV
from dejakv.engines.vllm.ranks import ALONE, SingleRank
from dejakv.errors import InputError, ModelError
from dejakv.identity import digest_of
from dejakv.store.base import StateInfo, StoredState, consecutive_views

log = logging.getLogger("dejakv.vllm")

ELSEWHERE = "another rank could not go on"
FAILED = "the load failed"


@dataclass(frozen=True)
class _BlendUseless:
    meta: StateInfo
    reason: str


@dataclass(frozen=True)
class _PagesFilled:
    proof: Sequence[StoredState]
    rows: DonorRows


class BlendRunner:
    """Runs blends with one model.

    Parameters
    ----------
    forward : RowForward
        Forwards over rows.
    rotary : LayerRotaryTables
        Tables to move keys.
    paged : PagedKV
        The KV caches.
    config : BlendConfig
        Choice of donors and rows.
    max_positions : int
        Number of the model's positions.
    step_rows : int
        Maximum rows of a step.
    ends : NDArray[int64] or None
        Ids of tokens that end a sentence.
    lockstep : SingleRank
        The ranks that compute the same rows, each for its heads.
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
        self.fused = FusedCopy(paged, rotary)
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
        donors: Sequence[StateInfo],
        read: StateReader,
        buffers: BufferPool,
        missing_reasons: Sequence[str] = (),
    ) -> BlendDraft:
        """Draft the blend of a prompt. Call it in a thread.

        The token map needs the donors' token ids alone. Then each donor is read, its mapped rows
        are copied into lent memory, and it is released, so that at most one donor is held. A donor
        that is unreadable or of another model is left out, and the map is made of the rest.

        Parameters
        ----------
        token_ids : Sequence[int]
            The whole prompt.
        first : int
            vLLM holds the tokens before this one.
        stop : int
            vLLM computes the tokens from this one on.
        donors : Sequence[StateInfo]
            Stored prompts, the best first.
        read : StateReader
            Reads rows of a stored state.
        buffers : BufferPool
            Lends the memory for the donors' rows.
        missing_reasons : Sequence[str]
            Why further planned donors are missing.

        Raises
        ------
        InputError
            The prompt has too little in common with the donors left, is cheaper from its exact
            prefix, or has a question without room in any step.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        foreign = ForeignContext(ids, self.config.foreign_context)
        # Each round that fails drops one donor, so this ends after at most len(donors) rounds.
        usable, left_out = list(donors), list(missing_reasons)
        while usable:
            donor_tokens = DonorTokens.of(
                *(
                    foreign.hide(np.asarray(meta.token_ids, dtype=np.int64), meta.position)
                    for meta in usable
                ),
                first=[meta.position for meta in usable],
            )
            exact = [meta.generation == meta.position == 0 for meta in usable]
            token_map, forced_tokens = map_donors(
                ids, donor_tokens, self._embed, self.config, self._ends, exact, first
            )

            reason = refusal_reason(self.config, forced_tokens)
            if reason:
                raise InputError("; ".join([reason, *left_out]))

            filled = self._fill_state(token_map, donor_tokens, first, stop, usable, read, buffers)
            if isinstance(filled, _BlendUseless):
                usable.remove(filled.meta)
                left_out.append(filled.reason)
                continue

            plan = RecomputePlan.of(
                self.config,
                ids,
                donor_tokens,
                token_map,
                forced_tokens,
                first=first,
                stop=stop,
            )

            donor_ids = tuple(meta.id for meta in usable)
            # Rows of this blend that are stored leave the store with these donors.
            used_donors = [
                usable[number]
                for number in np.unique(donor_tokens.number[token_map.source[first:]]).tolist()
            ]
            draft = BlendDraft(
                torch.from_numpy(ids),
                filled.rows.state,
                plan,
                forced_tokens.tail,
                donor_ids,
                tuple(meta.id for meta in used_donors),
                1 + max(meta.generation for meta in used_donors),
                mark_new_text(ids, donor_tokens, token_map, SHORTEST_FINDABLE_RUN),
                digest_of(*donor_ids, token_map.source.tobytes(), forced_tokens.forced.tobytes()),
                tuple(left_out),
                filled.proof,
                filled.rows.buffer,
                self.paged.copies.event(),
                filled.rows.unpinned,
            )

            # A question is computed in one forward, so it would wait for ever for a larger step.
            if draft.question_rows > self._step_rows:
                raise InputError(
                    f"the question is longer than a step: {draft.question_rows} tokens of at most "
                    f"{self._step_rows}; raise"
                    " max_num_batched_tokens, or choose blend_selector=similarity, which asks no "
                    "question"
                )
            return draft
        raise InputError("; ".join(left_out) or "no donor of the blend is known any more")

    def _fill_state(
        self,
        token_map: TokenMap,
        donor_tokens: DonorTokens,
        first: int,
        check_stop: int,
        metas: Sequence[StateInfo],
        read: StateReader,
        buffers: BufferPool,
    ) -> "_PagesFilled | _BlendUseless":
        """Copy the donors' rows of the tokens from `first` on, in target order.

        Returns the first unusable donor in place of the rows if there is one.
        """
        source_positions = donor_tokens.positions[token_map.source[first:]]
        prompt_rows = donor_rows(self.paged, self.fused, buffers, source_positions, first)

        # What other ranks have checked is not known in a thread, and all must check the same.
        proof, checked = (), self.model_check.checked if self.lockstep.ranks == 1 else 0
        # At least so many tokens fit in `_exclusive_blocks`, whose end is `stop`, so no
        # check goes further.
        checkable = max(0, self._blocks(check_stop) - self._blocks(first)) * self.paged.block_tokens

        try:
            for number, rows, places in donor_tokens.parts(token_map.source[first:]):
                meta = metas[number]
                proof_tokens = (
                    min(meta.num_tokens, checkable) if meta.generation == meta.position == 0 else 0
                )

                # A state longer than any checked one proves the model further into prompts.
                proves = proof_tokens > checked
                parts, copied = read(meta.id, None if proves else ranges_of(places)), 0
                for part in () if isinstance(parts, str) else parts:
                    in_part = (places >= part.first) & (places < part.stop)
                    if not in_part.any():
                        # Only the check of the model needs this part.
                        continue

                    prompt_rows.add(part, places[in_part], rows[in_part] + first)
                    copied += int(in_part.sum())

                if (
                    isinstance(parts, str)
                    or copied < len(places)
                    or (proves and not consecutive_views(parts, 0, meta.num_tokens))
                ):
                    # The map is made again without this donor, and another buffer lent.
                    prompt_rows.release()
                    return _BlendUseless(
                        meta, parts if isinstance(parts, str) else "the donor's state lacks rows"
                    )
                if proves:
                    proof, checked = parts, proof_tokens
            prompt_rows.finish()
        except BaseException:
            prompt_rows.release()
            raise
        return _PagesFilled(proof, prompt_rows)

    def rows_checked(self, blend: BlendState) -> int:
        """Return the maximum rows that `check` computes; 0 if there is nothing to check."""
        return (
            0
            if blend.checked
            else self.model_check.rows(blend.draft.proof, self._exclusive_blocks(blend))
        )

    @torch.inference_mode()
    def check(self, blend: BlendState) -> None:
        """Check the model with a donor, in blocks of the request's own.

        Raises
        ------
        ModelError
            Blends of this model would be wrong.
        """
        self.paged.copies.wait(blend.draft.ready, blend.draft.state)
        problem = self.model_check.check(blend.draft.proof, self._exclusive_blocks(blend))
        if problem:
            raise ModelError(problem)

    def _exclusive_blocks(self, blend: BlendState) -> tuple[int, ...]:
        """Return the blocks without a token that vLLM held before, since others may share those."""
        return blend.block_ids[self._blocks(blend.draft.plan.first) :]

    def _blocks(self, tokens: int) -> int:
        """Return the number of blocks that hold so many tokens."""
        return -(-tokens // self.paged.block_tokens)

    @torch.inference_mode()
    def begin(self, blend: BlendState) -> None:
        """Put the donors' state into the blocks and choose the rows to compute.

        Of several ranks the first one chooses. Tokens before `draft.plan.first`, whose blocks
        others may share, stay as vLLM holds them.
        """
        draft = blend.draft
        plan = draft.plan
        self.paged.copies.wait(draft.ready, draft.state)
        self.fused.write(draft.state, plan.first, plan.end, blend.block_ids)

        if plan.needs_question_pass:
            scores = question_attention(self.forward, self.paged, draft, blend.block_ids)
            # The one wait of the engine loop: rows are chosen on the host.
            plan = plan.with_attention(self.lockstep.total(scores.cpu()))

        # A mask, since a collective needs the same shape on every rank.
        chosen = torch.zeros(plan.end, dtype=torch.uint8)
        chosen[plan.tokens] = 1
        blend.begin(plan, self.lockstep.broadcast_first(chosen).nonzero().squeeze(1))

    @torch.inference_mode()
    def advance(self, blends: Sequence[BlendState], room: int) -> int:
        """Compute the next rows of these blends, in one forward of the model.

        Parameters
        ----------
        blends : Sequence[BlendState]
            Begun blends, in the order in which they get room.
        room : int
            Maximum rows.

        Returns
        -------
        int
            Number of computed rows.
        """
        parts: list[BlendPart] = []
        runs, gap = self.forward.max_runs, self.forward.gap
        for blend in blends:
            if room <= 0 or (runs is not None and runs <= 0):
                break
            if not len(blend.rows):
                continue

            part = blend.next(room, runs, gap, self.fused)
            tokens, sequences = (int(counts[-1]) for counts in part.rows.cost(gap))
            room -= tokens
            runs = None if runs is None else runs - sequences
            parts.append(part)

        if not parts:
            return 0

        def correct_rows(
            layer: int, prompt: int, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor
        ) -> ExtraRows | None:
            return parts[prompt].corrected_rows(layer, key, value, rows)

        self.forward.run([part.rows for part in parts], on_written=correct_rows)
        return sum(len(part.rows.places) for part in parts)

    def _embed(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        id_tensor = torch.from_numpy(np.ascontiguousarray(ids))
        vectors = self.forward.embed(id_tensor) if self._table is None else self._table[id_tensor]
        return vectors.float().cpu().numpy()


@dataclass
class BlendWorker:
    """The blends of one worker.

    All ranks call it in the same steps, with the same blends in the same order.

    Attributes
    ----------
    problem : str
        Why blends must be switched off, until it is taken; empty if there is no reason.
    """

    blend_runner: BlendRunner
    problem: str = ""

    def mix(self, blends: Sequence[BlendState], room: int, refused: str = "") -> None:
        """Compute rows of blends: checks of the model, questions, and rows of begun blends.

        Parameters
        ----------
        blends : Sequence[BlendState]
            Blends that may begin or have begun, in order.
        room : int
            Maximum rows. The rows of all begun blends take one forward.
        refused : str
            Why this rank may put nothing into blocks; empty if it may.
        """
        if not blends:
            return
        # Agreed before anything is computed: a rank that went on alone would hang in a collective.
        if not self.blend_runner.lockstep.all_agree([not refused])[0]:
            for blend in blends:
                blend.problem = refused or ELSEWHERE
            return

        # First, so that blends which begin now get their first rows in the same step.
        room -= self._begin_blends(blends, room)

        begun = [blend for blend in blends if blend.begun and not blend.over]
        if begun and room > 0:
            self._attempt(begun, lambda: self.blend_runner.advance(begun, room))
            self._agree(begun)

    def _begin_blends(self, blends: Sequence[BlendState], room: int) -> int:
        """Check and begin blends, in order, within the room beside the rows of begun blends.

        Returns the room taken. It counts the same if this rank fails, since the others have gone
        on.
        """
        blend_runner, spent, moved = self.blend_runner, 0, 0
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
            question_rows, moves = blend.draft.question_rows, blend.draft.tokens // TOKENS_A_ROW

            used_room = pending + spent + moved
            # A question takes one forward, and perhaps a later step has room for it.
            if question_rows > room - spent:
                continue
            if used_room and used_room + question_rows + moves > room:
                # Those behind it do not begin either, or it might wait for ever.
                break

            self._attempt([blend], lambda blend=blend: blend_runner.begin(blend))
            spent += question_rows
            moved += moves
            pending += blend.draft.plan.minimum_count
        self._agree(waiting)
        return spent + moved

    def _agree(self, blends: Sequence[BlendState]) -> None:
        """Fail a blend on all ranks if it failed on one."""
        for blend, agreed in zip(
            blends,
            self.blend_runner.lockstep.all_agree([not blend.problem for blend in blends]),
            strict=True,
        ):
            if not agreed:
                blend.problem = blend.problem or ELSEWHERE

    def _attempt(self, blends: Sequence[BlendState], step: Callable[[], object]) -> None:
        """Run a step, and note its error at the blends.

        A blend that fails costs time, never the engine: vLLM computes its blocks.
        """
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
