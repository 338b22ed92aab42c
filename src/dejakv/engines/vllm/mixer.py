"""Blends in the engine loop: which of them are checked, begun and computed in a step, within the room that the step has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dejakv.engines.vllm.blend import Blender
from dejakv.engines.vllm.drafts import Draft
from dejakv.engines.vllm.mixing import Mixing
from dejakv.errors import ModelError

MOST_BEGUN = 4
"""Blends that begin in a step in which others decode: each has a pass of its own for its question, and its donors' state to move, which
take time beside their rows."""

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
        """Whether there is nothing more to compute."""
        return bool(self.problem) or (self.mixing is not None and not len(self.mixing.rows))


@dataclass
class Mixer:
    """The blends of one worker. All ranks call it in the same steps, with the same blends in the same order.

    problem  why blend must be switched off, until it is taken
    """

    blender: Blender
    problem: str = ""

    def mix(self, blends: Sequence[Blending], room: int, refused: str = "", *, idle: bool = False) -> None:
        """Computes at most `room` rows: checks of the model, questions, and the rows of all that have begun, in one forward.

        idle     nothing else is computed in the step
        refused  why nothing may be put into blocks by this rank
        """
        if not blends:
            return
        if not self.blender.lockstep.each([not refused])[0]:
            for blend in blends:
                blend.problem = refused or ELSEWHERE
            return
        left = len(blends) if idle else MOST_BEGUN
        for blend in blends:
            if blend.mixing is None and left:
                room -= self._begun(blend, room)
                left -= blend.mixing is not None
        self._agree(blends)
        begun = [blend for blend in blends if not blend.over and blend.mixing is not None]
        if begun:
            mixing = [blend.mixing for blend in begun if blend.mixing is not None]
            self._attempt(begun, lambda: self.blender.advance(mixing, room))
            self._agree(begun)

    def _begun(self, blend: Blending, room: int) -> int:
        """Checks and begins a blend as far as there is room for it; how many rows that computed."""
        spent, blender = 0, self.blender
        if not blend.checked:
            rows = blender.rows_checked(blend.draft, blend.block_ids)
            if rows > room:
                return 0
            self._attempt([blend], lambda: blender.check(blend.draft, blend.block_ids))
            blend.checked, spent = True, rows
        if not blend.problem and blender.rows_asked(blend.draft) <= room - spent:
            self._attempt([blend], lambda: self._begin(blend))
            spent += blend.mixing.asked if blend.mixing is not None else 0
        return spent

    def _begin(self, blend: Blending) -> None:
        blend.mixing = self.blender.begin(blend.draft, blend.block_ids)

    def _agree(self, blends: Sequence[Blending]) -> None:
        """What one rank could not do, none has done."""
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
            for blend in blends:
                blend.problem = f"the load failed: {type(error).__name__}: {error}"
