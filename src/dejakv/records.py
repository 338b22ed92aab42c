"""What happened to one request. Everything that is printed, exported or plotted is computed from these."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dejakv.levels.base import Status

Method = Literal["none", "prefix", "exact", "adopt", "blend"]


@dataclass(frozen=True)
class Record:
    """One served request. Times in milliseconds, sizes in bytes, tokens of the prompt.

    key         exact key of the prompt: the id its own chunk has or would have
    level       the level whose donor was used (`prefix`, `exact_text`, `embedding:prompt`, ...), empty if none was
    provenance  `hit (text:exact)`, `hit (prefix)`, `miss`, ... as logs print it
    method      how the donor's state became this request's
    plans       what was considered, with the seconds that each would take: `full 0.3 s, blend 0.19 s: blend`
    order       places of the prompt's parts as they were given, in the order in which they ran; empty: as given
    reason      why a donor that was found was not used (a guard's words, `min_gain`, `not asked for`), else empty
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
    plans: str = ""
    order: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
