"""Saves, on the scheduler side: a prompt's pages are ordered as they are computed.

A prompt can be found as soon as every rank has stored it. Each order is an increment: whole pages
behind those that were ordered before, or that the store held at the lookup. The last increment ends
with the prompt. What is stored stays a prefix that others find, whatever becomes of the request.

The whole pages of an answer follow as they fill, if the server keeps generated text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dejakv.cache import describe_snapshot
from dejakv.engines.vllm.events import BlockChain, StoreEvents
from dejakv.engines.vllm.generations import RESET, WeightGenerations
from dejakv.engines.vllm.lookups import LookupRunner
from dejakv.engines.vllm.messages import SaveOrder, SnapshotOrder
from dejakv.engines.vllm.ranks import RankAnswers
from dejakv.engines.vllm.recurrent.boundaries import BoundaryStates
from dejakv.engines.vllm.request import ConnectorCounts, RequestState
from dejakv.identity import exact_key
from dejakv.store.base import KV, ROWS, StateInfo
from dejakv.store.budgets import now
from dejakv.store.prefix_keys import PrefixKeys

MIN_INCREMENT = 256
"""Tokens of an increment before the last, as of a segment; fewer would make smaller segments."""

BACKLOG = "backlog: the store is slower than the prompts"
ENDED = "the request ended, or became approximate, before all of it was stored"
UNPROVEN = "LoRA: which weights computed it is not proven"
TOO_LARGE = "too large: the prompt's state is larger than max_bytes"


@dataclass(frozen=True)
class SaveLimits:
    """Limits of saves.

    Attributes
    ----------
    max_pending_tokens : int
        Maximum tokens under way. If none are under way, a unit or rows of a blend may always begin.
    unit : int
        An increment begins at a multiple of this: of a KV block, and of a block of the store's
        index.
    max_stored_tokens : int
        Tokens that the store's budget has room for; 0 without a limit.
    drops_blocks : bool
        vLLM drops blocks outside of a window before the next step.
    stepped_by_hand : bool
        The engine's owner makes its steps, so there may be none behind the last answer.
    state_tokens : int
        Of a model with recurrent layers: tokens whose KV entries have as many bytes as a state.
    """

    max_pending_tokens: int = 0
    unit: int = 1
    max_stored_tokens: int = 0
    drops_blocks: bool = False
    stepped_by_hand: bool = False
    state_tokens: int = 0

    @property
    def at_once(self) -> bool:
        """Whether a step's KV entries are copied right after that step.

        Otherwise they are copied after the next step, when this step's output tokens have been
        returned.
        """
        return self.drops_blocks or self.stepped_by_hand or self.state_tokens > 0

    @property
    def min_increment(self) -> int:
        """Minimum tokens of an increment; the last one of a prompt may be shorter."""
        if self.drops_blocks:
            return self.unit
        return (
            min(
                max(MIN_INCREMENT // self.unit, 1),
                max(self.max_pending_tokens // 2 // self.unit, 1),
            )
            * self.unit
        )


@dataclass
class PendingSave:
    """A prompt, or rows of a blend, in storage for one request.

    Attributes
    ----------
    ordered_tokens : int
        Tokens before this one are stored or ordered.
    begun : bool
        Whether the store was asked for admission, by an order or by the prompt's.
    unanswered : int
        Number of unanswered orders.
    end_reason : str
        Why no more is ordered; empty while more may be.
    chain : BlockChain or None
        Blocks to announce once it is stored; None without KV events.
    snapshots : dict[int, StateInfo]
        Recurrent states that are not ordered yet, by the number of tokens before them.
    """

    meta: StateInfo
    request_id: str
    ordered_tokens: int
    begun: bool = False
    unanswered: int = 0
    end_reason: str = ""
    chain: BlockChain | None = None
    snapshots: dict[int, StateInfo] = field(default_factory=dict[int, StateInfo])

    @property
    def complete(self) -> bool:
        """Whether all tokens are stored or ordered."""
        return self.ordered_tokens == self.meta.num_tokens


@dataclass
class SavePlanner:
    """Plans the saves of one server: orders to the worker, and their answers.

    Used in the engine loop alone.

    Attributes
    ----------
    ranks : int
        Workers that each store their part of the heads.
    pending : dict[str, PendingSave]
        By id, states that are neither stored nor given up yet.
    events : StoreEvents or None
        KV events; None if vLLM publishes none.
    """

    lookups: LookupRunner
    counts: ConnectorCounts
    generations: WeightGenerations
    ranks: int
    limits: SaveLimits = field(default_factory=SaveLimits)
    pending: dict[str, PendingSave] = field(default_factory=dict[str, PendingSave])
    events: StoreEvents | None = None
    _orders: list[SaveOrder] = field(default_factory=list[SaveOrder])
    _releases: set[str] = field(default_factory=set[str])
    _under_way: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self._answers = RankAnswers[str](self.ranks)

    def order(
        self,
        tracked: RequestState,
        computed: int,
        blocks: Callable[[], Sequence[Sequence[int]]],
        states: BoundaryStates | None = None,
        *,
        release: bool = False,
    ) -> bool:
        """Order the storage of a prompt's new state, if it is wanted.

        Of a blended prompt, once it is computed, only the new text is stored.

        Parameters
        ----------
        tracked : RequestState
            The request.
        computed : int
            Tokens whose state is in the blocks when the copy is made.
        blocks : Callable[[], Sequence[Sequence[int]]]
            Gives the block ids of the request in each KV cache group.
        states : BoundaryStates or None
            Recurrent states that the step leaves.
        release : bool
            Whether the request has ended, so that its blocks wait for the copy.

        Returns
        -------
        bool
            Whether a copy was ordered.
        """
        whole, before = computed >= tracked.request.num_prompt_tokens, len(self._orders)
        metas = None if tracked.saved else self._wanted(tracked, whole=whole)
        if metas is None:
            return False

        savings = [self._saving(tracked, meta) for meta in metas]
        for saving in savings:
            if saving is not None:
                self._increment(saving, computed, blocks, states or {})

        tracked.saved = all(
            saving is not None and (saving.complete or saving.end_reason) for saving in savings
        )

        if release and len(self._orders) > before:
            self._releases.add(tracked.request.request_id)
        return len(self._orders) > before

    def order_answer(
        self,
        tracked: RequestState,
        computed: int,
        blocks: Callable[[], Sequence[Sequence[int]]],
        states: BoundaryStates | None = None,
        *,
        release: bool = False,
    ) -> bool:
        """Order the storage of an answer's whole pages, if it is wanted.

        Each order doubles what is stored of the answer, since each is an entry of the store.

        Parameters
        ----------
        tracked : RequestState
            The request.
        computed : int
            Tokens of prompt and answer whose state is in the blocks when the copy is made.
        blocks : Callable[[], Sequence[Sequence[int]]]
            Gives the block ids of the request in each KV cache group.
        states : BoundaryStates or None
            Recurrent states that the step leaves.
        release : bool
            Whether the request has ended: all whole pages are ordered, and its blocks wait for the
            copy.

        Returns
        -------
        bool
            Whether a copy was ordered.
        """
        request, unit = tracked.request, self.limits.unit
        prompt, prompt_tokens = tracked.to_save_behind(), request.num_prompt_tokens
        if prompt is None or tracked.approximate or not tracked.saved or computed <= prompt_tokens:
            return False
        first = self._stored_prefix(tracked, prompt)
        if first is None:
            return False

        stop, under_way = computed // unit * unit, sum(self._under_way.values())
        free = max(self.limits.max_pending_tokens - under_way, 0 if under_way else unit)
        stop = min(stop, first + free // unit * unit)
        # By hand nobody tells of the end while a copy is possible: the first page is one already.
        least = unit if release or self.limits.stepped_by_hand else self.limits.min_increment
        doubled = 0 if release or self.limits.drops_blocks else first - prompt_tokens
        # A larger order would never find room.
        doubled = min(doubled, self.limits.max_pending_tokens // 2)
        if stop <= prompt_tokens or stop - first < max(least, doubled):
            return False
        # Pages without the state behind them cannot be taken up.
        if self.limits.state_tokens and stop not in (states or {}):
            return False

        token_ids = tuple(request.all_token_ids[:stop])
        digests = [span.digest for span in prompt.spans]
        id = exact_key(prompt.partition, prompt.epoch, token_ids, digests)
        meta = tracked.saved_answer = replace(prompt, id=id, token_ids=token_ids, created=now())
        if id in self.lookups.index or id in self.pending:
            return False

        # Its prompt was admitted, so the store is not asked again: an answer seldom comes twice.
        saving = PendingSave(meta, request.request_id, first, begun=True)
        self.pending[id] = saving
        saving.chain = self._described(request, meta)
        if states is not None and stop in states:
            keys = PrefixKeys(meta.partition, meta.epoch, token_ids, meta.spans)
            key, saved_tokens = keys.prefix_key(stop), stop - first
            saving.snapshots[stop] = describe_snapshot(meta, stop, key, saved_tokens)
        self._end(saving, self._refusal(tracked, meta))
        if saving.end_reason:
            return False
        self._submit(saving, stop, blocks, states or {})
        if release:
            self._releases.add(request.request_id)
        return True

    def _stored_prefix(self, tracked: RequestState, prompt: StateInfo) -> int | None:
        """Return before which token prompt and answer are stored or ordered, in whole units.

        None if an order failed, so that nothing behind it can be found.
        """
        before = tracked.saved_answer or prompt
        pending, unit = self.pending.get(before.id), self.limits.unit
        ordered = pending is not None and pending.complete and not pending.end_reason
        if ordered or before.id in self.lookups.index:
            return before.num_tokens // unit * unit
        # Only a prompt that was to be no entry of its own may stand in the store as a prefix.
        if tracked.saved_answer is not None or tracked.to_save() is not None:
            return None
        return self._stored_at_lookup(tracked, prompt) // unit * unit

    def ended(self, request_id: str, why: str) -> None:
        """Order no more for a request."""
        for saving in [
            candidate
            for candidate in self.pending.values()
            if candidate.request_id == request_id and not candidate.complete
        ]:
            self._end(saving, why)

    def take(self) -> tuple[list[SaveOrder], frozenset[str]]:
        """Take this step's orders, and the requests whose blocks are free behind them."""
        orders, releases = self._orders, frozenset(self._releases)
        self._orders, self._releases = [], set()
        return orders, releases

    def record_answer(self, name: str, problem: str) -> None:
        """Record a rank's answer about an increment: "" if it is stored, else the problem."""
        problems = self._answers.add(name, problem)
        if problems is None:
            return
        del self._under_way[name]
        # The name is the prompt's id and the end of the increment (`SaveOrder.name`).
        saving = self.pending[name.rpartition("/")[0]]
        saving.unanswered -= 1
        self._end(saving, next(filter(None, problems), ""))

    def outdate(self) -> None:
        """Give up all saves under way, since the weights may have changed."""
        # A copy, since ending one may remove it.
        for saving in list(self.pending.values()):
            self._end(saving, RESET)

    def lost(self) -> int:
        """Count the prompts that are not stored whole though nothing spoke against it.

        To be called when the workers have ended.
        """
        store = self.lookups.cache.store
        return sum(
            store.meta(saving.meta.id) is None
            for saving in self.pending.values()
            if not saving.end_reason
        )

    def of_no_use(self, tracked: RequestState) -> str:
        """Return why a request's state may be neither stored nor reused; empty if it may be."""
        if self.generations.problem:
            return self.generations.problem
        return "" if tracked.weights_generation == self.generations.number else RESET

    def _wanted(self, tracked: RequestState, *, whole: bool) -> list[StateInfo] | None:
        """Describe the states of a request to store; None while they are unknown."""
        meta, load_result = tracked.to_save(), tracked.load_result
        if tracked.approximate:
            if not whole:
                self.ended(tracked.request.request_id, ENDED)
                return None
            if (
                meta is None
                or load_result is None
                or load_result.blended_rows is None
                or tracked.shared_tokens
            ):
                # The donors of shared blocks are not known, so these rows could not
                # leave with them.
                return []

            tracked.stored_rows = tracked.stored_rows or self.lookups.rows_of(
                meta, load_result.blended_rows
            )
            return tracked.stored_rows

        if meta is None:
            return None if tracked.lookup is not None and tracked.lookup_result is None else []
        lookup_result = tracked.lookup_result
        lacks_snapshot = lookup_result is not None and lookup_result.lacks_snapshot
        return [] if meta.id in self.lookups.index and not lacks_snapshot else [meta]

    def _saving(self, tracked: RequestState, meta: StateInfo) -> PendingSave | None:
        """Return the save for the request, or None while another request stores the same."""
        saving, request = self.pending.get(meta.id), tracked.request
        if saving is None:
            stored_tokens = self._stored_at_lookup(tracked, meta)
            # Something must be left to order: only an answered order makes the prompt findable.
            stored_tokens = (
                min(stored_tokens, meta.num_tokens - 1) // self.limits.unit * self.limits.unit
            )
            saving = PendingSave(meta, request.request_id, stored_tokens)
            if tracked.lookup_result is not None:
                saving.snapshots |= tracked.lookup_result.snapshots
            self.pending[meta.id] = saving
            saving.chain = self._described(request, meta)

        # Two requests with one prompt would store it twice.
        if saving.request_id != request.request_id:
            return None

        self._end(saving, self._refusal(tracked, meta))
        return saving

    @staticmethod
    def _stored_at_lookup(tracked: RequestState, meta: StateInfo) -> int:
        """Return the tokens that the store had at the lookup; 0 if they may be gone by now."""
        load_failed = tracked.load_result is not None and tracked.load_result.problem
        unknown = meta.ttl or meta.kind != KV or load_failed or tracked.lookup_result is None
        if unknown or tracked.lookup_result is None:
            return 0
        return tracked.lookup_result.stored_tokens

    def _described(self, request: Any, meta: StateInfo) -> BlockChain | None:
        """Describe a state's blocks for KV events; None where it is in none."""
        if self.events is None or meta.kind != KV:
            return None
        return self.events.describe(meta.id, request, meta.num_tokens)

    def _refusal(self, tracked: RequestState, meta: StateInfo) -> str:
        """Return why a state must not be stored; empty if it may be."""
        why = self.of_no_use(tracked)
        if not why and not self.lookups.adapters.may_store(tracked.request.lora_request):
            why = UNPROVEN
        if (
            not why
            and meta.kind == KV
            and self.limits.max_stored_tokens
            and meta.num_tokens > self.limits.max_stored_tokens
        ):
            why = TOO_LARGE
        return why

    def _increment(
        self,
        saving: PendingSave,
        computed: int,
        blocks: Callable[[], Sequence[Sequence[int]]],
        states: BoundaryStates,
    ) -> None:
        """Order the new tokens as far as there is room; the rest may be ordered in a later step."""
        if saving.end_reason:
            return
        stop = self._increment_stop(saving, computed)
        wanted = any(tokens in saving.snapshots and tokens <= stop for tokens in states)
        if stop > saving.ordered_tokens or wanted:
            self._submit(saving, stop, blocks, states)

    def _increment_stop(self, saving: PendingSave, computed: int) -> int:
        """Return before which token the next order may end; where it begins if there is none."""
        meta, unit, under_way = saving.meta, self.limits.unit, sum(self._under_way.values())
        free, stop = self.limits.max_pending_tokens - under_way, meta.num_tokens

        if meta.kind == KV:
            # One unit may always begin, or a limit smaller than a unit would stop all saves.
            free = max(free, 0 if under_way else unit)
            stop = stop if computed >= stop else computed // unit * unit
            stop = (
                stop
                if stop - saving.ordered_tokens <= free
                else saving.ordered_tokens + free // unit * unit
            )
            if stop < meta.num_tokens and stop - saving.ordered_tokens < self.limits.min_increment:
                return saving.ordered_tokens
        elif under_way and stop > free:
            return saving.ordered_tokens
        return max(stop, saving.ordered_tokens)

    def _submit(
        self,
        saving: PendingSave,
        stop: int,
        blocks: Callable[[], Sequence[Sequence[int]]],
        states: BoundaryStates,
    ) -> None:
        """Order the tokens before `stop` that were not ordered before, and states behind them."""
        snapshots = tuple(
            SnapshotOrder(saving.snapshots.pop(tokens), states[tokens])
            for tokens in sorted(states)
            if tokens in saving.snapshots and tokens <= stop
        )
        # The worker asks the store for admission at the first order alone.
        save = SaveOrder(
            saving.meta,
            tuple(map(tuple, blocks())),
            self.generations.number,
            saving.ordered_tokens,
            stop,
            is_first=not saving.begun,
            snapshots=snapshots,
        )

        self._orders.append(save)
        tokens = stop - saving.ordered_tokens + len(snapshots) * self.limits.state_tokens
        self._under_way[save.name] = tokens
        saving.ordered_tokens, saving.unanswered, saving.begun = stop, saving.unanswered + 1, True

    def _end(self, saving: PendingSave, why: str) -> None:
        """End a save, for a reason if there is one.

        The save is forgotten once all its orders are answered.
        """
        saving.end_reason = saving.end_reason or why
        if saving.unanswered or not (saving.end_reason or saving.complete):
            return

        meta, chain = self.pending.pop(saving.meta.id).meta, saving.chain
        if saving.end_reason:
            self.counts.add("saves_dropped", saving.end_reason)
            # All of it may be in the store by now, computed by weights that may have changed.
            if saving.end_reason == RESET and saving.complete:
                self.lookups.index.drop(meta.id)
            return

        self.lookups.index.stored(meta)
        if self.events is not None and chain is not None:
            self.events.stored(meta.id, chain)
        if meta.kind == ROWS:
            self.counts.add("rows_kept", amount=meta.num_tokens)
        else:
            self.counts.add("saves")
