"""Scheduler side of the connector: decides for each request what is looked up, loaded and saved.

The scheduler side runs in vLLM's engine loop, so it never waits. Lookups run in threads (`None`
tells vLLM to ask again). Everything that touches KV is ordered from the worker, which confirms it.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cachetools import LRUCache

from dejakv import tracing
from dejakv.blend.forced import LONGEST_TAIL
from dejakv.engines.vllm.blend.names import ApproximateNames
from dejakv.engines.vllm.blend.queue import TOKENS_A_ROW, BlendQueue, StepRoom, WaitingBlend
from dejakv.engines.vllm.events import StoreEvents
from dejakv.engines.vllm.generations import CHANGED, WeightGenerations
from dejakv.engines.vllm.lookups import LookupRunner
from dejakv.engines.vllm.messages import IDLE_WAIT_S, LoadOrder, LoadResult, StepPlan, StepReport
from dejakv.engines.vllm.ranks import RankAnswers, UnderWay
from dejakv.engines.vllm.recurrent.boundaries import boundary_states
from dejakv.engines.vllm.request import ConnectorCounts, LookupResult, RequestState
from dejakv.engines.vllm.settings import ConnectorSettings, RequestOptions
from dejakv.engines.vllm.transfers.saves import BACKLOG, ENDED, SaveLimits, SavePlanner
from dejakv.engines.vllm.upstream import keep_state_at, shows_label, sibling_of, was_aborted

log = logging.getLogger("dejakv.vllm")

NO_GAIN = "no gain under load: full computation is done before it, or costs hardly more"
"""Reason for refusing a blend or a load."""

FAR = "no gain: the state is in a bucket, and computing takes less time than reading it"
"""Reason for loading nothing."""

TOO_LONG = "too long: what a blend starts from would be larger than max_pending_bytes"
"""Reason for not blending a prompt."""

SMALL_SHARE = "min_gain_share: nearly all behind the exact prefix would be computed in a blend, too"
"""Reason for not blending a prompt."""

UNLABELLED = (
    "unlabelled answers: vLLM shows no label of this one (a stream, a beam, or a further prompt of "
    "one call): put dejakv.adopt.ServerMiddleware before the "
    "server, or set unlabelled_answers"
)
"""Reason for not blending a prompt whose answer would bear no label."""

_SAMPLED = 4096
"""Number of requests with several samples whose labels are remembered for the last sample."""


@dataclass
class SchedulerSide:
    """Connector in vLLM's scheduler, one instance.

    Attributes
    ----------
    names : ApproximateNames
        Names under which blended blocks are shared.
    no_reuse : str
        Why nothing is stored or reused here; empty if something is.
    no_blend : str
        Why blends are not possible here; empty if they are.
    recurrent_groups : tuple[int, ...]
        KV cache groups of recurrent layers.
    max_tokens : int
        Maximum tokens of a step of vLLM.
    ranks : int
        Workers that each carry out and answer every order, for their part of the heads.
    save_limits : SaveLimits
        Limits of saves; the draft of a blend is no larger.
    arithmetic : str
        Dtype of the model and of its state: `fp32`, `bf16` or `fp16`.
    bitwise : bool
        Exact state has the same bits as if it were computed now (`upstream.is_batch_invariant`).
    whole_only : bool
        Use only states that leave a single token to compute (`upstream.decodes_alone_behind`).
    draft_tokens : int
        Maximum tokens that speculative decoding drafts for a request in a step.
    events : StoreEvents or None
        KV events of the store; None if vLLM publishes none.
    requests : dict[str, RequestState]
        Live requests by vLLM's id.
    """

    settings: ConnectorSettings
    lookups: LookupRunner
    names: ApproximateNames
    counts: ConnectorCounts
    no_reuse: str = ""
    no_blend: str = ""
    recurrent_groups: tuple[int, ...] = ()
    max_tokens: int = 0
    ranks: int = 1
    save_limits: SaveLimits = field(default_factory=SaveLimits)
    arithmetic: str = ""
    bitwise: bool = False
    whole_only: bool = False
    draft_tokens: int = 0
    events: StoreEvents | None = None
    requests: dict[str, RequestState] = field(default_factory=dict[str, RequestState])
    _loads: list[LoadOrder] = field(default_factory=list[LoadOrder])
    _approximate_samples: LRUCache[str, bool] = field(default_factory=lambda: LRUCache(_SAMPLED))
    """Whether an ended sample of a request (`n` above 1) was approximate; latest requests."""

    def __post_init__(self) -> None:
        self.generations = WeightGenerations(self.lookups.adapters.base, self.ranks)
        self.saves = SavePlanner(
            self.lookups,
            self.counts,
            self.generations,
            self.ranks,
            self.save_limits,
            events=self.events,
        )
        if self.events is not None:
            self.lookups.cache.store.listen(removed=self.events.removed)
        self.blends = UnderWay(self.ranks)
        self.queue = BlendQueue(self.max_tokens)
        self._load_answers = RankAnswers[LoadResult](self.ranks)

    def new_request(self, request: Any) -> None:
        """Start the lookup of a request that vLLM has just accepted."""
        options = RequestOptions.from_params(request.kv_transfer_params, self.settings)
        # For every request: also one without reuse may bind an id to another folder.
        self.lookups.adapters.note(request.lora_request)

        tracked = RequestState(
            request,
            options,
            None,
            self._deadline(),
            reason=options.problem,
            weights_generation=self.generations.number,
            trace=tracing.open_span(
                "dejakv.request",
                {"gen_ai.request.id": request.request_id, "gen_ai.provider.name": "dejakv"},
                headers=request.trace_headers if tracing.is_on() else None,
            ),
        )
        why = self._not_for_us(request)
        if why:
            tracked.reason, tracked.settled = why, True
        else:
            # A blend that may not be made leaves exact reuse, with the reason for the client.
            if options.mode == "blend" and (self.no_blend or request.lora_request is not None):
                tracked.reason = self.no_blend or "blend is not for requests with a LoRA adapter"
                options = replace(options, mode="exact")
            elif options.mode == "blend" and not self._labelled(options, request):
                tracked.reason, options = UNLABELLED, replace(options, mode="exact")
                self.counts.add("blends_refused", UNLABELLED)

            if request.sampling_params.prompt_logprobs is not None:
                tracked.reason = "prompt_logprobs need every prompt token computed"
                tracked.settled = True
            elif request.skip_reading_prefix_cache:
                tracked.reason, tracked.settled = "skip_reading_prefix_cache", True

            tracked.options = options
            tracked.loadable = options.mode != "off" and not tracked.settled
            # Until the workers have answered, the epoch to look under is not known.
            if not self.generations.awaits_answers:
                tracked.lookup = self._look_up(tracked)

        self.requests[request.request_id] = tracked

    def matched_tokens(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Decide about a load for a request that vLLM is about to schedule.

        Parameters
        ----------
        request : vllm.v1.request.Request
            The waiting request.
        local : int
            Leading tokens that vLLM's own prefix cache holds.

        Returns
        -------
        tokens : int or None
            Tokens to load beyond `local`. None while they are unknown, or for vLLM to look in its
            own cache again, under other names.
        later : bool
            Whether the load ends in a later step.
        """
        tracked = self.requests.get(request.request_id)
        if tracked is None or self.no_reuse:
            return 0, False

        gain, later = self._matched(tracked, request, local)

        # None makes vLLM ask again, so nothing is settled before there is a number.
        if gain is not None:
            blends = (
                gain > 0
                and tracked.lookup_result is not None
                and tracked.lookup_result.method == "blend"
            )
            self.names.settle(tracked, local, blends=blends)
            if self.recurrent_groups and tracked.lookup_result is not None:
                # A stored prompt parts from this one here, as the next ones may.
                *places, _ = sorted(tracked.lookup_result.snapshots) or [0]
                for place in places:
                    keep_state_at(request, place)
        return gain, later

    def _matched(self, tracked: RequestState, request: Any, local: int) -> tuple[int | None, bool]:
        # First, since a reset may have come after the lookup.
        why = self.saves.of_no_use(tracked)
        if why:
            tracked.ordered_tokens = 0
            return self._decline(tracked, tracked.reason or why), False

        if request.num_preemptions > tracked.preemptions:
            self._start_again(tracked)
        if tracked.settled:
            return 0, False

        if tracked.lookup is None:
            return self._begin_lookup(tracked)

        if tracked.lookup_result is None:
            if tracked.lookup.done():
                tracked.take(tracked.lookup.result())
            elif time.monotonic() < tracked.deadline:
                return None, False
            else:
                late = f"the lookup took longer than {self.settings.lookup_timeout_s:g} s"
                tracked.take(LookupResult(reason=late))
            assert tracked.lookup_result is not None
            self.counts.looked_up(tracked.lookup_result)
            exact = tracked.lookup_result.exact
            # Its hashes are vLLM's as long as none of its blocks has an approximate name.
            if self.events is not None and exact.donors and not tracked.approximate:
                self.events.found(exact.donors[0], request, exact.tokens)

        if tracked.options.mode == "blend" and self._looks_again(
            tracked, tracked.lookup_result, local
        ):
            return None, False

        gain = self._loadable(tracked, request, local)
        return gain, bool(gain)

    def _start_again(self, tracked: RequestState) -> None:
        """Look up a preempted request again: its blocks are gone, and what was loaded with them."""
        tracked.preemptions = tracked.request.num_preemptions
        tracked.ordered_tokens, tracked.load_result, tracked.cached_blocks = 0, None, 0
        if tracked.loadable and tracked.lookup_result is not None:
            tracked.start_again(self._look_up(tracked), self._deadline())

    def _look_up(self, tracked: RequestState) -> Future[LookupResult]:
        """Start a lookup, whose spans are parts of the request's."""
        handover = tracked.trace.handover if tracked.trace is not None else None
        with tracing.taken_over(handover):
            return self.lookups.submit(tracked.request, tracked.options)

    def _begin_lookup(self, tracked: RequestState) -> tuple[int | None, bool]:
        """Look up a request that came before the workers' answers about their weights."""
        if not self.generations.awaits_answers:
            tracked.lookup = self._look_up(tracked)
            tracked.deadline = self._deadline()
        elif time.monotonic() >= tracked.deadline:
            return self._decline(tracked, "what weights the workers have is not known yet"), False
        return None, False

    def _looks_again(self, tracked: RequestState, lookup_result: LookupResult, local: int) -> bool:
        """Tell whether vLLM is to search its prefix cache for the prompt again.

        It is, for blended blocks by their names, or because another request is making them. Exact
        state is preferred where it serves as much. A prompt that was blended before is computed in
        full where nothing else is under way, and so is a prompt whose state would have been blended
        too often.
        """
        request = tracked.request
        if self.no_blend or request.mm_features or lookup_result.blend_forbidden:
            return False

        exact = lookup_result.exact
        exact_stop = max(local, exact.tokens)
        tracked.waits_for_maker = self.names.awaits(tracked, exact_stop)
        if tracked.waits_for_maker:
            return True

        if tracked.renamed_blocks is not None:
            return False

        cached_tokens, blend_depth = self.names.find_approximate(tracked, local)
        cached_stop = local + cached_tokens
        if cached_stop - exact_stop < self._least_gain(request, exact_stop, blends=True):
            return False

        # A new blend on top of those blocks would go one deeper than they are.
        if lookup_result.method == "blend" and lookup_result.count_saved(
            cached_stop, self._stop(lookup_result, request)
        ) >= self._least_gain(request, cached_stop, blends=True):
            blend_depth = max(lookup_result.blend_depth, blend_depth + 1)

        # Each approximation adds to the error of the one before it.
        why = "blended too often" if blend_depth > self.names.max_depth else ""
        # With nothing else under way full computation delays nobody, and its state is exact.
        if len(self.requests) == 1 and self.names.served(lookup_result.key):
            why = "blended before"

        if why:
            tracked.lookup_result = lookup_result.without_blend(f"computed in full: {why}")
            return False
        return self.names.rename(tracked, local)

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external: int) -> None:
        """Order the promised load.

        Parameters
        ----------
        request : vllm.v1.request.Request
            The request that has got its blocks.
        tables : Sequence[Sequence[int]]
            Ids of its blocks in each KV cache group.
        external : int
            Tokens to load, as `matched_tokens` has returned.
        """
        tracked = self.requests.get(request.request_id)
        if tracked is None or tracked.settled or external <= 0 or tracked.lookup_result is None:
            return

        lookup_result = tracked.lookup_result

        stop = self._stop(lookup_result, request)
        blend_ids: tuple[int, ...] = ()
        self.queue.promised(external, self._rows(lookup_result))
        if lookup_result.method == "blend":
            # Behind approximate blocks of vLLM's cache the depth counts on from theirs.
            blend_ids = tuple(request.prompt_token_ids)
            tracked.blend_depth = max(lookup_result.blend_depth, tracked.blend_depth + 1)
            self.names.note_blend(tracked)
            self.blends.ordered(request.request_id)

        first, blocks = stop - external, tuple(map(tuple, tables))

        read_limit_s = self._read_limit(lookup_result, first, stop)
        self._loads.append(
            LoadOrder(
                request.request_id,
                lookup_result.donors,
                blocks,
                first,
                external,
                blend_ids,
                read_limit_s,
                lookup_result.snapshot,
            )
        )
        tracked.settled, tracked.ordered_tokens, tracked.load_result = True, external, None
        tracked.load_trace = tracing.open_span(
            "dejakv.load",
            {
                "dejakv.method": lookup_result.method,
                "dejakv.donors": len(lookup_result.donors),
                "dejakv.tokens": external,
            },
            tracked.trace,
        )

    def share_step(self) -> StepRoom:
        """Share out vLLM's next step, and return the budget to leave to loads and blends."""
        queue, keys, decoding = list[WaitingBlend](), set[str](), 0
        # The sort is stable, so that requests of one priority stay in order of arrival.
        for tracked in sorted(self.requests.values(), key=lambda each: each.request.priority):
            request, lookup_result = tracked.request, tracked.expected
            name = request.request_id
            remaining = request.num_prompt_tokens - request.num_computed_tokens

            if tracked.ordered_tokens and tracked.load_result is None:
                queue.append(
                    WaitingBlend(
                        name, 0, "loads", self.blends.rows.get(name, 0), self._drafted(remaining)
                    )
                )
            elif remaining <= 0:
                decoding += 1 + self.draft_tokens
            elif request.num_computed_tokens:
                # Else most of the prompt is computed, as any other is.
                due = remaining <= tracked.ordered_tokens
                queue.append(
                    WaitingBlend(
                        name,
                        self._drafted(remaining),
                        "due" if due else "runs",
                        saved=tracked.tokens_saved,
                    )
                )
            elif (tracked.waits_for_maker and not tracked.settled) or (
                lookup_result.method == "blend" and lookup_result.key in keys
            ):
                # One before it makes the same blocks.
                queue.append(WaitingBlend(name, 0))
            else:
                loads = lookup_result.method == "exact" or (
                    lookup_result.method == "blend" and not self.no_blend
                )
                keys |= {lookup_result.key} - {""} if lookup_result.method == "blend" else set()
                rows = self._rows(lookup_result) if loads else None
                last = self._drafted(remaining - self._stop(lookup_result, request))
                queue.append(
                    WaitingBlend(
                        name, remaining - self.names.count_cached(tracked), rows=rows, last=last
                    )
                )
        room = self.queue.share_out(queue, decoding)
        # A limit below a token and its drafts would end vLLM's engine.
        return room._replace(longest=room.longest and max(room.longest, 1 + self.draft_tokens))

    def _drafted(self, tokens: int) -> int:
        """Count the tokens with which vLLM schedules the last `tokens` of a prompt."""
        # A single token behind a hit is scheduled with drafts, or not at all.
        return tokens + (self.draft_tokens if tokens == 1 else 0)

    def plan_step(self, output: Any, blocks_of: Any) -> StepPlan:
        """Return the worker's orders for a step.

        Parameters
        ----------
        output : SchedulerOutput
            The step as vLLM's scheduler has planned it.
        blocks_of : Callable[[str], Sequence[Sequence[int]]]
            Gives the block ids of a request in each KV cache group.
        """
        running = [
            self.requests[name] for name in output.num_scheduled_tokens if name in self.requests
        ]
        self.lookups.adapters.step(tracked.request.lora_request for tracked in running)

        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        # The copy is made behind this step, so what it computes is there by then.
        if self.save_limits.at_once:
            computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            computed = {
                name: count + output.num_scheduled_tokens[name] for name, count in computed.items()
            }

        states = (
            boundary_states(output, self.recurrent_groups, self.save_limits.unit)
            if self.recurrent_groups
            else {}
        )
        for tracked in running:
            name = tracked.request.request_id
            if name in computed:
                blocks = partial(blocks_of, name)
                self.saves.order(tracked, computed[name], blocks, states.get(name))
                # Asynchronous steps compute tokens that are not known here yet.
                known_tokens = min(computed[name], tracked.request.num_tokens)
                self.saves.order_answer(tracked, known_tokens, blocks, states.get(name))

        computing = any(
            t.request.num_computed_tokens < t.request.num_prompt_tokens for t in running
        )
        idle = output.total_num_scheduled_tokens == 0
        saves, releases = self.saves.take()
        if idle:
            looking = [
                t
                for t in self.requests.values()
                if t.lookup is not None and t.lookup_result is None
            ]
            waiting = [t.lookup for t in looking if t.lookup is not None]
            if waiting and not self._loads and not saves:
                # Nothing is computed: leave the interpreter to the lookups.
                wait(waiting, IDLE_WAIT_S, FIRST_COMPLETED)

        loads, self._loads = self._loads, []

        room = self.queue.stepped(output.total_num_scheduled_tokens)
        begin, drop = self.blends.orders()
        number = self.generations.number
        # Blends and reading the weights would be measured as if they were rows.
        timed = self.lookups.pace.begin_step(
            output, alone=not (self.blends.rows or self.generations.awaits_answers)
        )
        return StepPlan(loads, saves, idle, computing, number, room, begin, drop, releases, timed)

    def process_report(self, report: StepReport) -> None:
        """Take in the worker's report of a step."""
        # First, since taking in the rest is no part of the step's time.
        self.lookups.pace.end_step(report.timed)

        for name, why in report.saved:
            self.saves.record_answer(name, why)
        for request_id, mark in report.fetched:
            self.blends.fetched(request_id, mark)
        self.blends.remain(report.rows)

        for load_result in report.loaded:
            parts = self._load_answers.add(load_result.request_id, load_result)
            if parts is not None:
                self._finish_load(LoadResult.together(parts))

        if report.blend_problem:
            self.no_blend = report.blend_problem
        for why in report.fallbacks:
            self.counts.add("kernel_fallbacks", why)
        for number, same in report.weights:
            self.generations.record_answer(number, same)
            self.lookups.adapters.base = self.generations.epoch
        # Last: it begins a generation, and the answers above are about the one before.
        if report.changed:
            self.reset(CHANGED)

    def finished(
        self, request: Any, tables: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any]]:
        """End a request.

        Returns
        -------
        bool
            Whether its blocks must wait for a copy.
        dict[str, Any]
            Parameters for the client, empty without any.
        """
        tracked = self.requests.pop(request.request_id, None)
        if tracked is None:
            return False, {}
        self.blends.abandoned(request.request_id)

        aborted = was_aborted(request)
        # Only a prompt that was answered counts as blended before.
        self.names.note_end(tracked, answered=not aborted)
        # A server without loads need not compute it either.
        if aborted and not request.num_output_tokens:
            self.queue.failed(request.num_computed_tokens)

        computed = (
            request.num_computed_tokens >= request.num_prompt_tokens
            and request.num_output_tokens > 0
        )

        last = computed and all(tables) and not aborted
        # An engine stepped by hand may make no further step, which would free the blocks.
        waits = last and not self.save_limits.stepped_by_hand
        holds = waits and self.saves.order(
            tracked, request.num_prompt_tokens, lambda: tables, release=True
        )
        if waits:
            # The last token of an answer is not computed.
            answered = min(request.num_computed_tokens, request.num_tokens - 1)
            holds |= self.saves.order_answer(tracked, answered, lambda: tables, release=True)
        # Behind the last order: what is not ordered by now never will be.
        self.saves.ended(request.request_id, BACKLOG if last else ENDED)

        if tracked.lookup is not None:
            tracked.lookup.cancel()

        tracked.end_trace()

        # The label is given unasked: an approximate answer must never look like an exact one.
        approximate = self._any_approximate(tracked)
        if not approximate and not tracked.informs_client:
            return holds, {}
        label = {
            "approximate": approximate,
            "arithmetic": self.arithmetic,
            "bitwise": self.bitwise and not approximate,
        }
        return holds, {"dejakv": {**tracked.response_fields(), **label}}

    def _labelled(self, options: RequestOptions, request: Any) -> bool:
        """Tell whether the client will see that its answer is approximate, or needs no label."""
        return options.labelled or self.settings.unlabelled_answers or shows_label(request)

    def _any_approximate(self, tracked: RequestState) -> bool:
        """Tell whether the answer is approximate, or an ended sample that is given out with it."""
        parent = sibling_of(tracked.request.request_id)
        if not parent:
            return tracked.approximate

        # vLLM gives out the samples together, with the parameters of the last, so labels add up.
        self._approximate_samples[parent] = tracked.approximate or self._approximate_samples.get(
            parent, False
        )
        return self._approximate_samples[parent]

    def reset(self, problem: str = "") -> None:
        """Begin a generation, since the weights may have changed.

        Nothing stored, under way or being computed is used as exact from now on.

        Parameters
        ----------
        problem : str
            Why nothing may be stored or used after this reset either; empty if it may.
        """
        # First, since the adapters' epochs follow from the new generation's.
        self.generations.begin(problem)
        self.lookups.adapters.base = self.generations.epoch
        self.saves.outdate()
        if self.events is not None:
            self.events.withdraw()

    def close(self) -> None:
        """Close lookups and store, after vLLM has ended the workers, perhaps while they stored."""
        lost = self.saves.lost()
        if lost:
            log.warning(
                "stopped before %d prompt%s could be stored: %s computed again when asked for",
                lost,
                *(("", "it is") if lost == 1 else ("s", "they are")),
            )
        self.lookups.close()

    def _finish_load(self, load_result: LoadResult) -> None:
        self.blends.ended(load_result.request_id)
        self.names.note_filed(load_result.request_id)
        tracked = self.requests.get(load_result.request_id)

        self.counts.loaded(load_result)
        # The client may have left while the worker was loading.
        if tracked is None:
            return
        tracked.end_load_trace(load_result)
        # vLLM frees the blocks and asks again.
        if load_result.problem:
            self.queue.failed(tracked.ordered_tokens)
            tracked.reason, tracked.ordered_tokens = load_result.problem, 0
            # An exact prefix may still be loaded when vLLM asks again.
            tracked.settled = not self._fall_back(tracked)

        if load_result.left_out:
            tracked.reason = (
                f"{len(load_result.left_out)} of the donors left out: {load_result.left_out[0]}"
            )

        tracked.load_result = load_result

    @staticmethod
    def _fall_back(tracked: RequestState) -> bool:
        """Give up a blend; return whether there is an exact prefix to take in its place."""
        lookup_result = tracked.lookup_result
        if lookup_result is None or lookup_result.fallback is None:
            return False
        tracked.lookup_result = lookup_result.without_blend()
        return True

    def _rows(self, lookup_result: LookupResult) -> int:
        """Estimate the tokens of the budget that a blend takes; 0 for an exact load.

        Only the worker knows their number, once it has read the donors.
        """
        if lookup_result.method != "blend":
            return 0
        return (
            max(1, lookup_result.rows - self.settings.blend_tail)
            + lookup_result.tokens // TOKENS_A_ROW
            + LONGEST_TAIL
        )

    def _deadline(self) -> float:
        return time.monotonic() + self.settings.lookup_timeout_s

    def _not_for_us(self, request: Any) -> str:
        if self.no_reuse or self.lookups.cache.off:
            return self.no_reuse or self.lookups.cache.off
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
        """Return the number of tokens to load beyond `local`.

        The number is 0, with a reason for the client, where loading is not allowed or does not pay.
        It is None if the next step's budget decides.
        """
        lookup_result = tracked.lookup_result
        assert lookup_result is not None

        if lookup_result.method == "none" or not lookup_result.donors:
            return self._decline(tracked, tracked.reason or lookup_result.reason)
        # Checked again, since the adapter's files may have changed after the lookup.
        doubt = self.lookups.adapters.doubt(request.lora_request)
        if doubt:
            return self._decline(tracked, doubt)

        stop = self._stop(lookup_result, request)
        gain, blends = lookup_result.count_saved(local, stop), lookup_result.method == "blend"
        if gain < (least_gain := self._least_gain(request, local, blends=False)):
            return self._decline(
                tracked,
                f"{gain} tokens beyond vLLM's own prefix hit, min_gain is {least_gain}",
            )
        if blends and gain < self._least_gain(request, local, blends=True):
            return self._load_exact(tracked, request, local, SMALL_SHARE)

        if self.whole_only and stop < request.num_tokens - 1:
            return self._decline(
                tracked,
                "this attention backend computes a single token behind stored ones, and more are "
                "left",
            )
        # Seconds of a token: all `stop` tokens would be read, only the gain be computed.
        if (
            lookup_result.read_seconds * gain
            > self._read_limit(lookup_result, local, stop) * stop
            > 0
        ):
            return self._load_exact(tracked, request, local, FAR)

        pays = self.queue.pays(
            request.request_id, self._rows(lookup_result), request.num_prompt_tokens - stop
        )
        if lookup_result.method != "blend" and pays is False:
            return self._decline(tracked, NO_GAIN)

        if lookup_result.method == "blend":
            if self.no_blend:
                return self._decline(tracked, self.no_blend)
            too_long = request.num_prompt_tokens > self.save_limits.max_pending_tokens
            # None: the lookup ended after the step's budget was shared out, so the next
            # step decides.
            if pays is None and not too_long:
                return None
            if too_long or not pays:
                return self._load_exact(tracked, request, local, TOO_LONG if too_long else NO_GAIN)
            if not self.names.rename(tracked, local):
                return self._decline(tracked, "no full block lies beyond the local prefix")

        # A reason stays where an exact prefix is loaded in place of a blend.
        tracked.reason = tracked.reason or lookup_result.reason
        return stop - local

    def _least_gain(self, request: Any, first: int, *, blends: bool) -> int:
        """Return the tokens that a load must save of those from `first` on."""
        settings = self.settings
        remaining = request.num_prompt_tokens - first
        return max(1, settings.least_blend_gain(remaining) if blends else settings.min_gain)

    def _load_exact(self, tracked: RequestState, request: Any, local: int, why: str) -> int | None:
        """Count a refused blend, and decide as `_loadable` for the exact prefix in its place."""
        tracked.reason = why
        if tracked.lookup_result is not None and tracked.lookup_result.method == "blend":
            self.counts.add("blends_refused", why)
        return (
            self._loadable(tracked, request, local)
            if self._fall_back(tracked)
            else self._decline(tracked, why)
        )

    def _read_limit(self, lookup_result: LookupResult, first: int, stop: int) -> float:
        """Return the seconds for reading tokens `first` to `stop - 1` from a bucket.

        The limit is 0, which means none, for state on this machine and for unknown costs.
        """
        costs = self.lookups.pace.costs
        if not lookup_result.read_seconds or costs is None:
            return 0.0

        # Not 0, which would mean that there is no limit.
        return max(1e-3, costs.rows(stop - first - lookup_result.rows, stop, first))

    @staticmethod
    def _decline(tracked: RequestState, reason: str) -> int:
        tracked.settled, tracked.reason = True, reason
        return 0

    def _stop(self, lookup_result: LookupResult, request: Any) -> int:
        """Return the first token that vLLM computes by itself."""
        # At least one token is left, since its computation gives the first logits.
        last = request.num_prompt_tokens - (
            self.settings.blend_tail if lookup_result.method == "blend" else 1
        )
        return max(0, min(lookup_result.tokens, last))
