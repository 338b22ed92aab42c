# pyright: reportMissingImports=false
"""An answer's log probabilities along given tokens: from the run itself as far as it said the same, else from its repetition."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dejakv.engines.vllm.found import Found

if TYPE_CHECKING:
    from dejakv.engines.vllm.traces import Trace


def continued(
    trace: "Trace | None", answer: Sequence[int], repeat: Callable[[tuple[int, ...]], "Trace | None"]
) -> Callable[[Sequence[int]], NDArray[np.float32] | None]:
    """`Completion.continued` of a traced run that gave `answer`. `repeat` runs it again along given tokens, and is called only
    where the run itself went another way."""

    def scored(tokens: Sequence[int]) -> NDArray[np.float32] | None:
        if trace is None or not tokens:
            return None
        equal = next((i for i, (a, b) in enumerate(zip(answer, tokens, strict=False)) if a != b), len(answer))
        rows = {place: row for place, row in trace.rows.items() if place <= equal}
        if any(place not in rows for place in range(len(tokens))):
            again = repeat(tuple(tokens))
            if again is None:
                return None
            rows = again.rows | rows
        return _log_softmax([rows[place] for place in range(len(tokens))])

    return scored


def what_to_repeat(told: dict[str, Any], tokens: int) -> Found:
    """What the connector is to do for the repetition of a request of which it said `told`: blend from the same donors, else
    nothing, since vLLM's prefix cache holds what it loaded."""
    if told.get("method") == "blend":
        return Found("blend", tuple(told["donors"]), tokens, told["level"], told["score"])
    return Found()


def repeated(told: dict[str, Any], again: dict[str, Any]) -> bool:
    """Whether a blend was repeated as it was: from the same donors, and over as many rows. Without a blend it always was."""
    same = ("method", "donors", "tokens_reused", "tokens_recomputed")
    return told.get("method") != "blend" or all(told[name] == again.get(name) for name in same)


def _log_softmax(rows: Sequence[Any]) -> NDArray[np.float32]:
    import torch

    return torch.stack(list(rows)).float().log_softmax(-1).cpu().numpy()
