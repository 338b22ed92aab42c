"""Guards that accept or reject a donor, or abstain from it.

`judge` asks several guards in order. The guards here look at the score, the media, and the prompt
around the compared text.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dejakv.decide.levels.base import Match
from dejakv.errors import ConfigError, former_names
from dejakv.request import Request
from dejakv.store.base import StateInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GuardVerdict:
    """A decision, the guard that took it, and its reason.

    Attributes
    ----------
    decision : {"accept", "reject", "abstain"}
        Decision on the donor.
    guard : str
        Name of the guard.
    reason : str
        Reason for the decision, without the donor's text, which may be another caller's.
    """

    decision: Literal["accept", "reject", "abstain"]
    guard: str
    reason: str


class Guard:
    """Base of guards. A subclass writes `judge`.

    Attributes
    ----------
    name : str
        Name of the guard in verdicts and counts.
    waived_for_blend : bool
        Whether piecewise methods do without the guard, since they compute the words that differ.
    """

    name: str
    waived_for_blend: bool = False

    def judge(self, request: Request, donor: StateInfo, match: Match) -> GuardVerdict:
        """Judge one donor.

        An exception counts as a rejection with the kind of the exception as its reason.

        Parameters
        ----------
        request : Request
            Request that would use the donor.
        donor : StateInfo
            Description of the donor's state.
        match : Match
            Level and score by which the donor was found.

        Returns
        -------
        GuardVerdict
            Decision of this guard and its reason.
        """
        raise NotImplementedError(f"the guard {self.name} needs `judge`: return a GuardVerdict")


def judge(
    guards: Sequence[Guard], request: Request, donor: StateInfo, match: Match
) -> GuardVerdict:
    """Ask the guards in order and return one verdict.

    The first rejection wins, also that of a guard that failed, whose reason is the kind of its
    error. Without a rejection the first acceptance wins. If all guards abstain, the donor is
    rejected.
    """
    accepted: GuardVerdict | None = None
    for guard in guards:
        try:
            verdict = guard.judge(request, donor, match)
        except Exception as error:
            # For debugging alone: its message may hold a donor's text.
            logger.debug("the guard %s failed", guard.name, exc_info=True)
            return GuardVerdict("reject", guard.name, f"the guard failed: {type(error).__name__}")
        if verdict.decision == "reject":
            return verdict

        # Only noted: a later guard may still reject.
        if verdict.decision == "accept" and accepted is None:
            accepted = verdict

    if accepted is not None:
        return accepted
    reason = (
        "all guards abstained"
        if guards
        else "there is no guard that could accept: add a ThresholdGuard"
    )
    return GuardVerdict("reject", "chain", reason)


@dataclass(frozen=True)
class ThresholdGuard(Guard):
    """Guard that accepts a score at or above its level's threshold and rejects one below it.

    A request's own threshold can only be stricter: the higher of the two counts. Text that is equal
    once normalized (`exact_text`) reaches every threshold below 1. At 1 the texts themselves must
    be equal, whatever the level. A layer's own threshold is a cosine.

    Parameters
    ----------
    thresholds : Mapping[str, float]
        Thresholds in [-1, 1] by the level that a match names (`semantic_text`, `embedding:prompt`,
        ...).
    default : float, optional
        Threshold of all other levels. With None the guard abstains on them.

    Raises
    ------
    ConfigError
        For a threshold outside of [-1, 1].

    Examples
    --------
    >>> donor = StateInfo("d", "default", "epoch", (1, 2), "Where is it?", "Where is it?")
    >>> guard = ThresholdGuard({"semantic_text": 0.85})
    >>> guard.judge(Request("r", "Where?", "Where?"), donor, Match("d", "semantic_text", 0.8))
    GuardVerdict(decision='reject', guard='threshold', reason='score 0.800 is below 0.85')
    >>> guard.judge(Request("r", "Where?", "Where?"), donor, Match("d", "exact_text", 1.0)).decision
    'accept'
    """

    thresholds: Mapping[str, float] = field(default_factory=dict[str, float])
    default: float | None = None
    name: str = "threshold"

    def __post_init__(self) -> None:
        for level, threshold in {**self.thresholds, "other levels": self.default}.items():
            if threshold is not None and not -1.0 <= threshold <= 1.0:
                raise ConfigError(
                    f"the threshold {threshold} of {level} is no cosine: give a number from -1 to 1"
                )

    def judge(self, request: Request, donor: StateInfo, match: Match) -> GuardVerdict:
        """Compare the match's score with the stricter one of the level's and the request's."""
        threshold = self.thresholds.get(match.level, self.default)
        if request.threshold is not None:
            threshold = (
                request.threshold if threshold is None else max(threshold, request.threshold)
            )

        # At 1 the request asks for equal text, and normalized text may still differ.
        text = match.level in ("exact_text", "semantic_text") or (request.threshold or 0) >= 1
        if text and (threshold or 0) >= 1 and request.chunk != donor.chunk:
            return GuardVerdict(
                "reject", self.name, "the texts are not equal, as a threshold of 1 asks"
            )

        if match.level == "exact_text":
            return GuardVerdict("accept", self.name, "equal text")

        if threshold is None:
            return GuardVerdict("abstain", self.name, f"no threshold is set for {match.level}")
        if match.score >= threshold:
            return GuardVerdict(
                "accept", self.name, f"score {match.score:.3f} reaches {threshold:g}"
            )
        return GuardVerdict("reject", self.name, f"score {match.score:.3f} is below {threshold:g}")


