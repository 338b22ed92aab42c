"""A run of `verify`: what is sent in which order, and what each answer is compared with."""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import httpx

from dejakv.errors import ConfigError, InputError
from dejakv.verify.client import (
    Body,
    ClientSettings,
    RequestRefusedError,
    ServerAnswer,
    ServerClient,
)
from dejakv.verify.noise import (
    SAME,
    ServerNoise,
    binomial_tail,
    distance,
    largest_gap,
    middle,
    share_sampled,
    spread,
)
from dejakv.verify.probes import (
    FIELD_KINDS,
    KINDS,
    FreshWay,
    ProbeWriter,
    find_fresh_way,
    related_models,
)

EQUAL, ROUNDING, SUSPECT, WRONG = "equal", "rounding", "suspect", "wrong"
_FEWEST_TIMED = 6
_STORING_TRIES, _STORING_S = 6, 0.5
"""How often, and after which pauses (seconds), a prompt is sent again until it is in a cache."""
_LEAST_CHANCE = 1e-4
_LATER_REPEATS = 6
"""About how many probes are repeated before other prompts evict them."""


@dataclass(frozen=True)
class VerifySettings:
    """What a run may do.

    Attributes
    ----------
    seconds : float
        Time that the run should take.
    workers : int
        Requests at once.
    rounds : int
        Most rounds; each tries every kind.
    seed : int, optional
        Seed of an earlier run, to send its prompts again; None: prompts that nobody ever sent.
    models : tuple[str, ...]
        Other model names to try; empty: the model's LoRA adapters that the server lists.
    """

    seconds: float = 240.0
    workers: int = 8
    rounds: int = 12
    seed: int | None = None
    models: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observation:
    """One answer that a cache may have changed, beside an answer that no cache changed.

    Attributes
    ----------
    kind : str
        What was tried, one of `KINDS`.
    verdict : {"equal", "rounding", "suspect", "wrong"}
        What the answer is; `suspect` is decided at the end, over all of a kind.
    content : dict
        The probe.
    history : tuple[dict, ...]
        Probes that were sent before, in order.
    answer, expected : ServerAnswer
        The answer, and the nearest of those to compare with.
    distance, limit : float
        How far they are apart, and how far rounding moves them, in nats.
    note : str
        What else is known.
    """

    kind: str
    verdict: str
    content: Body
    history: tuple[Body, ...]
    answer: ServerAnswer
    expected: ServerAnswer
    distance: float
    limit: float
    note: str = ""


@dataclass
class _SentProbe:
    """A probe to send again later, with the answers that no cache changed."""

    kind: str
    content: Body
    answer: ServerAnswer
    truths: list[ServerAnswer]
    history: tuple[Body, ...]


@dataclass
class VerifyResult:
    """What a run has shown.

    Attributes
    ----------
    client : ServerClient
        The server.
    observations : list[Observation]
        All comparisons.
    noise : ServerNoise
        The server's own rounding.
    signals : dict[str, list[float]]
        By kind, the distances between right answers to the two probes of a pair.
    cached : list[tuple[int, int]]
        Cached and all tokens of prompts that came again, where the server tells.
    not_taken : dict[str, str]
        Kinds that the server does not take, with its words.
    notes : list[str]
        Sentences about the run.
    fresh : str
        How answers without a cache were had.
    seed : int
        Seed of the prompts.
    seconds : float
        Time of the run.
    """

    client: ServerClient
    observations: list[Observation] = field(default_factory=list)
    noise: ServerNoise = field(default_factory=ServerNoise)
    signals: dict[str, list[float]] = field(default_factory=dict)
    cached: list[tuple[int, int]] = field(default_factory=list)
    not_taken: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    fresh: str = ""
    seed: int = 0
    seconds: float = 0.0

    @property
    def wrong(self) -> list[Observation]:
        """Observations that are wrong, the farthest first."""
        wrong = [each for each in self.observations if each.verdict == WRONG]
        return sorted(wrong, key=lambda each: -each.distance)

    @property
    def blind(self) -> list[str]:
        """Kinds in which a mix-up would not show: right answers of their pairs are alike."""
        limit = self.noise.limit
        return [kind for kind, apart in self.signals.items() if middle(apart) <= limit]


