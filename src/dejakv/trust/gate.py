"""Gate that decides which would-be hits are served, and which are computed both ways.

draw = gate.draw(gate.class_of(partition, epoch, "blend", "default"), features)
# serve the approximate answer if draw.served; if draw.labelled, compute the other one too,
# compare, and then
gate.learn(draw, wrong)
"""

import logging
import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from dejakv.errors import ConfigError, InputError, StoreError
from dejakv.trust.draw import MAX_AUDITS, ClassKey, HitDraw, PendingLabels
from dejakv.trust.evidence import ClassEvidence, EvidenceTerms, HitCounts, labels_needed
from dejakv.trust.features import LATE_BLEND, LATE_CUTOFFS, TIME_SHARE, risk_of
from dejakv.trust.ledger import EvidenceLedger
from dejakv.trust.report import TrustReport, class_report, report_of
from dejakv.trust.rules import PILOT, band_of
from dejakv.trust.settings import TrustSettings

logger = logging.getLogger("dejakv.trust")


class TrustGate:
    """Gate that decides which would-be hits are served and which are labelled.

    Thread-safe. Nothing is served without evidence, or while evidence cannot be read or written.

    Parameters
    ----------
    settings : TrustSettings
        Bound, confidence and shares.
    ledger : EvidenceLedger, optional
        Where evidence is stored. With None it is in memory.
    random : Callable[[], float]
        Source of numbers in [0, 1) that a client can neither see nor influence.

    Raises
    ------
    ConfigError
        For settings without an error bound.
    """

    def __init__(
        self,
        settings: TrustSettings,
        *,
        ledger: EvidenceLedger | None = None,
        random: Callable[[], float] = secrets.SystemRandom().random,
    ) -> None:
        if settings.error_bound is None:
            raise ConfigError(
                "error_bound is None: a gate needs a bound, such as 0.01, or is left out"
            )

        self.settings = settings
        self.terms = EvidenceTerms.from_settings(settings)
        self._ledger = EvidenceLedger() if ledger is None else ledger
        self._random = random
        self._min_labels = labels_needed(settings.error_bound, settings.confidence)
        self._pending: defaultdict[ClassKey, PendingLabels] = defaultdict(PendingLabels)
        self._process = os.getpid()
        self._resumed = self._closed = False
        # The ledger's own lock: a fork waits for it, and so interrupts neither of the two.
        self._lock = self._ledger.lock

    def class_of(self, partition: str, epoch: str, method: str, setting: str) -> ClassKey:
        """Return the class of hits of a method with one quality.

        Parameters
        ----------
        partition : str
            Partition of the requests, of which the class has the group.
        epoch : str
            Epoch of the model.
        method : str
            Method of the approximate plan.
        setting : str
            Settings that its quality depends on.
        """
        return ClassKey(epoch, method, setting, self.settings.group_of(partition))

    def tries(self, cls: ClassKey, features: Mapping[str, float]) -> bool:
        """Return whether a hit may be tried before its risk is known.

        It may if an open rule could serve it then. A ledger that cannot be read allows no try.

        Parameters
        ----------
        features : Mapping[str, float]
            Features known before the try: `TIME_SHARE`.
        """
        with self._lock:
            try:
                state = self._ledger.read(cls)
            except StoreError:
                return False
            return (
                state is not None
                and not self._audits_overdue(cls)
                and _serves(state, 0.0, features.get(TIME_SHARE, 0.0))
            )

    def draw(self, cls: ClassKey, features: Mapping[str, float], *, late: bool = False) -> HitDraw:
        """Decide about one would-be hit.

        A ledger that cannot be read or written refuses it, with the reason.

        Parameters
        ----------
        features : Mapping[str, float]
            Features of the plan (`features_of`); of a plan that was tried also `TIME_SHARE` and
            `certainty`.
        late : bool
            Whether the hit is not tried (see `tries`): its label brings the features that decide
            its risk.
        """
        time = float(features.get(TIME_SHARE, 0.0))
        candidate = HitDraw(
            cls,
            0.0 if late else risk_of(cls.method, features),
            time,
            late=late,
            id=secrets.token_hex(16),
        )

        with self._lock:
            try:
                drawn = self._draw(candidate)
                self._count(cls, HitCounts(served=1) if drawn.served else HitCounts(refused=1))
                if drawn.labelled:
                    # Before the answer leaves: if the process is killed, its label counts as wrong.
                    self._ledger.note(drawn)
            except StoreError as error:
                logger.warning("nothing approximate is served: %s", error)
                drawn = replace(candidate, reason=f"gate closed: {error}")
            if drawn.labelled:
                self._pending[cls].add(drawn)
        return drawn

    def learn(
        self, draw: HitDraw, wrong: bool, features: Mapping[str, float] | None = None
    ) -> None:
        """Count a label. A second one of the same draw is ignored.

        Parameters
        ----------
        wrong : bool
            Whether the approximate answer was wrong, or the label failed after it began.
        features : Mapping[str, float], optional
            Features of a late draw, from its try. Without them a wrong answer counts for every
            rule, and a right one for none.

        Raises
        ------
        InputError
            For a draw that was not to be labelled, since labels of chosen draws would be biased.
        """
        if not draw.labelled:
            raise InputError(
                f"the draw {draw.id} was not to be labelled: hand back the "
                "outcomes of labelled draws alone"
            )
        if draw.late and features:
            draw = replace(draw, risk=risk_of(draw.cls.method, features))
        # Without features its risk is unknown: as evidence for every rule it would be too good.
        elif draw.late and not wrong:
            self.lost(draw)

        self._settle(draw, bool(wrong))

    def lost(self, draw: HitDraw) -> None:
        """Drop a label before anything of its outcome could be known.

        An audit counts as wrong. A gate without audits would serve for ever otherwise. A draw that
        was not to be labelled is ignored.
        """
        if draw.labelled:
            self._settle(draw, True if draw.served else None, lost=True)

    def report(self, partition: str | None = None) -> TrustReport:
        """Return the evidence of a partition's group, or of all groups.

        Raises
        ------
        StoreError
            If the evidence cannot be read.
        """
        group = None if partition is None else self.settings.group_of(partition)
        with self._lock:
            class_states = self._ledger.classes(group)
            waiting = {cls: len(pending) for cls, pending in self._pending.items()}

        classes = [
            class_report(cls, state, self.terms, waiting.get(cls, 0))
            for cls, state, _ in class_states
        ]
        return report_of(self.terms, self.settings.confidence, classes)

    def report_or_none(self, partition: str | None = None) -> TrustReport | None:
        """Return the report; None and a warning while the evidence cannot be read."""
        try:
            return self.report(partition)
        except StoreError as error:
            logger.warning("the evidence for the error bound cannot be read: %s", error)
            return None

    def close(self) -> None:
        """Close the ledger. Awaited labels count as wrong.

        The end of a process would choose which labels count otherwise.
        """
        with self._lock:
            self._reset_after_fork()
            self._closed = True
            try:
                for cls, pending in list(self._pending.items()):
                    pending.give_up()
                    self._write(cls)
            except StoreError as error:
                logger.warning("labels are not counted before the next start: %s", error)

            self._ledger.close()

    def _reset_after_fork(self) -> None:
        # A child of fork: its parent waits for these labels.
        if self._process != os.getpid():
            self._process = os.getpid()
            self._pending.clear()

    def _audits_overdue(self, cls: ClassKey) -> bool:
        """Return whether too many audits are awaited to serve more hits."""
        return cls in self._pending and self._pending[cls].audits >= MAX_AUDITS

    def _draw(self, candidate: HitDraw) -> HitDraw:
        """Draw for a hit.

        The risk of a late one is 0, so that a wrong label without features counts for every rule of
        this time.
        """
        # A class without rules collects its pilot first, and late blends have their rules from the
        # start.
        cls, risk, time = candidate.cls, candidate.risk, candidate.time

        state = self._state(cls)
        if not state.cutoffs and cls.method == LATE_BLEND:
            state = self._ledger.change(cls, lambda state: state.ruled(LATE_CUTOFFS))
        if not state.cutoffs:
            state = self._ledger.change(cls, lambda state: state.piloted(risk))
            return replace(candidate, reason=_reason(state, candidate, self._min_labels))

        served = _serves(state, risk, time)

        drawn = replace(candidate, round=state.round, opened=state.opened, warned=state.warned)
        if served and self._audits_overdue(cls):
            return replace(drawn, reason=f"{MAX_AUDITS} served hits wait for their audits")
        # Its risk of 0 stands for "unknown", so it cannot be served by it.
        if served and candidate.late:
            return replace(drawn, reason="a rule has opened meanwhile")

        share = self.terms.explore if not served else 1.0 if state.warned else self.terms.audit
        # Drawn without regard to the hit, or its labels would be biased.
        labelled = self._random() < share
        reason = _reason(state, candidate, self._min_labels)
        return replace(drawn, served=served, labelled=labelled, share=share, reason=reason)

    def _settle(self, draw: HitDraw, wrong: bool | None, *, lost: bool = False) -> None:
        with self._lock:
            pending = self._pending.get(draw.cls)
            if self._closed or pending is None or not pending.awaits(draw):
                return

            # Noted first: if the ledger cannot be written, the label waits for the next attempt.
            pending.settle(draw, wrong)
            try:
                if lost:
                    self._count(draw.cls, HitCounts(lost=1))
                self._write(draw.cls)
            except StoreError as error:
                logger.warning(
                    "a label waits to be written, and nothing approximate is served: %s", error
                )

    def _count(self, cls: ClassKey, counts: HitCounts) -> None:
        self._ledger.change(cls, lambda state: state.counted(counts))

    def _state(self, cls: ClassKey) -> ClassEvidence:
        """Return the state of a class, with all labels that are ready."""
        self._reset_after_fork()
        if not self._resumed:
            missing = self._ledger.abandoned_draws()
            for draw in missing:
                self._apply_label(draw, True)
            if missing:
                logger.warning(
                    "%d labels that an ended process did not tell count as wrong", len(missing)
                )
            # Only after all were counted: what failed is tried again with the next draw.
            self._resumed = True

        self._write(cls)
        return self._ledger.read(cls) or self._ledger.change(cls, lambda state: state)

    def _write(self, cls: ClassKey) -> None:
        """Count the labels that are ready."""
        if (pending := self._pending.get(cls)) is None:
            return
        for draw, wrong in pending.ready():
            if wrong is None:
                self._ledger.drop(draw.id)
            else:
                self._apply_label(draw, wrong)

        if not pending:
            del self._pending[cls]

    def _apply_label(self, draw: HitDraw, wrong: bool) -> None:

        before = self._ledger.read(draw.cls)
        after = self._ledger.change(
            draw.cls,
            lambda state: state.learned(
                draw.round,
                draw.risk,
                draw.opened,
                wrong,
                self.terms,
                warned=draw.warned,
                time=draw.time,
            ),
            labelled_draw=draw,
        )
        if before is not None and after.counts.alarms > before.counts.alarms:
            message = (
                "the gate of %s, %s closes: more than %s of what it serves "
                "is wrong or was never audited"
            )
            logger.warning(message, draw.cls.method, draw.cls.setting, self.terms.delta)


def _serves(state: ClassEvidence, risk: float, time: float) -> bool:
    """Return whether an open rule serves hits of this risk whose try takes this share of time.

    The share is of the exact plan's time.
    """
    return state.opened > 0 and band_of(risk, state.cutoffs, time) < state.opened


def _reason(state: ClassEvidence, candidate: HitDraw, min_labels: int | None) -> str:
    """Return why a hit is served or not, in words for a record.

    Parameters
    ----------
    min_labels : int, optional
        Labels that the strictest rule takes at least.
    """
    if not state.cutoffs:
        return f"gate closed: {len(state.pilot)} of {PILOT} hits seen that choose the rules"
    if not state.opened:
        tally = state.tallies[0]
        wrong = f", {tally.band_wrong} of them wrong" if tally.band_wrong else ""
        return (
            f"gate closed: {tally.band} labels{wrong} under the strictest "
            f"rule, of {min_labels} at least"
        )

    if candidate.late:
        return f"{candidate.time:.0%} of the exact plan's time is more than open rules spend"
    relation = "within" if _serves(state, candidate.risk, candidate.time) else "above"
    return (
        f"risk {candidate.risk:.3g} is {relation} the open rules' "
        f"{state.cutoffs[state.opened - 1]:.3g}"
    )
