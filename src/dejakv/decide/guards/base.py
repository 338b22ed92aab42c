"""Guards look at a request, a donor and their match, and accept, reject or abstain; `judge` asks them in a row.

Here are those of the score, the media, and the prompt around the chunk.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dejakv.decide.levels.base import Match
from dejakv.errors import ConfigError
from dejakv.request import Request
from dejakv.store.base import ChunkMeta

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """A decision, its guard and its reason: the guard's own words and numbers, since the donor's text may be another caller's."""

    decision: Literal["accept", "reject", "abstain"]
    guard: str
    reason: str


class Guard:
    """Base of guards: write `judge`.

    name              of the guard in verdicts and counts
    waived_for_blend  whether blend and top_layer do without it, since they compute the words that differ
    """

    name: str
    waived_for_blend: bool = False

    def judge(self, request: Request, donor: ChunkMeta, match: Match) -> Verdict:
        """Judges one donor. An exception counts as a rejection, with its kind as the reason."""
        raise NotImplementedError(f"the guard {self.name} needs `judge`: return a Verdict")


def judge(guards: Sequence[Guard], request: Request, donor: ChunkMeta, match: Match) -> Verdict:
    """Ask the guards in order and return one verdict. Never raises.

    The first rejection wins, a guard's failure included, whose reason is the kind of its error; else the first acceptance.
    Without either, the donor is rejected.
    """
    accepted: Verdict | None = None
    for guard in guards:
        try:
            verdict = guard.judge(request, donor, match)
        except Exception as error:
            logger.debug("the guard %s failed", guard.name, exc_info=True)  # its message may hold a donor's text
            return Verdict("reject", guard.name, f"the guard failed: {type(error).__name__}")
        if verdict.decision == "reject":
            return verdict
        # Only noted: a later guard may still reject.
        if verdict.decision == "accept" and accepted is None:
            accepted = verdict

    if accepted is not None:
        return accepted
    reason = "all guards abstained" if guards else "there is no guard that could accept: add a ThresholdGuard"
    return Verdict("reject", "chain", reason)


@dataclass(frozen=True)
class ThresholdGuard(Guard):
    """Accepts a score at or above its level's threshold, rejects one below it. A threshold of 1 asks for equal text.

    thresholds  by the level a match names (`semantic_text`, `embedding:prompt`, ...); any number in [-1, 1], 0 included
    default     for levels that are not named; None: the guard abstains on them

    A request's own threshold can only tighten: the higher of the two counts. Text that is equal once normalized (`exact_text`) reaches
    every threshold below 1. At 1 the texts themselves must be equal, whatever the level; a layer's own threshold is a cosine.

    >>> donor = ChunkMeta("d", "default", "epoch", (1, 2), "Where is it?", "Where is it?")
    >>> guard = ThresholdGuard({"semantic_text": 0.85})
    >>> guard.judge(Request("r", "Where?", "Where?"), donor, Match("d", "semantic_text", 0.8))
    Verdict(decision='reject', guard='threshold', reason='score 0.800 is below 0.85')
    >>> guard.judge(Request("r", "Where?", "Where?"), donor, Match("d", "exact_text", 1.0)).decision
    'accept'
    """

    thresholds: Mapping[str, float] = field(default_factory=dict[str, float])
    default: float | None = None
    name: str = "threshold"

    def __post_init__(self) -> None:
        for level, threshold in {**self.thresholds, "other levels": self.default}.items():
            if threshold is not None and not -1.0 <= threshold <= 1.0:
                raise ConfigError(f"the threshold {threshold} of {level} is no cosine: give a number from -1 to 1")

    def judge(self, request: Request, donor: ChunkMeta, match: Match) -> Verdict:
        threshold = self.thresholds.get(match.level, self.default)
        if request.threshold is not None:
            threshold = request.threshold if threshold is None else max(threshold, request.threshold)
        text = match.level in ("exact_text", "semantic_text") or (request.threshold or 0) >= 1
        if text and (threshold or 0) >= 1 and request.chunk != donor.chunk:
            return Verdict("reject", self.name, "the texts are not equal, as a threshold of 1 asks")

        if match.level == "exact_text":
            return Verdict("accept", self.name, "equal text")
        if threshold is None:
            return Verdict("abstain", self.name, f"no threshold is set for {match.level}")
        if match.score >= threshold:
            return Verdict("accept", self.name, f"score {match.score:.3f} reaches {threshold:g}")
        return Verdict("reject", self.name, f"score {match.score:.3f} is below {threshold:g}")


class MediaGuard(Guard):
    """Rejects a donor with other media, whatever space it was found in: a second lock on `--media exact`.

    min_cosine  for `--media similar`: other media may do if the vision layer has compared them and their cosine is at least this

    >>> from dejakv.request import Media
    >>> donor = ChunkMeta("d", "default", "epoch", (1, 2), "What is this?", "What is this?")
    >>> asked = Request("r", "What is this?", "What is this?", (Media(b"a picture"),))
    >>> MediaGuard().judge(asked, donor, Match("d", "exact_text", 1.0)).reason
    'other media: 1 here, 0 there, not the same ones'
    """

    def __init__(self, min_cosine: float | None = None) -> None:
        self.least = min_cosine
        self.name = "media" if min_cosine is None else "vision"

    def judge(self, request: Request, donor: ChunkMeta, match: Match) -> Verdict:
        request_digests = list(dict.fromkeys(medium.digest for medium in request.media))
        donor_digests = list(dict.fromkeys(span.digest for span in donor.spans))
        if request_digests == donor_digests:
            return Verdict("abstain", self.name, "the same media" if request_digests else "no media")
        if self.least is None:
            reason = f"other media: {len(request_digests)} here, {len(donor_digests)} there, not the same ones"
            return Verdict("reject", self.name, reason)

        score = match.layers.get("vision")
        if score is None:
            return Verdict("reject", self.name, f"other media, and {match.level} has not compared them")
        if score < self.least:
            return Verdict("reject", self.name, f"other media, and their cosine {score:.3f} is below {self.least:g}")
        return Verdict("abstain", self.name, f"other media that look alike ({score:.3f})")


class ContextGuard(Guard):
    """Rejects a donor whose prompt differs outside the chunk (another document, another system prompt), which no level compares. Never
    accepts: abstains from all others, also where a prompt does not contain its chunk (a chunk of other fields)."""

    name = "context"
    waived_for_blend = True  # it recomputes what differs, so words may differ

    def judge(self, request: Request, donor: ChunkMeta, match: Match) -> Verdict:
        request_context, donor_context = _around(request.prompt, request.chunk), _around(donor.prompt, donor.chunk)
        if request_context is None or donor_context is None:
            return Verdict("abstain", self.name, "the prompt does not contain the chunk: its surroundings are unknown")
        if request_context != donor_context:
            return Verdict("reject", self.name, "the prompts differ outside the compared text")
        return Verdict("abstain", self.name, "the prompts are equal outside the compared text")


def _around(prompt: str, chunk: str) -> tuple[str, str] | None:
    """The prompt before and after its last occurrence of the chunk; None without one."""
    if not chunk or chunk not in prompt:
        return None
    # The last one: a question may quote itself in the prompt before it.
    before, _, after = prompt.rpartition(chunk)
    return before, after
