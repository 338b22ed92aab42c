"""Blends in the engine loop: which of them are checked, begun and computed in a step, within the room that the step has."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dejakv.engines.vllm.blend.blend import Blender
from dejakv.engines.vllm.blend.drafts import Draft
from dejakv.engines.vllm.blend.mixing import Mixing
from dejakv.engines.vllm.blend.queue import TOKENS_A_ROW
from dejakv.errors import ModelError

log = logging.getLogger("dejakv.vllm")

ELSEWHERE = "another rank could not go on"


@dataclass
class Blending:
    """One blend, from the moment when it may begin.

    checked  the model was checked with its donors as far as is needed
    mixing   None until its donors' state is in the blocks
    problem  why it is given up, empty if it is not
    """

    draft: Draft
    block_ids: tuple[int, ...]
    checked: bool = False
    mixing: Mixing | None = None
    problem: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing is left to compute."""
        return bool(self.problem) or (self.mixing is not None and not len(self.mixing.rows))

    @property
    def rows(self) -> int:
        """Rows of steps that it still takes."""
        if self.mixing is not None:
            return len(self.mixing.rows)
        draft = self.draft
        return draft.asks + draft.tokens // TOKENS_A_ROW + draft.plan.least


@dataclass
class Mixer:
    """The blends of one worker. All ranks call it in the same steps, with the same blends in the same order.

    problem  why blend must be switched off, until it is taken
    """

    blender: Blender
    problem: str = ""

    def mix(self, blends: Sequence[Blending], room: int, refused: str = "") -> None:
        """Compute at most `room` rows: checks of the model, questions, and the rows of all begun blends, in one forward.

        refused  why this rank may put nothing into blocks
        """
        if not blends:
            return
        if not self.blender.lockstep.each([not refused])[0]:
            for blend in blends:
                blend.problem = refused or ELSEWHERE
            return
        room -= self._begun(blends, room)
        begun = [blend for blend in blends if not blend.over and blend.mixing is not None]
        if begun and room > 0:
            mixing = [blend.mixing for blend in begun if blend.mixing is not None]
            self._attempt(begun, lambda: self.blender.advance(mixing, room))
            self._agree(begun)

    def _begun(self, blends: Sequence[Blending], room: int) -> int:
        """Check and begin blends, in order, within the room beside the rows of begun ones; return the room taken. It counts the same if
        this rank fails: the others have gone on."""
        blender, spent, moved = self.blender, 0, 0
        waiting = [blend for blend in blends if blend.mixing is None]
        for blend in waiting:
            rows = 0 if blend.checked else blender.rows_checked(blend.draft, blend.block_ids)
            if not blend.checked and rows <= room - spent:
                self._attempt([blend], lambda blend=blend: blender.check(blend.draft, blend.block_ids))
                blend.checked, spent = True, spent + rows
        self._agree(waiting)
        pending = sum(len(blend.mixing.rows) for blend in blends if blend.mixing is not None)
        for blend in waiting:
            if blend.problem or not blend.checked:
                continue
            asks, moves = blend.draft.asks, blend.draft.tokens // TOKENS_A_ROW
            taken = pending + spent + moved
            if asks > room - spent:
                continue
            if taken and taken + asks + moves > room:
                break  # nor do those behind it begin, or it might wait for ever
            self._attempt([blend], lambda blend=blend: self._begin(blend))
            spent, moved, pending = spent + asks, moved + moves, pending + blend.draft.plan.least
        self._agree(waiting)
        return spent + moved

    def _begin(self, blend: Blending) -> None:
        blend.mixing = self.blender.begin(blend.draft, blend.block_ids)

    def _agree(self, blends: Sequence[Blending]) -> None:
        """Fail a blend on all ranks if one rank failed it."""
        for blend, fine in zip(
            blends, self.blender.lockstep.each([not blend.problem for blend in blends]), strict=True
        ):
            if not fine:
                blend.problem = blend.problem or ELSEWHERE

    def _attempt(self, blends: Sequence[Blending], step: Callable[[], object]) -> None:
        """A blend that fails costs time, never the engine: vLLM computes its blocks."""
        try:
            step()
        except ModelError as error:
            self.problem = str(error)
            for blend in blends:
                blend.problem = f"the load failed: {error}"
        except Exception as error:
            log.debug("a step of a blend failed", exc_info=True)
            for blend in blends:
                blend.problem = f"the load failed: {type(error).__name__}"
