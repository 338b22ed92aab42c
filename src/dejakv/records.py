"""What happened to one request. Everything that is printed, exported or plotted is computed from these."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

from dejakv.levels.base import Status
from dejakv.request import Sampling

Method = Literal["none", "prefix", "exact", "adopt", "blend", "top_layer"]

PIECEWISE: frozenset[str] = frozenset({"blend", "top_layer"})
"""Methods that take donors' state token by token, and compute what differs."""

APPROXIMATE: frozenset[str] = PIECEWISE | {"adopt"}
"""Methods that may change an answer."""

UNSOUND_LABEL = "[unsound reuse] "
"""Stands before every text that an ordinary model made from another prompt's top layer."""


LONGEST_REASON = 200


def short(reason: str) -> str:
    """A reason as it leaves the process: on one line, of at most `LONGEST_REASON` characters."""
    line = " ".join(reason.split())
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 3]}..."


@dataclass(frozen=True)
class Record:
    """One served request. Times in milliseconds, sizes in bytes, tokens of the prompt.

    key         exact key of the prompt: the id its own chunk has or would have
    level       the level whose donor was used (`prefix`, `exact_text`, `embedding:prompt`, ...), empty if none was
    provenance  `hit (text:exact)`, `hit (prefix)`, `miss`, ... as logs print it
    method      how the donor's state became this request's
    plans       what was considered, with the seconds that each would take: `full 0.3 s, blend 0.19 s: blend`
    order       places of the prompt's parts as they were given, in the order in which they ran; empty: as given
    arithmetic  dtype of the model: `fp32`, `bf16`, `fp16`; empty where the engine does not tell
    bitwise     the prompt's scores are those of full computation in this engine bit for bit; else they may differ by rounding, which
                in low precision changes an answer now and then
    reason      why a donor that was found was not used (a guard's words, `min_gain`, `not asked for`), else empty; see `short`.
                It holds no text of a prompt, which may be another caller's
    label       what the text begins with where it is none that the model stands for (`UNSOUND_LABEL`), else empty
    """

    request_id: str
    key: str = ""
    method: Method = "none"
    level: str = ""
    provenance: str = "miss"
    donor: str | None = None
    score: float | None = None
    reason: str = ""
    statuses: Mapping[str, Status] = field(default_factory=dict[str, Status])
    prompt_tokens: int = 0
    computed_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    encoder_runs: int = 0
    ttft_ms: float = 0.0
    latency_ms: float = 0.0
    lookup_ms: float = 0.0
    inject_ms: float = 0.0
    bytes_loaded: int = 0
    stored: bool = False
    approximate: bool = False
    arithmetic: str = ""
    bitwise: bool = False
    plans: str = ""
    order: tuple[int, ...] = ()
    label: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", short(self.reason))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_GREEDY = "greedy"
"""Entry of a chunk's `metadata`: most tokens of the answer that is stored with it, and the ids of its first; only if it is greedy."""


def greedy_note(sampling: Sampling, token_ids: Sequence[int]) -> dict[str, Any]:
    """What a chunk's `metadata` says of its answer; nothing for an answer that was sampled."""
    if not sampling.greedy or sampling.num_beams != 1 or sampling.stop:
        return {}
    return {_GREEDY: [sampling.max_new_tokens, *token_ids[:1]]}


def greedy_answer(metadata: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """The same read again: how long the greedy answer may be, None if there is none or it is not known, and its first token."""
    found = metadata.get(_GREEDY)
    numbers = cast(list[object], found) if isinstance(found, list) else []
    known = [number for number in numbers if isinstance(number, int)]
    if not known or len(known) != len(numbers) or len(known) > 2:
        return None, ()
    return known[0], tuple(known[1:])
