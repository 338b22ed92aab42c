# pyright: reportMissingImports=false
"""Messages between the scheduler side and the worker side of the connector.

All are plain values, since vLLM may send them to another process.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from dejakv.store.base import StateInfo

Tables = tuple[tuple[int, ...], ...]
"""Block ids of a request in each KV cache group; 0 for a block outside of a group's window."""

IDLE_WAIT_S = 0.004
"""Seconds that each side waits at most in an idle step for a lookup or a load.

A new request may wait for both."""


@dataclass(frozen=True)
class TimedStep:
    """Step whose duration measures the seconds of a row.

    Attributes
    ----------
    plan_time : float
        When the scheduler planned the step, by its own clock, in seconds.
    tokens : int
        Tokens computed in the step.
    """

    plan_time: float
    tokens: int


@dataclass(frozen=True)
class LoadOrder:
    """Order to put the state of tokens `start` to `stop - 1` into the request's blocks.

    Attributes
    ----------
    donors : tuple[str, ...]
        Ids of stored states to take from, the best first. Exact state has one donor.
    block_ids : Tables
        Blocks of the request in each KV cache group.
    blend_ids : tuple[int, ...]
        For a blend: token ids of the whole prompt. Empty for exact state, which is copied as it is.
    read_limit_s : float
        Seconds for reading from a bucket, as many as computing would take; 0 without a limit.
    snapshot : str
        Id of the recurrent state behind the load; empty for a model without such layers.
    """

    request_id: str
    donors: tuple[str, ...]
    block_ids: Tables
    start: int
    tokens: int
    blend_ids: tuple[int, ...] = ()
    read_limit_s: float = 0.0
    snapshot: str = ""

    @property
    def stop(self) -> int:
        """First token behind the load, which vLLM computes by itself."""
        return self.start + self.tokens


@dataclass(frozen=True)
class SnapshotOrder:
    """Order to store the recurrent state that the step leaves in these blocks.

    Attributes
    ----------
    meta : StateInfo
        Description of the snapshot.
    blocks : tuple[tuple[int, int], ...]
        KV cache group and block of each part of the state.
    """

    meta: StateInfo
    blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SaveOrder:
    """Order to store the KV of tokens `first` to `stop - 1` of the state that `meta` describes.

    Attributes
    ----------
    meta : StateInfo
        Description of the prompt, or of rows of a blend.
    block_ids : Tables
        Blocks of the prompt in each KV cache group.
    weights_generation : int
        Generation in which the prompt was computed. The worker makes no copy in another one.
    first : int
        First token of the increment. It begins a block, except for rows of a blend.
    is_first : bool
        Whether this is the first order for `meta`: then the worker asks the store for admission.
    snapshots : tuple[SnapshotOrder, ...]
        Recurrent state to store behind it. With `first` equal to `stop` nothing else is stored.
    """

    meta: StateInfo
    block_ids: Tables
    weights_generation: int
    first: int
    stop: int
    is_first: bool
    snapshots: tuple[SnapshotOrder, ...] = ()

    @property
    def name(self) -> str:
        """Name by which the worker answers this order."""
        return f"{self.meta.id}/{self.stop}{'' if self.stop > self.first else 's'}"


@dataclass
class StepPlan(KVConnectorMetadata):
    """Message from the scheduler to the worker, once in each step.

    Attributes
    ----------
    idle : bool
        Nothing is computed in this step, so waiting a moment delays nobody.
    computing : bool
        Prompt tokens are computed in this step.
    weights_generation : int
        A number that is new to the worker makes it read its weights (`generations`).
    room : int
        Tokens that vLLM's budget for the step has left.
    begin : list[str]
        Requests whose blends all ranks have fetched and begin now. A single rank begins by itself.
    drop : dict[str, str]
        Requests whose blends all ranks give up, with the reason.
    releases : frozenset[str]
        Requests whose blocks wait for the saves of this step.
    timed : TimedStep or None
        Step to report when it is over.
    """

    loads: list[LoadOrder] = field(default_factory=list[LoadOrder])
    saves: list[SaveOrder] = field(default_factory=list[SaveOrder])
    idle: bool = False
    computing: bool = False
    weights_generation: int = 0
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
    blend_depth: int


@dataclass(frozen=True)
class LoadResult:
    """Result of a finished load.

    Attributes
    ----------
    nbytes : int
        Bytes put into the blocks; 0 after a failure.
    seconds : float
        Time from the order to the end.
    computed : int
        Rows that a blend recomputed; 0 after a failure.
    problem : str
        Reason of the failure, empty after a success.
    donors : tuple[str, ...]
        Ids of the stored states that were used, the best first.
    left_out : tuple[str, ...]
        Why planned donors were not used.
    blended_rows : BlendedRows or None
        New text of a blend, for later blends once vLLM has computed the prompt's last rows.
    unpinned : bool
        State went to a GPU from memory that is not pinned, since the pool had no room.
    """

    request_id: str
    nbytes: int
    seconds: float
    computed: int = 0
    problem: str = ""
    donors: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    blended_rows: BlendedRows | None = None
    unpinned: bool = False

    @classmethod
    def together(cls, parts: "Sequence[LoadResult]") -> "LoadResult":
        """Join the ranks' results of one load: all bytes, the slowest time, the first failure."""
        # vLLM recomputes the blocks on all ranks after a failure on one.
        for part in parts:
            if part.problem:
                return part

        nbytes, seconds = sum(part.nbytes for part in parts), max(part.seconds for part in parts)
        unpinned = any(part.unpinned for part in parts)
        return replace(parts[0], nbytes=nbytes, seconds=seconds, unpinned=unpinned)


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Message from the worker to the scheduler: all that ended since the last report.

    Several ranks give one entry each.

    Attributes
    ----------
    saved : list[tuple[str, str]]
        Names of saves that ended, each with the reason if it is not in the store, else "".
    fetched : list[tuple[str, str]]
        Of several ranks alone: requests whose blends may begin here, each with the mark of what it
        begins from (`BlendDraft.mark`), empty if it cannot begin.
    rows : dict[str, int]
        Remaining rows of each blend under way.
    blend_problem : str
        Why blends must be switched off.
    weights : list[tuple[int, bool]]
        Generations, each with whether its weights are those of the start.
    changed : bool
        The weights changed without a reset.
    timed : TimedStep or None
        The step that is over, if its plan asked for its time.
    fallbacks : list[str]
        Why the kernel for blends was given up.
    """

    saved: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    fetched: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    loaded: list[LoadResult] = field(default_factory=list[LoadResult])
    rows: dict[str, int] = field(default_factory=dict[str, int])
    blend_problem: str = ""
    weights: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])
    changed: bool = False
    timed: TimedStep | None = None
    fallbacks: list[str] = field(default_factory=list[str])

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """Join the reports of two ranks; of a step's time and of a problem one is enough."""
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
            self.fallbacks + other.fallbacks,
        )
