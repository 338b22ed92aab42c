# pyright: reportMissingImports=false
"""Messages between the scheduler side and the worker side of the connector. Plain values: they may cross processes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from dejakv.store.base import ChunkMeta

Tables = tuple[tuple[int, ...], ...]
"""A request's blocks in each KV cache group, of equal numbers of tokens; 0 for a block outside of a group's window."""

IDLE_WAIT_S = 0.004
"""Maximum seconds that each side waits in a step without computation, for a lookup or a load; a new request may wait for both."""


@dataclass(frozen=True)
class TimedStep:
    """A step that measures the seconds of a row: time of planning, by the scheduler's clock, and tokens."""

    planned: float
    tokens: int


@dataclass(frozen=True)
class LoadOrder:
    """Put the state of tokens `start..stop-1` into the request's blocks.

    donors     stored chunks it comes from, the best first; for exact state there is one
    block_ids  of each KV cache group
    blend      token ids of the whole prompt, for approximate state; empty: exact, copied as it is
    within     seconds for reading from a bucket, as long as computing would take; 0: no limit
    """

    request_id: str
    donors: tuple[str, ...]
    block_ids: Tables
    start: int
    tokens: int
    blend: tuple[int, ...] = ()
    within: float = 0.0

    @property
    def stop(self) -> int:
        """First token that vLLM computes by itself."""
        return self.start + self.tokens


@dataclass(frozen=True)
class SaveOrder:
    """Store the KV of tokens `first..stop-1` of those described by `meta`, of the prompt whose blocks are `block_ids` in each KV cache group.

    generation  in which the prompt was computed: the copy of another one is not made
    first       begins a block, but for rows of a blend
    begins      the chunk's first order: the worker asks the store whether it wants the chunk
    """

    meta: ChunkMeta
    block_ids: Tables
    generation: int
    first: int
    stop: int
    begins: bool

    @property
    def name(self) -> str:
        """Name in the worker's answers."""
        return f"{self.meta.id}/{self.stop}"


@dataclass
class StepPlan(KVConnectorMetadata):
    """Scheduler to worker, one a step.

    idle        nothing is computed in this step, so waiting a moment costs nobody
    computing   prompt tokens are computed in this step
    room        tokens that vLLM's budget for the step has left
    begin       requests whose blends all ranks have fetched and begin now; a single rank begins by itself
    drop        requests whose blends are given up by all ranks, and why
    releases    requests whose blocks wait for the saves
    timed       to be reported when the step is over
    generation  a number that the worker has not seen yet makes it read its weights (`generations`)
    """

    loads: list[LoadOrder] = field(default_factory=list[LoadOrder])
    saves: list[SaveOrder] = field(default_factory=list[SaveOrder])
    idle: bool = False
    computing: bool = False
    generation: int = 0
    room: int = 0
    begin: list[str] = field(default_factory=list[str])
    drop: dict[str, str] = field(default_factory=dict[str, str])
    releases: frozenset[str] = frozenset()
    timed: TimedStep | None = None


@dataclass(frozen=True)
class BlendedRows:
    """New text of a blended prompt, for later blends. See `engines.base.ComputedRows`."""

    runs: tuple[tuple[int, int], ...]
    donors: tuple[str, ...]
    generation: int


@dataclass(frozen=True)
class LoadResult:
    """A finished load. `nbytes` and `computed` (rows that a blend recomputed) are 0 if it failed.

    donors    chunks that the state came from, the best first
    left_out  why donors that were planned are not among them
    kept      of a blend: its new text, once vLLM has computed the prompt's last rows
    """

    request_id: str
    nbytes: int
    seconds: float
    computed: int = 0
    problem: str = ""
    donors: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    kept: BlendedRows | None = None

    @classmethod
    def together(cls, parts: "Sequence[LoadResult]") -> "LoadResult":
        """Join the ranks' results of one load: all bytes, the slowest time, the first failure."""
        for part in parts:
            if part.problem:
                return part
        nbytes, seconds = sum(part.nbytes for part in parts), max(part.seconds for part in parts)
        return replace(parts[0], nbytes=nbytes, seconds=seconds)


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Worker to scheduler: what became of saves and loads since the last report. Of several ranks: one entry each.

    saved    names of saves that ended, each with the reason if it is not in the store, else ""
    fetched  requests whose blends may begin here, with what they begin from (`Draft.mark`); empty if they cannot. Of several
             ranks alone
    rows     of blends under way, how many remain
    weights  generation, and whether its weights are those of the start
    changed  the weights changed without a reset
    timed    the step that is over, if its plan said so
    """

    saved: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    fetched: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    loaded: list[LoadResult] = field(default_factory=list[LoadResult])
    rows: dict[str, int] = field(default_factory=dict[str, int])
    blend_problem: str = ""
    weights: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])
    changed: bool = False
    timed: TimedStep | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        assert isinstance(other, StepReport)
        return StepReport(
            self.saved + other.saved,
            self.fetched + other.fetched,
            self.loaded + other.loaded,
            self.rows | other.rows,
            self.blend_problem or other.blend_problem,
            self.weights + other.weights,
            self.changed or other.changed,
            self.timed or other.timed,
        )
