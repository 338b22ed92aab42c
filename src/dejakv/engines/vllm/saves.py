"""Saves, on the scheduler's side: a prompt's pages are ordered as they are computed, and can be found as soon as every rank has stored them.

Each order is an increment: whole pages behind those that were ordered before, or that the store held at the lookup. The last one ends with
the prompt. What is stored stays a prefix that others find, whatever becomes of the request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dejakv.engines.vllm.generations import RESET, WeightGenerations
from dejakv.engines.vllm.lookups import LookupRunner
from dejakv.engines.vllm.messages import SaveOrder
from dejakv.engines.vllm.ranks import RankAnswers
from dejakv.engines.vllm.request import RequestState
from dejakv.engines.vllm.stats import ConnectorCounts
from dejakv.store.base import KV, ROWS, ChunkMeta

LEAST_TOKENS = 256
"""Of an increment before the last, as of a segment: fewer would be stored as smaller ones."""

BACKLOG = "backlog: the store is slower than the prompts"
ENDED = "the request ended, or became approximate, before all of it was stored"
UNPROVEN = "LoRA: which weights computed it is not proven"
TOO_LARGE = "too large: the prompt's state is larger than max_bytes"


@dataclass(frozen=True)
class SaveLimits:
    """Limits of saves.

    tokens  maximum under way; without any, a unit or rows of a blend may always begin
    unit    an increment begins at a multiple of this: of a KV block, and of a block of the store's index of prefixes
    most    tokens that the store's budget has room for, 0: no limit
    drops   vLLM drops blocks outside of a window before the next step
    by_hand the engine's owner makes its steps: there may be none behind the last answer
    """

    tokens: int = 0
    unit: int = 1
    most: int = 0
    drops: bool = False
    by_hand: bool = False

    @property
    def at_once(self) -> bool:
        """Whether to copy a step's tokens behind that step, and not behind the next one, when this one's answer tokens are out."""
        return self.drops or self.by_hand

    @property
    def least(self) -> int:
        """Tokens of an increment before the last."""
        if self.drops:
            return self.unit
        return min(max(LEAST_TOKENS // self.unit, 1), max(self.tokens // 2 // self.unit, 1)) * self.unit


@dataclass
class PendingSave:
    """A prompt, or rows of a blend, in storage for one request.

    ordered  tokens before this one are stored or ordered
    begun    there was an order
    waiting  unanswered orders
    over     why nothing more is ordered; empty while it is
    """

    meta: ChunkMeta
    request_id: str
    ordered: int
    begun: bool = False
    waiting: int = 0
    over: str = ""

    @property
    def complete(self) -> bool:
        return self.ordered == self.meta.num_tokens


@dataclass
class SavePlanner:
    """Orders to the worker, and what becomes of them. Used in the engine loop alone.

    ranks     workers that each store their part of the heads
    pending   by chunk id, what is not stored, or given up, yet
    """

    lookups: LookupRunner
    counts: ConnectorCounts
    generations: WeightGenerations
    ranks: int
    room: SaveLimits = field(default_factory=SaveLimits)
    pending: dict[str, PendingSave] = field(default_factory=dict[str, PendingSave])
    _orders: list[SaveOrder] = field(default_factory=list[SaveOrder])
    _releases: set[str] = field(default_factory=set[str])
    _under_way: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self._heard = RankAnswers[str](self.ranks)

    def order(
        self,
        tracked: RequestState,
        computed: int,
        blocks: Callable[[], Sequence[Sequence[int]]],
        *,
        release: bool = False,
    ) -> bool:
        """Order the storage of a prompt's new state, if wanted; of a blended one, once computed, of its new text alone. Returns whether a
        copy was ordered for which, with `release`, the blocks wait.

        computed  tokens whose state is in the blocks at the copy
        """
        whole, before = computed >= tracked.request.num_prompt_tokens, len(self._orders)
        metas = None if tracked.saved else self._wanted(tracked, whole=whole)
        if metas is None:
            return False

        savings = [self._saving(tracked, meta) for meta in metas]

        for saving in savings:
            if saving is not None:
                self._increment(saving, computed, blocks)
        tracked.saved = all(saving is not None and (saving.complete or saving.over) for saving in savings)
        if release and len(self._orders) > before:
            self._releases.add(tracked.request.request_id)
        return len(self._orders) > before

    def ended(self, request_id: str, why: str) -> None:
        """Order no more for a request."""
        for saving in [
            candidate
            for candidate in self.pending.values()
            if candidate.request_id == request_id and not candidate.complete
        ]:
            self._end(saving, why)

    def take(self) -> tuple[list[SaveOrder], frozenset[str]]:
        """This step's orders, and the requests whose blocks are free behind them."""
        orders, releases = self._orders, frozenset(self._releases)
        self._orders, self._releases = [], set()
        return orders, releases

    def heard(self, name: str, problem: str) -> None:
        """Take a rank's answer about an increment: "" if stored, else the problem."""
        problems = self._heard.add(name, problem)
        if problems is None:
            return
        del self._under_way[name]
        # The name is the chunk's id and the end of the increment (`SaveOrder.name`).
        saving = self.pending[name.rpartition("/")[0]]
        saving.waiting -= 1
        self._end(saving, next(filter(None, problems), ""))

    def outdate(self) -> None:
        """Index nothing that is under way: the weights may have changed."""
        # A copy, since ending one may remove it.
        for saving in list(self.pending.values()):
            self._end(saving, RESET)

    def lost(self) -> int:
        """How many prompts were to be stored whole and are not, once the workers have ended."""
        store = self.lookups.cache.store
        return sum(store.meta(saving.meta.id) is None for saving in self.pending.values() if not saving.over)

    def of_no_use(self, tracked: RequestState) -> str:
        """Why a request's state is neither stored nor assembled from stored state; empty if it may be."""
        if self.generations.problem:
            return self.generations.problem
        return "" if tracked.generation == self.generations.number else RESET

    def _wanted(self, tracked: RequestState, *, whole: bool) -> list[ChunkMeta] | None:
        """Parts of a request to store; None while unknown."""
        meta, load_result = tracked.to_save(), tracked.loaded
        if tracked.approximate:
            if not whole:
                self.ended(tracked.request.request_id, ENDED)
                return None
            if meta is None or load_result is None or load_result.kept is None or tracked.shared:
                return []  # of what was shared, the donors are not known
            tracked.kept = tracked.kept or self.lookups.rows_of(meta, load_result.kept)
            return tracked.kept

        if meta is None:
            return None if tracked.lookup is not None and tracked.found is None else []
        return [] if meta.id in self.lookups.index else [meta]

    def _saving(self, tracked: RequestState, meta: ChunkMeta) -> PendingSave | None:
        """The save for the request; None while another one stores the same."""
        saving, request = self.pending.get(meta.id), tracked.request
        if saving is None:
            load_failed = tracked.loaded is not None and tracked.loaded.problem
            # What the store had at the lookup needs no second copy, unless it may be gone by now.
            stored_tokens = (
                0 if meta.ttl or meta.kind != KV or load_failed or tracked.found is None else tracked.found.exact.tokens
            )
            # Something must be left to order: only an answered order makes the prompt findable.
            stored_tokens = min(stored_tokens, meta.num_tokens - 1) // self.room.unit * self.room.unit
            saving = PendingSave(meta, request.request_id, stored_tokens)
            self.pending[meta.id] = saving

        if saving.request_id != request.request_id:
            return None

        why = self.of_no_use(tracked)
        if not why and not self.lookups.adapters.may_store(request.lora_request):
            why = UNPROVEN
        if not why and meta.kind == KV and self.room.most and meta.num_tokens > self.room.most:
            why = TOO_LARGE
        self._end(saving, why)
        return saving

    def _increment(self, saving: PendingSave, computed: int, blocks: Callable[[], Sequence[Sequence[int]]]) -> None:
        """Orders what is new, as far as there is room: the rest may be ordered in a later step."""
        meta, unit, under_way = saving.meta, self.room.unit, sum(self._under_way.values())
        free, stop = self.room.tokens - under_way, meta.num_tokens
        if meta.kind == KV:
            # Or a limit smaller than a unit would stop all saves.
            free = max(free, 0 if under_way else unit)
            stop = stop if computed >= stop else computed // unit * unit
            stop = stop if stop - saving.ordered <= free else saving.ordered + free // unit * unit
            if stop < meta.num_tokens and stop - saving.ordered < self.room.least:
                return
        elif under_way and stop > free:
            return

        if saving.over or saving.complete:
            return

        save = SaveOrder(
            meta, tuple(map(tuple, blocks())), self.generations.number, saving.ordered, stop, begins=not saving.begun
        )
        self._orders.append(save)
        self._under_way[save.name] = stop - saving.ordered
        saving.ordered, saving.waiting, saving.begun = stop, saving.waiting + 1, True

    def _end(self, saving: PendingSave, why: str) -> None:
        """End a save, for a reason if there is one. It is forgotten when all its orders are answered."""
        saving.over = saving.over or why
        if saving.waiting or not (saving.over or saving.complete):
            return
        meta = self.pending.pop(saving.meta.id).meta
        if saving.over:
            self.counts.add("saves_dropped", saving.over)
            # All of it may be in the store by now, computed by weights that may have changed.
            if saving.over == RESET and saving.complete:
                self.lookups.index.drop(meta.id)
            return

        self.lookups.index.stored(meta)
        if meta.kind == ROWS:
            self.counts.add("rows_kept", amount=meta.num_tokens)
        else:
            self.counts.add("saves")