class MediaGuard(Guard):
    """Guard that rejects a donor with other media, and abstains from every other donor.

    It checks once more what the spaces of `--media exact` already keep apart.

    Parameters
    ----------
    min_cosine : float, optional
        For `--media similar`: least cosine with which the vision layer accepts other media.

    Examples
    --------
    >>> from dejakv.request import Media
    >>> donor = StateInfo("d", "default", "epoch", (1, 2), "What is this?", "What is this?")
    >>> asked = Request("r", "What is this?", "What is this?", (Media(b"a picture"),))
    >>> MediaGuard().judge(asked, donor, Match("d", "exact_text", 1.0)).reason
    'other media: 1 here, 0 there, not the same ones'
    """

    def __init__(self, min_cosine: float | None = None) -> None:
        self.min_cosine = min_cosine
        self.name = "media" if min_cosine is None else "vision"

    def judge(self, request: Request, donor: StateInfo, match: Match) -> GuardVerdict:
        """Compare the digests of the media, and their cosine if `min_cosine` allows it."""
        # In order and each once: a picture shown twice is one medium.
        request_digests = list(dict.fromkeys(medium.digest for medium in request.media))
        donor_digests = list(dict.fromkeys(span.digest for span in donor.spans))
        if request_digests == donor_digests:
            return GuardVerdict(
                "abstain", self.name, "the same media" if request_digests else "no media"
            )

        if self.min_cosine is None:
            reason = (
                f"other media: {len(request_digests)} here, "
                f"{len(donor_digests)} there, not the same ones"
            )
            return GuardVerdict("reject", self.name, reason)

        score = match.layers.get("vision")
        if score is None:
            return GuardVerdict(
                "reject", self.name, f"other media, and {match.level} has not compared them"
            )
        if score < self.min_cosine:
            return GuardVerdict(
                "reject",
                self.name,
                f"other media, and their cosine {score:.3f} is below {self.min_cosine:g}",
            )
        return GuardVerdict("abstain", self.name, f"other media that look alike ({score:.3f})")


class ContextGuard(Guard):
    """Guard that rejects a donor whose prompt differs outside the compared text.

    No level compares that text, such as another document or another system prompt. The guard never
    accepts. It abstains from all other donors, also where a prompt does not contain its compared
    text, which may be made of other fields.
    """

    name = "context"
    # A blend recomputes what differs, so words may differ.
    waived_for_blend = True

    def judge(self, request: Request, donor: StateInfo, match: Match) -> GuardVerdict:
        """Compare the prompts before and after the compared text."""
        request_context, donor_context = (
            _around(request.prompt, request.chunk),
            _around(donor.prompt, donor.chunk),
        )
        if request_context is None or donor_context is None:
            return GuardVerdict(
                "abstain",
                self.name,
                "the prompt does not contain the chunk: its surroundings are unknown",
            )
        if request_context != donor_context:
            return GuardVerdict("reject", self.name, "the prompts differ outside the compared text")
        return GuardVerdict("abstain", self.name, "the prompts are equal outside the compared text")


def _around(prompt: str, chunk: str) -> tuple[str, str] | None:
    """Return the prompt before and after its last occurrence of the chunk; None without one."""
    if not chunk or chunk not in prompt:
        return None

    # The last occurrence: the text before the compared one may hold the same words.
    before, _, after = prompt.rpartition(chunk)
    return before, after


__getattr__ = former_names(__name__, Verdict="GuardVerdict")