def verify_server(
    server: ClientSettings,
    settings: VerifySettings | None = None,
    *,
    reference: ClientSettings | None = None,
    transport: httpx.BaseTransport | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> VerifyResult:
    """Prove or refute that the caches of a running server change no answer.

    Parameters
    ----------
    server : ClientSettings
        The server.
    settings : VerifySettings, optional
        What the run may do.
    reference : ClientSettings, optional
        A second server with the same model and without a cache, whose answers are the right ones.
    transport : httpx.BaseTransport, optional
        Where requests go in place of the network.
    report : callable
        Called with the name of each stage.

    Returns
    -------
    VerifyResult
        All comparisons with their verdicts.

    Raises
    ------
    ConfigError
        For an address or a file of the authority that cannot be used, and for a second server with
        another tokenizer.
    InputError
        For a server that cannot be reached, wants another key, limits the rate for too long, is too
        slow for the time, or answers in a way that allows no comparison.
    """
    settings = settings or VerifySettings()
    client = ServerClient(server, transport)
    second = ServerClient(reference, transport) if reference else None
    try:
        client.connect()
        if second is not None:
            second.connect()
        return _VerifyRun(client, second, settings, report).run()
    finally:
        client.close()
        if second is not None:
            second.close()


class _VerifyRun:
    """State of one run."""

    def __init__(
        self,
        client: ServerClient,
        reference: ServerClient | None,
        settings: VerifySettings,
        report: Callable[[str], None],
    ) -> None:
        self.client, self.reference, self.settings, self.report = (
            client,
            reference,
            settings,
            report,
        )
        seed = random.SystemRandom().getrandbits(32) if settings.seed is None else settings.seed
        self.result = VerifyResult(client, seed=seed)
        self.writer = ProbeWriter(random.Random(seed), client)
        self.way: FreshWay | None = None
        self.sent: list[_SentProbe] = []
        self.started = time.monotonic()
        self.pool = ThreadPoolExecutor(settings.workers)
        self.typical_s, self.families_until = 1.0, 0.0

    def run(self) -> VerifyResult:
        """Do all stages in their order."""
        result, client = self.result, self.client
        self.report(f"asking {client.model} at {client.url}")
        self.writer.calibrate(self.pool.map)
        self._fit_context()
        self._check_reference()
        self.way = find_fresh_way(client, self.writer)
        self._measure_noise()
        if self.way is not None and self.way.name == "cache_salt":
            self._check_salts()
        else:
            result.not_taken["salt"] = "the server does not read cache_salt"
        result.fresh = self._describe_fresh()

        # Even where measuring the noise took most of the time.
        budget = self.settings.seconds
        self.families_until = max(0.65 * budget, self._elapsed() + 0.35 * budget)
        # A family of probes waits for itself alone, so several run at once.
        families = ThreadPoolExecutor(max(self.settings.workers // 2, 1))
        for turn in range(self.settings.rounds):
            self.report(f"round {turn + 1}: probes that can be confused")
            round_started = time.monotonic()
            for future in [families.submit(self._in_time, job) for job in self._families(turn)]:
                future.result()
            round_s = time.monotonic() - round_started
            if self._elapsed() + round_s > self.families_until:
                break

        self._repeat_later()
        self._flood()
        self._send_again()
        self._decide_suspects()
        self._write_notes()
        self.pool.shutdown()
        families.shutdown()
        result.seconds = self._elapsed()
        if not result.observations:
            raise InputError(
                f"{client.url} is too slow for {self.settings.seconds:.0f} s: nothing was compared."
                " Give more --seconds"
            )
        return result

    def _fit_context(self) -> None:
        """Halve the longest prompt until the server takes the lengths that every run needs."""
        writer = self.writer
        while True:
            words = min(320, writer.longest)
            try:
                # As many tokens as the probes ask for, which must fit beside the prompt.
                self.client.ask(writer.plain(writer.text(words)))
                return
            except RequestRefusedError:
                if words < 32:
                    raise
                writer.longest = words // 2

    def _in_time(self, job: Callable[[], None]) -> None:
        try:
            if self._elapsed() < self.families_until:
                job()
        except RequestRefusedError as refusal:
            # A prompt that does not fit, most likely.
            self.writer.longest = max(self.writer.longest // 2, 64)
            self.result.notes.append(f"The server refused a probe: {refusal}")

    def _elapsed(self) -> float:
        return time.monotonic() - self.started

    # Answers without a cache.

    def _check_reference(self) -> None:
        """Refuse a second server that counts other tokens: it has another tokenizer."""
        if self.reference is None:
            return
        probe = self.writer.plain(self.writer.text(40))
        first, second = self.client.ask(probe), self.reference.ask(probe)
        if None not in (first.prompt_tokens, second.prompt_tokens) and (
            first.prompt_tokens != second.prompt_tokens
        ):
            raise ConfigError(
                f"the servers count {first.prompt_tokens} and {second.prompt_tokens} tokens in the"
                " same prompt: --url2 must serve the same model with the same tokenizer and chat"
                " template"
            )

    def _describe_fresh(self) -> str:
        if self.reference is not None:
            return f"answers of {self.reference.url}"
        if self.way is None:
            return "the first answer ever to a prompt (no field of the server avoids its caches)"
        return f"the first answer ever to a prompt, and `{next(iter(self.way.fields()))}`"

    def _fresh(self, content: Body) -> ServerAnswer | None:
        """Return an answer that no cache of the server may have changed; None if there is none."""
        if self.reference is not None:
            known = {name: value for name, value in content.items() if name != "cache_salt"}
            return self.reference.ask(known)
        if self.way is None:
            return None
        return self.client.ask({**content, **self.way.fields()})

    def _all_at_once(
        self, ask: Callable[[Body], ServerAnswer | None], contents: Sequence[Body]
    ) -> list[ServerAnswer]:
        return [answer for answer in self.pool.map(ask, contents) if answer is not None]

    def _measure_noise(self) -> None:
        """Measure how far the same prompt's answers are apart, alone and in batches."""
        self.report("measuring the server's own noise")
        lengths = (24, 60, 100, 160, 240, 320)
        probes = [
            self.writer.plain(self.writer.recited(min(count, self.writer.longest)))
            for count in lengths
        ]
        firsts = [self.client.ask(probe) for probe in probes]
        repeats = [self.client.ask(probe) for probe in probes]
        repeated = list(map(distance, firsts, repeats))

        # Without a way around the caches, repeats are compared with repeats.
        ask = self._fresh if self.way or self.reference else self.client.ask
        # Texts are equal by chance more often than log probabilities: ask for more of them.
        pairs = probes[:3] if self.client.has_logprobs else probes
        alone = [[answer for _ in "ab" if (answer := ask(probe))] for probe in pairs]
        batch = self._all_at_once(ask, probes * 2)
        batched = [spread(batch[place :: len(probes)]) for place in range(len(probes))]
        batched += [spread([*pair, batch[place]]) for place, pair in enumerate(alone)]
        if self.reference is not None:
            batched += [
                distance(first, answer) for first, answer in zip(firsts, batch, strict=False)
            ]
        self.typical_s = middle([answer.seconds for answer in firsts[3:]])
        alone_distances = [spread(pair) for pair in alone]
        self.result.noise = ServerNoise(
            tuple(alone_distances),
            tuple(batched),
            tuple(repeated),
            middle([answer.cached_tokens or 0 for answer in repeats]) > 0,
            share_sampled([*firsts, *batch]),
            not self.client.has_logprobs,
        )
        if not self.client.has_logprobs and sum(alone_distances) >= 2:
            raise InputError(
                f"{self.client.url} gives another answer to the same prompt each time (sampling is"
                " forced) and no log probabilities: nothing can be compared. Allow temperature 0,"
                " or logprobs"
            )

    def _check_salts(self) -> None:
        """Look whether state under one `cache_salt` serves another, by counts or by times."""
        self.report("checking that cache_salt separates")
        rows = []
        assert self.way is not None
        for _ in range(_FEWEST_TIMED):
            probe = {
                **self.writer.plain(self.writer.text(min(800, self.writer.longest))),
                **self.writer.one_token(),
            }
            salted, other = ({**probe, **self.way.fields()} for _ in "ab")
            first, again = self.client.ask(salted), self.client.ask(salted)
            for _ in range(_STORING_TRIES):
                # Many caches store behind the answer.
                if again.cached_tokens != 0:
                    break
                time.sleep(_STORING_S)
                again = self.client.ask(salted)
            answers = [first, again, self.client.ask(other)]
            rows.append(((salted, salted), other, answers))
            if answers[0].cached_tokens is not None and len(rows) == 2:
                break

        for before, other, (first, again, elsewhere) in rows:
            counts = [answer.cached_tokens or 0 for answer in (first, again, elsewhere)]
            # A common beginning of all prompts, such as a template's, may be shared.
            shared = counts[1] > 0 and counts[2] > counts[0] and counts[2] >= counts[1] / 2
            note = f"cached tokens: {counts[0]} first, {counts[1]} again, {counts[2]} elsewhere"
            self._note_salt(before, other, (first, elsewhere), shared, note)

        if rows[0][2][0].cached_tokens is None:
            self.result.notes.append(
                "The server counts no cached tokens: state under one cache_salt that serves another"
                " would show in times alone, and in none of a small model. (vLLM counts them with"
                " --enable-prompt-tokens-details.)"
            )
        times = [[answer.seconds for answer in row[2]] for row in rows]
        if len(times) == _FEWEST_TIMED and all(
            max(again, elsewhere) < 0.7 * first for first, again, elsewhere in times
        ):
            before, other, (first, _, elsewhere) = rows[-1]
            rounded = [[round(seconds, 3) for seconds in row] for row in times]
            note = f"seconds (first, again, elsewhere): {rounded}"
            self._note_salt(before, other, (first, elsewhere), True, note)

        if any(each.verdict == WRONG for each in self.result.observations):
            # Answers under a new salt are no longer known to be computed.
            self.way = None

    def _note_salt(
        self,
        before: tuple[Body, ...],
        other: Body,
        answers: tuple[ServerAnswer, ServerAnswer],
        shared: bool,
        note: str,
    ) -> None:
        limit = self.result.noise.limit
        verdict = WRONG if shared else _verdict_of(distance(*answers), limit)
        text = f"state under one cache_salt served another ({note})" if shared else ""
        self._add(
            Observation(
                "salt",
                verdict,
                other,
                before,
                answers[1],
                answers[0],
                distance(*answers),
                limit,
                text,
            )
        )

    # Families of probes.

    def _families(self, turn: int) -> list[Callable[[], None]]:
        """Return the work of a round: each piece sends a family of probes and compares."""
        writer, models = self.writer, self.settings.models or tuple(related_models(self.client))
        for kind in FIELD_KINDS:
            if kind == "lora" and not models:
                self.result.not_taken[kind] = "the server lists no adapters of the model"
            elif kind != "lora" and "messages" not in self.client.routes:
                self.result.not_taken[kind] = "the server has no chat completions"

        head, tails = writer.text(min(300, writer.longest - 60)), [writer.text(40) for _ in "ab"]
        broken = [writer.plain(f"{head} {tail}") for tail in tails]
        seconds = self.typical_s * (0.25, 0.5, 0.75)[turn // 2 % 3] if turn % 2 else None
        crowd = [each for kind in ("tail", "grown") for each in writer.pair(kind, turn)]
        # A slow server gets no further than the first of these, so the kinds alternate.
        jobs = [
            partial(self._repeat, writer.plain(writer.recited(writer.edge()))),
            partial(self._pair, "tail", *writer.pair("tail", turn)),
            partial(self._abort, *broken, seconds),
            partial(self._turn, writer.plain(writer.recited(writer.edge())), writer.text(24)),
            partial(self._load, crowd, writer.rng.sample(crowd, len(crowd))),
            partial(self._repeat, writer.plain(writer.recited(min(700, writer.longest)))),
        ]
        for place, kind in enumerate((*FIELD_KINDS, "cut", "grown", "head", "tail", "tail")):
            if kind not in self.result.not_taken:
                jobs.append(partial(self._pair, kind, *writer.pair(kind, turn + place, models)))
        return [*jobs, partial(self._repeat, writer.plain(writer.recited(writer.edge())))]

    def _repeat(self, probe: Body) -> None:
        first = self.client.ask(probe)
        truths = self._truths(probe, first)
        for before in ((probe,), (probe, probe)):
            again = self.client.ask(probe)
            self._count_cached(again)
            self._compare("repeat", probe, again, truths, before)
        self.sent.append(_SentProbe("repeat", probe, first, truths, (probe,)))

    def _truths(self, probe: Body, first: ServerAnswer | None) -> list[ServerAnswer]:
        """Return the answers that no cache changed: the first ever, and one around the caches."""
        # With the seed of an earlier run the server may know the prompt.
        known = [first] if first is not None and self.settings.seed is None else []
        fresh = self._fresh(probe)
        return known if fresh is None else [*known, fresh]

    def _pair(self, kind: str, first: Body, second: Body) -> None:
        """Send two probes in turn; each answer must be that of its own computation."""
        try:
            answer = self.client.ask(first)
            confusable = self.client.ask(second)
        except RequestRefusedError as refusal:
            self.result.not_taken[kind] = str(refusal)
            return

        again, confusable_again = self.client.ask(first), self.client.ask(second)
        self._count_cached(again)
        truths, others = self._truths(first, answer), self._truths(second, None)
        self._compare(kind, first, again, truths, (first, second))
        self._compare(kind, second, confusable, others, (first,))
        # Without another way the later answers must be like the earlier ones, at least.
        self._compare(
            kind, second, confusable_again, others or [confusable], (first, second, first)
        )
        self.result.signals.setdefault(kind, []).append(
            distance((truths or [answer])[0], (others or [confusable])[0])
        )
        # The other way round, later.
        self.sent.append(_SentProbe(kind, second, confusable, others, (first, second)))
        self.sent.append(_SentProbe(kind, first, answer, truths, (first, second)))

    def _turn(self, probe: Body, rest: str) -> None:
        first = self.client.ask(probe)
        if "prompt" in probe:
            grown: Body = {"prompt": f"{probe['prompt']}{first.text} {rest}"}
        else:
            reply = {"role": "assistant", "content": first.text}
            turns = [*probe["messages"], reply, {"role": "user", "content": rest}]
            grown = {"messages": turns}
        self._pair_after("turn", grown, (probe,))

    def _pair_after(self, kind: str, probe: Body, before: tuple[Body, ...]) -> None:
        """Send a probe twice, of which a part is known to the server already."""
        answer, again = self.client.ask(probe), self.client.ask(probe)
        truths = self._truths(probe, None)
        self._compare(kind, probe, answer, truths, before)
        self._compare(kind, probe, again, truths or [answer], (*before, probe))
        self.sent.append(_SentProbe(kind, probe, answer, truths, (*before, probe)))

    def _abort(self, broken: Body, other: Body, seconds: float | None) -> None:
        try:
            self.client.abort(broken, seconds)
        except RequestRefusedError as refusal:
            self.result.not_taken["abort"] = str(refusal)
            note = "The server refused requests that were to be broken off, so they were not."
            if note not in self.result.notes:
                self.result.notes.append(note)
            return
        self._pair_after("abort", broken, (broken,))
        self._pair_after("abort", other, (broken,))

    def _load(self, crowd: list[Body], order: list[Body]) -> None:
        early = self._all_at_once(self.client.ask, crowd)
        late = self._all_at_once(self.client.ask, order)
        before = tuple(crowd)
        for probe, answer in zip(crowd, early, strict=True):
            again = late[order.index(probe)]
            truths = self._truths(probe, None)
            self._compare("load", probe, answer, truths, before)
            self._compare("load", probe, again, truths or [answer], (*before, *before))
            self.sent.append(_SentProbe("load", probe, answer, truths, before))

    # Verdicts.

    def _compare(
        self,
        kind: str,
        content: Body,
        answer: ServerAnswer,
        truths: Sequence[ServerAnswer],
        history: tuple[Body, ...],
        note: str = "",
    ) -> None:
        """Compare an answer with those that no cache changed; without any nothing is known yet."""
        if not truths:
            return
        nearest = min(truths, key=lambda truth: distance(answer, truth))
        apart, limit = distance(answer, nearest), self.result.noise.limit
        if apart > limit:
            # This prompt's own noise may be larger than that of the measured ones.
            anew = [fresh for _ in range(3) if (fresh := self._fresh(content))]
            anew += self._all_at_once(self._fresh, [content] * 3)
            nearest = min([*truths, *anew], key=lambda truth: distance(answer, truth))
            apart, limit = distance(answer, nearest), max(limit, 3 * spread(anew))
        verdict = _verdict_of(apart, limit)
        if verdict == WRONG and not (answer.likely and nearest.likely):
            verdict = SUSPECT
        # Another token beside the same log probabilities: they are no distance apart.
        greedy = self.result.noise.sampled == 0
        if verdict != WRONG and greedy and largest_gap(answer) > limit >= largest_gap(nearest):
            verdict = SUSPECT
        self._add(Observation(kind, verdict, content, history, answer, nearest, apart, limit, note))

    def _add(self, observation: Observation) -> None:
        self.result.observations.append(observation)

    def _count_cached(self, answer: ServerAnswer) -> None:
        if answer.cached_tokens is not None and answer.prompt_tokens:
            self.result.cached.append((answer.cached_tokens, answer.prompt_tokens))

    def _decide_suspects(self) -> None:
        """Decide on answers without log probabilities, where rounding may change a word.

        Prompts that cannot be confused show how often it does. A kind is wrong if it differs more
        often than that could be chance, or if half of the plain repeats differ.
        """
        counts = {kind: [0, 0] for kind in KINDS}
        for each in self.result.observations:
            counts[each.kind][0] += each.verdict == SUSPECT
            counts[each.kind][1] += 1
        differing, repeats = counts["repeat"]
        all_wrong = repeats >= 4 and differing >= repeats / 2
        share = (differing + 1) / (repeats + 2)

        def decided(each: Observation) -> Observation:
            if each.verdict != SUSPECT:
                return each
            hits, trials = counts[each.kind]
            chance = binomial_tail(hits, trials, share)
            wrong = all_wrong or (each.kind != "repeat" and chance < _LEAST_CHANCE)
            return replace(each, verdict=WRONG if wrong else ROUNDING)

        self.result.observations = [decided(each) for each in self.result.observations]

    # Evictions.

    def _repeat_later(self) -> None:
        """Repeat some probes before caches evict them: weights may have changed since."""
        repeats = [probe for probe in self.sent if probe.kind == "repeat" and probe.truths]
        for probe in repeats[:: max(len(repeats) // _LATER_REPEATS, 1)]:
            self._compare_later("repeat", probe, "sent much later")

    def _compare_later(self, kind: str, probe: _SentProbe, note: str) -> ServerAnswer | None:
        """Send a probe again and compare; return the answer without a cache, None if none is."""
        answer, now = self.client.ask(probe.content), self._fresh(probe.content)
        truths = [now] if now is not None else probe.truths or [probe.answer]
        self._compare(kind, probe.content, answer, truths, probe.history, note)
        return now

    def _flood(self) -> None:
        """Send other prompts until earlier ones are evicted, or a fifth of the time is over."""
        self.report("sending other prompts, so that caches evict")
        canaries = [probe for probe in self.sent if probe.kind == "repeat"]
        until = self._elapsed() + 0.2 * self.settings.seconds
        tokens, words = 0, min(200, self.writer.longest)
        one_token = self.writer.one_token()
        while self._elapsed() < until:
            batch = [
                {**self.writer.plain(self.writer.text(words)), **one_token}
                for _ in range(self.settings.workers)
            ]
            started = time.monotonic()
            try:
                answers = self._all_at_once(self.client.ask, batch)
            except RequestRefusedError:
                words //= 2
                if words < 32:
                    break
                continue
            tokens += sum(answer.prompt_tokens or words for answer in answers)
            # A slow server would take minutes for long prompts.
            if time.monotonic() - started < 2:
                words = min(2 * words, self.writer.longest, 1500)
            # A look brings a canary back, so each serves once.
            if tokens > 16_000 and canaries:
                canary = canaries.pop(0)
                cached = self.client.ask(canary.content).cached_tokens
                if cached is not None and cached * 4 < (canary.answer.prompt_tokens or 0):
                    self.result.notes.append(
                        f"{tokens:,} tokens of other prompts evicted earlier ones."
                    )
                    return
                if not canaries and cached is None:
                    break
        self.result.notes.append(
            f"{tokens:,} tokens of other prompts were sent so that caches evict; whether they did"
            " is not known."
        )

    def _send_again(self) -> None:
        """Send earlier probes again, the second of each pair first."""
        self.report("sending earlier probes again")
        until = max(self.settings.seconds, self._elapsed() + 0.1 * self.settings.seconds)
        changed: list[bool] = []
        for probe in self.sent:
            if self._elapsed() > until:
                break
            now = self._compare_later("evicted", probe, f"first sent as {probe.kind}")
            if now is not None and probe.truths:
                changed.append(spread([now, probe.truths[-1]]) > self.result.noise.limit)
        if changed and sum(changed) > len(changed) / 2:
            self.result.notes.append(
                "The server's answers without a cache changed during the run: other weights or"
                " settings. Answers of before are stale."
            )

    def _write_notes(self) -> None:
        client, notes = self.client, self.result.notes
        if not client.has_logprobs:
            notes.append(
                "The server gives no log probabilities: texts alone were compared, which shows"
                " less."
            )
        if self.result.noise.sampled > 0.02:
            notes.append(
                "Sampling is forced (tokens were not the likeliest): answers were compared up to"
                " the first different token."
            )
        if not self.writer.counted:
            notes.append("Lengths are in words: the server's tokens are not one for each word.")
        if self.way is None and self.reference is None:
            notes.append(
                "Only first answers are known to be computed: where the second probe of a pair is"
                " wrong each time, --url2 with a server without a cache would show it."
            )
        if self.result.blind:
            notes.append(
                f"A mix-up would not show in {', '.join(sorted(self.result.blind))}: this model"
                " answers both prompts of their pairs alike."
            )
        cached = [count for count, _ in self.result.cached]
        if cached and not any(cached):
            notes.append("No prompt that came again had cached tokens: no cache was tried.")
        for event in ("rate limits", "server errors", "connection errors"):
            if client.events[event]:
                notes.append(
                    f"{client.events[event]} {event} in {client.events['requests']} requests."
                )


def _verdict_of(apart: float, limit: float) -> str:
    if apart <= SAME:
        return EQUAL
    return ROUNDING if apart <= limit else WRONG
