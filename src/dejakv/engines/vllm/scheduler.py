"""The connector's scheduler side: what is looked up, loaded and saved, decided request by request.

It runs in vLLM's engine loop, so it never waits: lookups run in threads (`None` tells vLLM to ask again), and everything
that touches KV is ordered from the worker and confirmed by it.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cachetools import LRUCache

from dejakv.blend.forced import LONGEST_TAIL
from dejakv.engines.vllm.blend.names import ApproximateNames
from dejakv.engines.vllm.blend.queue import TOKENS_A_ROW, BlendQueue, StepRoom, WaitingBlend
from dejakv.engines.vllm.generations import CHANGED, WeightGenerations
from dejakv.engines.vllm.lookups import LookupRunner
from dejakv.engines.vllm.messages import IDLE_WAIT_S, LoadOrder, LoadResult, StepPlan, StepReport
from dejakv.engines.vllm.ranks import RankAnswers, UnderWay
from dejakv.engines.vllm.request import LookupResult, RequestState
from dejakv.engines.vllm.saves import BACKLOG, ENDED, SaveLimits, SavePlanner
from dejakv.engines.vllm.settings import ConnectorSettings, RequestOptions
from dejakv.engines.vllm.stats import ConnectorCounts
from dejakv.engines.vllm.upstream import shows_label, sibling_of, was_aborted

log = logging.getLogger("dejakv.vllm")

NO_GAIN = "no gain under load: full computation is done before it, or costs hardly more"
"""Why a blend or a load is refused."""

FAR = "no gain: the state is in a bucket, and computing takes less time than reading it"
"""Why nothing is loaded."""

TOO_LONG = "too long: what a blend starts from would be larger than max_pending_bytes"
"""Why a prompt is not blended."""

UNLABELLED = (
    "unlabelled answers: vLLM shows no label of this one (a stream, a beam, or a further prompt of one call): put dejakv.adopt.ServerMiddleware before the "
    "server, or set unlabelled_answers"
)
"""Why a prompt is not blended."""

_SAMPLED = 4096
"""Requests with several samples whose labels are kept until the last sample ends."""


@dataclass
class SchedulerSide:
    """The connector in vLLM's scheduler, one instance.

    names        under which blended blocks are shared
    no_blend     why blend is not possible here, empty if it is
    max_tokens   maximum tokens of a step of vLLM
    save_room    limits of saves; a blend's draft is no larger
    arithmetic   dtype of the model and of its state: `fp32`, `bf16` or `fp16`
    bitwise      exact state has the same bits as if it were computed now (`upstream.is_batch_invariant`)
    whole        use only states that leave a single token to compute (`upstream.decodes_alone_behind`)
    ranks        workers that each carry out and answer every order, for their part of the heads
    """

    settings: ConnectorSettings
    lookups: LookupRunner
    names: ApproximateNames
    counts: ConnectorCounts
    no_blend: str = ""
    max_tokens: int = 0
    ranks: int = 1
    save_room: SaveLimits = field(default_factory=SaveLimits)
    arithmetic: str = ""
    bitwise: bool = False
    whole: bool = False
    requests: dict[str, RequestState] = field(default_factory=dict[str, RequestState])
    _loads: list[LoadOrder] = field(default_factory=list[LoadOrder])
    _approximate_samples: LRUCache[str, bool] = field(default_factory=lambda: LRUCache(_SAMPLED))
    """Whether an ended sample of a request (`n` above 1) was approximate; the latest requests."""

    def __post_init__(self) -> None:
        self.generations = WeightGenerations(self.lookups.adapters.base, self.ranks)
        self.saves = SavePlanner(self.lookups, self.counts, self.generations, self.ranks, self.save_room)
        self.blends = UnderWay(self.ranks)
        self.queue = BlendQueue(self.max_tokens)
        self._loads_heard = RankAnswers[LoadResult](self.ranks)

    def new_request(self, request: Any) -> None:
        """Start the lookup of a request that vLLM has just accepted."""
        options = RequestOptions.of(request.kv_transfer_params, self.settings)
        # For every request: also one without reuse may bind an id to another folder.
        self.lookups.adapters.note(request.lora_request)
        tracked = RequestState(
            request, options, None, self._deadline(), reason=options.problem, generation=self.generations.number
        )
        why = self._not_for_us(request)
        if why:
            tracked.reason, tracked.settled = why, True
        else:
            if options.mode == "blend" and (self.no_blend or request.lora_request is not None):
                tracked.reason = self.no_blend or "blend is not for requests with a LoRA adapter"
                options = replace(options, mode="exact")
            elif options.mode == "blend" and not self._labelled(options, request):
                tracked.reason, options = UNLABELLED, replace(options, mode="exact")
                self.counts.add("blends_refused", UNLABELLED)
            if request.sampling_params.prompt_logprobs is not None:
                tracked.reason, tracked.settled = "prompt_logprobs need every prompt token computed", True
            elif request.skip_reading_prefix_cache:
                tracked.reason, tracked.settled = "skip_reading_prefix_cache", True
            tracked.wish = options
            tracked.loadable = options.mode != "off" and not tracked.settled
            # Until the workers have answered, the epoch to look under is not known.
            if not self.generations.unknown:
                tracked.lookup = self.lookups.submit(request, options)

        self.requests[request.request_id] = tracked

    def matched_tokens(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Number of tokens to load beyond `local`; None while unknown, or for vLLM to look in its own cache again."""
        tracked = self.requests.get(request.request_id)
        if tracked is None:
            return 0, False
        gain, later = self._matched(tracked, request, local)
        if gain is not None:
            blends = gain > 0 and tracked.found is not None and tracked.found.method == "blend"
            self.names.settle(tracked, local, blends=blends)
        return gain, later

    def _matched(self, tracked: RequestState, request: Any, local: int) -> tuple[int | None, bool]:
        # First, since a reset may have come after the lookup.
        why = self.saves.of_no_use(tracked)
        if why:
            tracked.used = 0
            return self._no(tracked, tracked.reason or why), False
        if request.num_preemptions > tracked.preempted:
            self._start_again(tracked)
        if tracked.settled:
            return 0, False
        if tracked.lookup is None:
            return self._begin_lookup(tracked)
        if tracked.found is None:
            if tracked.lookup.done():
                tracked.take(tracked.lookup.result())
            elif time.monotonic() < tracked.deadline:
                return None, False
            else:
                late = f"the lookup took longer than {self.settings.lookup_timeout_s:g} s"
                tracked.take(LookupResult(reason=late))
            assert tracked.found is not None
            self.counts.looked_up(tracked.found)

        if tracked.wish.mode == "blend" and self._shares(tracked, tracked.found, local):
            return None, False
        gain = self._loadable(tracked, request, local)
        return gain, bool(gain)

    def _start_again(self, tracked: RequestState) -> None:
        """Look up a preempted request again: its blocks are gone, and what was loaded with them."""
        tracked.preempted = tracked.request.num_preemptions
        tracked.used, tracked.loaded, tracked.held = 0, None, 0
        if tracked.loadable and tracked.found is not None:
            tracked.start_again(self.lookups.submit(tracked.request, tracked.wish), self._deadline())

    def _begin_lookup(self, tracked: RequestState) -> tuple[int | None, bool]:
        """Look up a request that came before the workers' answers about their weights."""
        if not self.generations.unknown:
            tracked.lookup, tracked.deadline = self.lookups.submit(tracked.request, tracked.wish), self._deadline()
        elif time.monotonic() >= tracked.deadline:
            return self._no(tracked, "what weights the workers have is not known yet"), False
        return None, False

    def _shares(self, tracked: RequestState, lookup_result: LookupResult, local: int) -> bool:
        """Whether vLLM is to look for the prompt again: for blended blocks by their names, or because another request is making them.

        What is exact is preferred where it serves as much. A prompt that was blended before is computed in full where nothing else is
        under way, and so is one whose state would have been blended too often.
        """
        request = tracked.request
        if self.no_blend or request.mm_features or lookup_result.withheld:
            return False
        exact = lookup_result.exact
        exact_stop = max(local, exact.tokens)
        tracked.shares = self.names.awaits(tracked, exact_stop)
        if tracked.shares:
            return True
        if tracked.names is not None:
            return False

        cached_tokens, blend_depth = self.names.cached(tracked, local)
        cached_stop, min_gain = local + cached_tokens, max(1, self.settings.min_gain)
        if cached_stop - exact_stop < min_gain:
            return False
        if (
            lookup_result.method == "blend"
            and lookup_result.saves(cached_stop, self._stop(lookup_result, request)) >= min_gain
        ):
            blend_depth = max(lookup_result.generation, blend_depth + 1)
        why = "blended too often" if blend_depth > self.names.most else ""
        # With nothing else under way full computation delays nobody, and its state is exact.
        if len(self.requests) == 1 and self.names.served(lookup_result.key):
            why = "blended before"
        if why:
            tracked.found = replace(
                exact, reason=f"computed in full: {why}", key=lookup_result.key, save=lookup_result.save
            )
            return False
        return self.names.rename(tracked, local)

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external: int) -> None:
        """Order the promised load, into the blocks that vLLM gave the request in each KV cache group."""
        tracked = self.requests.get(request.request_id)
        if tracked is None or tracked.settled or external <= 0 or tracked.found is None:
            return

        lookup_result = tracked.found
        stop = self._stop(lookup_result, request)
        blend_ids: tuple[int, ...] = ()
        self.queue.promised(external, self._rows(lookup_result))
        if lookup_result.method == "blend":
            blend_ids = tuple(request.prompt_token_ids)
            tracked.blended = max(lookup_result.generation, tracked.blended + 1)
            self.names.makes(tracked)
            self.blends.ordered(request.request_id)

        first, blocks = stop - external, tuple(map(tuple, tables))
        read_limit_s = self._within(lookup_result, first, stop)
        self._loads.append(
            LoadOrder(request.request_id, lookup_result.donors, blocks, first, external, blend_ids, read_limit_s)
        )
        tracked.settled, tracked.used, tracked.loaded = True, external, None

    def room(self) -> StepRoom:
        """Budget of vLLM's next step to leave to loads and blends."""
        queue, keys, decoding = list[WaitingBlend](), set[str](), 0
        for tracked in sorted(self.requests.values(), key=lambda each: each.request.priority):  # those alike by arrival
            request, lookup_result = tracked.request, tracked.expected
            name, remaining = request.request_id, request.num_prompt_tokens - request.num_computed_tokens
            if tracked.used and tracked.loaded is None:
                queue.append(WaitingBlend(name, 0, "loads", self.blends.rows.get(name, 0), remaining))
            elif remaining <= 0:
                decoding += 1
            elif request.num_computed_tokens:
                due = remaining <= tracked.used  # else most of the prompt is computed, as any other is
                queue.append(WaitingBlend(name, remaining, "due" if due else "runs", saved=tracked.spared))
            elif (tracked.shares and not tracked.settled) or (
                lookup_result.method == "blend" and lookup_result.key in keys
            ):
                queue.append(WaitingBlend(name, 0))  # one before it makes the same blocks
            else:
                loads = lookup_result.method == "exact" or (lookup_result.method == "blend" and not self.no_blend)
                keys |= {lookup_result.key} - {""} if lookup_result.method == "blend" else set()
                rows, last = (
                    self._rows(lookup_result) if loads else None,
                    remaining - self._stop(lookup_result, request),
                )
                queue.append(WaitingBlend(name, remaining - self.names.held(tracked), rows=rows, last=last))
        return self.queue.share_out(queue, decoding)

    def plan_step(self, output: Any, blocks_of: Any) -> StepPlan:
        """Return the worker's orders for a step. `blocks_of(request_id)`: block ids of a request in each KV cache group."""
        running = [self.requests[name] for name in output.num_scheduled_tokens if name in self.requests]
        self.lookups.adapters.step(tracked.request.lora_request for tracked in running)
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        # The copy is made behind this step, so what it computes is there by then.
        if self.save_room.at_once:
            computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            computed = {name: count + output.num_scheduled_tokens[name] for name, count in computed.items()}
        for tracked in running:
            name = tracked.request.request_id
            if name in computed:
                self.saves.order(tracked, computed[name], partial(blocks_of, name))

        computing = any(t.request.num_computed_tokens < t.request.num_prompt_tokens for t in running)
        idle = output.total_num_scheduled_tokens == 0
        saves, releases = self.saves.take()
        if idle:
            looking = [t for t in self.requests.values() if t.lookup is not None and t.found is None]
            waiting = [t.lookup for t in looking if t.lookup is not None]
            if waiting and not self._loads and not saves:
                wait(waiting, IDLE_WAIT_S, FIRST_COMPLETED)  # nothing is computed: leave the interpreter to the lookups

        loads, self._loads = self._loads, []
        room = self.queue.stepped(output.total_num_scheduled_tokens)
        begin, drop = self.blends.orders()
        number = self.generations.number
        # Blends and reading the weights would be measured as if they were rows.
        timed = self.lookups.pace.planned(output, alone=not (self.blends.rows or self.generations.unknown))
        return StepPlan(loads, saves, idle, computing, number, room, begin, drop, releases, timed)

    def heard(self, report: StepReport) -> None:
        """Take in the worker's report of a step."""
        # First, since taking in the rest is no part of the step's time.
        self.lookups.pace.over(report.timed)
        for name, why in report.saved:
            self.saves.heard(name, why)
        for request_id, mark in report.fetched:
            self.blends.fetched(request_id, mark)
        self.blends.remain(report.rows)

        for load_result in report.loaded:
            parts = self._loads_heard.add(load_result.request_id, load_result)
            if parts is not None:
                self._heard_load(LoadResult.together(parts))

        if report.blend_problem:
            self.no_blend = report.blend_problem
        for number, same in report.weights:
            self.generations.heard(number, same)
            self.lookups.adapters.base = self.generations.epoch
        # Last: it begins a generation, and the answers above are about the one before.
        if report.changed:
            self.reset(CHANGED)

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any]]:
        """End a request. Returns whether its blocks must wait for a copy, and the parameters for the client."""
        tracked = self.requests.pop(request.request_id, None)
        if tracked is None:
            return False, {}
        self.blends.abandoned(request.request_id)
        aborted = was_aborted(request)
        self.names.over(tracked, answered=not aborted)
        # A server without loads need not compute it either.
        if aborted and not request.num_output_tokens:
            self.queue.failed(request.num_computed_tokens)

        computed = request.num_computed_tokens >= request.num_prompt_tokens and request.num_output_tokens > 0
        last = computed and all(tables) and not aborted
        waits = last and not self.save_room.by_hand  # nobody may make the step that would free the blocks
        holds = waits and self.saves.order(tracked, request.num_prompt_tokens, lambda: tables, release=True)
        # Behind the last order: what is not ordered by now never will be.
        self.saves.ended(request.request_id, BACKLOG if last else ENDED)
        if tracked.lookup is not None:
            tracked.lookup.cancel()

        approximate = self._any_approximate(tracked)
        if not approximate and not tracked.tells:
            return holds, {}
        label = {"approximate": approximate, "arithmetic": self.arithmetic, "bitwise": self.bitwise and not approximate}
        return holds, {"dejakv": {**tracked.told(), **label}}

    def _labelled(self, options: RequestOptions, request: Any) -> bool:
        """Tell whether the client will see that this request's answer is approximate, or does not want to."""
        return options.labelled or self.settings.unlabelled_answers or shows_label(request)

    def _any_approximate(self, tracked: RequestState) -> bool:
        """Tell whether this answer, or an ended sample that is given out together with it, is approximate."""
        parent = sibling_of(tracked.request.request_id)
        if not parent:
            return tracked.approximate
        self._approximate_samples[parent] = tracked.approximate or self._approximate_samples.get(parent, False)
        return self._approximate_samples[parent]

    def reset(self, problem: str = "") -> None:
        """Begin a generation: the weights may have changed, so nothing stored, under way or being computed is used as exact.

        problem  why nothing may be stored or used after this reset either
        """
        self.generations.begin(problem)
        self.lookups.adapters.base = self.generations.epoch
        self.saves.outdate()

    def close(self) -> None:
        """End. vLLM has ended the workers by now, perhaps while they were storing."""
        lost = self.saves.lost()
        if lost:
            log.warning(
                "stopped before %d prompt%s could be stored: %s computed again when asked for",
                lost,
                *(("", "it is") if lost == 1 else ("s", "they are")),
            )
        self.lookups.close()

    def _heard_load(self, load_result: LoadResult) -> None:
        self.blends.ended(load_result.request_id)
        self.names.made(load_result.request_id)
        tracked = self.requests.get(load_result.request_id)
        self.counts.loaded(load_result)
        if tracked is None:
            return
        if load_result.problem:  # vLLM frees the blocks and asks again
            self.queue.failed(tracked.used)
            tracked.reason, tracked.used = load_result.problem, 0
            # An exact prefix may still be loaded when vLLM asks again.
            tracked.settled = not self._instead(tracked)

        if load_result.left_out:
            tracked.reason = f"{len(load_result.left_out)} of the donors left out: {load_result.left_out[0]}"
        tracked.loaded = load_result

    @staticmethod
    def _instead(tracked: RequestState) -> bool:
        """Give up a blend. Returns whether there is an exact prefix to take."""
        lookup_result = tracked.found
        if lookup_result is None or lookup_result.instead is None:
            return False
        tracked.found = replace(lookup_result.instead, key=lookup_result.key, save=lookup_result.save)
        return True

    def _rows(self, lookup_result: LookupResult) -> int:
        """Estimate the tokens of a blend in the budget: the worker knows them once it has read the donors. 0 of an exact load."""
        if lookup_result.method != "blend":
            return 0
        return (
            max(1, lookup_result.rows - self.settings.blend_tail) + lookup_result.tokens // TOKENS_A_ROW + LONGEST_TAIL
        )

    def _deadline(self) -> float:
        return time.monotonic() + self.settings.lookup_timeout_s

    def _not_for_us(self, request: Any) -> str:
        if self.lookups.cache.off:
            return self.lookups.cache.off
        if request.pooling_params is not None or request.sampling_params is None:
            return "not a generating request"
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return "prompt embeddings have no token ids to key by"
        if request.resumable:
            return "streaming input"
        if request.num_prompt_tokens < self.settings.min_tokens:
            return f"shorter than min_tokens={self.settings.min_tokens}"
        return ""

    def _loadable(self, tracked: RequestState, request: Any, local: int) -> int | None:
        """Tokens to load beyond `local`, 0 with a reason where loading is not allowed or not worth it; None if the next step tells."""
        lookup_result = tracked.found
        assert lookup_result is not None
        if lookup_result.method == "none" or not lookup_result.donors:
            return self._no(tracked, tracked.reason or lookup_result.reason)
        # Once more, since the adapter's files may have changed after the lookup.
        doubt = self.lookups.adapters.doubt(request.lora_request)
        if doubt:
            return self._no(tracked, doubt)

        stop = self._stop(lookup_result, request)
        gain = lookup_result.saves(local, stop)
        if gain < max(1, self.settings.min_gain):
            return self._no(
                tracked, f"{gain} tokens beyond vLLM's own prefix hit, min_gain is {self.settings.min_gain}"
            )

        if self.whole and stop < request.num_tokens - 1:
            return self._no(
                tracked, "this attention backend computes a single token behind stored ones, and more are left"
            )
        # Seconds of a token: all `stop` tokens would be read, only the gain be computed.
        if lookup_result.away * gain > self._within(lookup_result, local, stop) * stop > 0:
            return self._exactly(tracked, request, local, FAR)
        pays = self.queue.pays(request.request_id, self._rows(lookup_result), request.num_prompt_tokens - stop)
        if lookup_result.method != "blend" and pays is False:
            return self._no(tracked, NO_GAIN)
        if lookup_result.method == "blend":
            if self.no_blend:
                return self._no(tracked, self.no_blend)
            too_long = request.num_prompt_tokens > self.save_room.tokens
            if pays is None and not too_long:  # looked up since the step's budget was shared out
                return None
            if too_long or not pays:
                return self._exactly(tracked, request, local, TOO_LONG if too_long else NO_GAIN)
            if not self.names.rename(tracked, local):
                return self._no(tracked, "no full block lies beyond the local prefix")

        tracked.reason = tracked.reason or lookup_result.reason  # why an exact prefix is loaded and no blend made
        return stop - local

    def _exactly(self, tracked: RequestState, request: Any, local: int, why: str) -> int | None:
        """As `_loadable`, of the exact prefix that may be taken instead. Counts a refused blend."""
        tracked.reason = why
        if tracked.found is not None and tracked.found.method == "blend":
            self.counts.add("blends_refused", why)
        return self._loadable(tracked, request, local) if self._instead(tracked) else self._no(tracked, why)

    def _within(self, lookup_result: LookupResult, first: int, stop: int) -> float:
        """Seconds for reading the state of tokens `first` to `stop - 1` from a bucket; 0: it is on this machine, or unknown."""
        costs = self.lookups.pace.costs
        if not lookup_result.away or costs is None:
            return 0.0
        # Not 0, which would mean that there is no limit.
        return max(1e-3, costs.rows(stop - first - lookup_result.rows, stop, first))

    @staticmethod
    def _no(tracked: RequestState, reason: str) -> int:
        tracked.settled, tracked.reason = True, reason
        return 0

    def _stop(self, lookup_result: LookupResult, request: Any) -> int:
        """First token that vLLM computes by itself."""
        last = request.num_prompt_tokens - (self.settings.blend_tail if lookup_result.method == "blend" else 1)
        return max(0, min(lookup_result.tokens, last))
