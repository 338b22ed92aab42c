"""The gate decides which would-be hits are served, and which are computed both ways to learn from.

draw = gate.draw(partition="", epoch=epoch, method="blend", setting="default", features=features)
# serve the approximate answer if draw.served; if draw.labelled, compute the other one too, compare, and then
gate.learn(draw, wrong)
"""

import logging
import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from dejakv.errors import ConfigError, InputError, StoreError
from dejakv.trust.draw import MOST_AUDITS, ClassKey, Draw, Pending
from dejakv.trust.evidence import Counts, State, Terms, labels_needed
from dejakv.trust.features import TIME_SHARE, risk_of
from dejakv.trust.ledger import Ledger
from dejakv.trust.report import TrustReport, class_report, whole_report
from dejakv.trust.rules import PILOT, band_of
from dejakv.trust.settings import TrustSettings

logger = logging.getLogger("dejakv.trust")


class Gate:
    """Thread-safe. It serves nothing until there is evidence, and nothing while evidence cannot be read or written.

    ledger  where evidence is kept; None: in memory
    random  gives numbers in [0, 1) that a client can neither see nor influence

    Raises: ConfigError for settings without an error bound.
    """

    def __init__(
        self,
        settings: TrustSettings,
        *,
        ledger: Ledger | None = None,
        random: Callable[[], float] = secrets.SystemRandom().random,
    ) -> None:
        if settings.error_bound is None:
            raise ConfigError("error_bound is None: a gate needs a bound, such as 0.01, or is left out")
        self.settings = settings
        self.terms = Terms.of(settings)
        self._ledger = Ledger() if ledger is None else ledger
        self._random = random
        self._least = labels_needed(settings.error_bound, settings.confidence)
        self._pending: defaultdict[ClassKey, Pending] = defaultdict(Pending)
        self._uncounted: defaultdict[ClassKey, Counts] = defaultdict(Counts)
        self._process = os.getpid()
        self._resumed = self._closed = False
        self._lock = self._ledger.lock

    def tries(self, features: Mapping[str, float], *, partition: str, epoch: str, method: str, setting: str) -> bool:
        """Whether a hit may be tried before its risk is known: an open rule could serve it then. A ledger that cannot be read is no.

        features  known before the try: `TIME_SHARE`
        """
        cls = ClassKey(epoch, method, setting, self.settings.group_of(partition))
        with self._lock:
            try:
                state = self._ledger.read(cls)
            except StoreError:
                return False
            return state is not None and not self._waits(cls) and _may_serve(state, features.get(TIME_SHARE, 0.0))

    def draw(
        self,
        *,
        partition: str,
        epoch: str,
        method: str,
        setting: str,
        features: Mapping[str, float],
        late: bool = False,
    ) -> Draw:
        """Decides about one would-be hit. A ledger that cannot be read or written refuses it, and the reason says why.

        features  of the plan: `trust.features.features_of`; of a plan that was tried also `TIME_SHARE` and `certainty`
        late      the hit is not tried now (see `tries`); its label brings the features that decide its risk
        """
        cls = ClassKey(epoch, method, setting, self.settings.group_of(partition))
        risk = risk_of(method, features)
        known, id = dict(features), secrets.token_hex(16)
        with self._lock:
            try:
                time = features.get(TIME_SHARE, 0.0)
                drawn = self._draw_late(cls, time) if late else self._draw(cls, risk, time)
                drawn = replace(drawn, features=known, id=id)
                if drawn.labelled:
                    self._ledger.note(drawn)
            except StoreError as error:
                logger.warning("nothing approximate is served: %s", error)
                drawn = Draw(False, False, 0.0, None, f"gate closed: {error}", cls, risk, known, id)
            counts = Counts(served=1) if drawn.served else Counts(refused=1)
            self._uncounted[cls] = self._uncounted[cls].plus(counts)
            if drawn.labelled:
                self._pending[cls].add(drawn)
        return drawn

    def learn(self, draw: Draw, wrong: bool, features: Mapping[str, float] | None = None) -> None:
        """Counts a label: whether the approximate answer was wrong. A label that failed after it began is wrong: otherwise whoever makes
        it fail could hide errors. A second label of one draw is ignored.

        features  of a late draw, from its try. Without them a wrong answer counts for every rule, and a right one for none

        Raises: InputError for a draw that was not to be labelled: labels of chosen draws would be biased.
        """
        if not draw.labelled:
            raise InputError(
                f"the draw {draw.id} was not to be labelled: hand back the outcomes of labelled draws alone"
            )
        if draw.late and features:
            known = {**draw.features, **features}
            draw = replace(draw, features=known, risk=risk_of(draw.cls.method, known))
        self._settle(draw, bool(wrong) if features or wrong or not draw.late else None)

    def lost(self, draw: Draw) -> None:
        """Drops a label before anything of its outcome could be known. An audit counts as wrong all the same: otherwise a gate whose
        audits are lost would serve for ever."""
        if draw.labelled:
            self._settle(draw, True if draw.served else None, lost=True)

    def report(self, partition: str | None = None) -> TrustReport:
        """The evidence of a partition's group, or of all groups. Raises: StoreError if it cannot be read."""
        group = None if partition is None else self.settings.group_of(partition)
        with self._lock:
            known = {cls: state for cls, state, _ in self._ledger.classes(group)}
            for cls, counts in self._uncounted.items():
                if group in (None, cls.group):
                    known[cls] = known.get(cls, State()).counted(counts)
            waiting = {cls: len(pending) for cls, pending in self._pending.items()}
        classes = tuple(class_report(cls, state, self.terms, waiting.get(cls, 0)) for cls, state in known.items())
        return whole_report(self.settings, classes)

    def known(self, partition: str | None = None) -> TrustReport | None:
        """The report; None, and a warning in the log, while the evidence cannot be read."""
        try:
            return self.report(partition)
        except StoreError as error:
            logger.warning("the evidence for the error bound cannot be read: %s", error)
            return None

    def close(self) -> None:
        """Writes the counts and closes the ledger. Labels that are still awaited count as wrong: otherwise whoever ends the process
        could choose which count."""
        with self._lock:
            self._own()
            self._closed = True
            try:
                for cls, pending in list(self._pending.items()):
                    pending.give_up()
                    self._write(cls)
                for cls in list(self._uncounted):
                    self._change(cls, lambda state: state)
            except StoreError as error:
                logger.warning("what was served is not counted in full: %s", error)
            self._ledger.close()

    def _own(self) -> None:
        if self._process != os.getpid():  # a child of fork: its parent waits for these labels
            self._process = os.getpid()
            self._pending.clear()
            self._uncounted.clear()

    def _waits(self, cls: ClassKey) -> bool:
        """Whether too many audits are awaited to serve more."""
        return cls in self._pending and self._pending[cls].audits >= MOST_AUDITS

    def _state(self, cls: ClassKey) -> State | None:
        self._own()
        if not self._resumed:
            missing = self._ledger.missing()
            for draw in missing:
                self._learned(draw, True)
            if missing:
                logger.warning("%d labels that an ended process did not tell count as wrong", len(missing))
            self._resumed = True
        self._write(cls)
        return self._ledger.read(cls)

    def _draw_late(self, cls: ClassKey, time: float) -> Draw:
        """Draws for a hit that no open rule covers, whatever its risk turns out to be. A wrong label that never tells the risk counts for
        every rule that serves hits of this time."""
        state = self._state(cls) or self._change(cls, lambda state: state)
        if _may_serve(state, time):
            reason = _WAITS if self._waits(cls) else "a rule has opened meanwhile"
            return Draw(False, False, 0.0, None, reason, cls, 0.0)
        share, rule = self.terms.explore, state.opened - 1 if state.opened else None
        too_long = f"{time:.0%} of the exact plan's time is more than open rules spend"
        reason = too_long if state.opened else _reason(state, False, 1.0, self._least)
        labelled = self._random() < share
        return Draw(
            False, labelled, share, rule, reason, cls, 0.0, round=state.round, late=True, warned=state.warned
        )  # fmt: skip

    def _draw(self, cls: ClassKey, risk: float, time: float) -> Draw:
        state = self._state(cls)
        if state is None or not state.cutoffs:
            state = self._change(cls, lambda state: state.piloted(risk))
            return Draw(False, False, 0.0, None, _reason(state, False, risk, self._least), cls, risk)
        band = band_of(risk, state.cutoffs, time)
        served = band < state.opened
        if served and self._waits(cls):
            return Draw(False, False, 0.0, state.opened - 1, _WAITS, cls, risk, round=state.round)
        warned = state.warned
        share = (1.0 if warned else self.terms.audit) if served else self.terms.explore
        labelled = self._random() < share
        rule = state.opened - 1 if state.opened else None
        reason = _reason(state, served, risk, self._least)
        return Draw(served, labelled, share, rule, reason, cls, risk, round=state.round, warned=warned)

    def _settle(self, draw: Draw, wrong: bool | None, *, lost: bool = False) -> None:
        with self._lock:
            lost = lost or wrong is None
            if self._closed or (lost and not self._pending[draw.cls].waits_for(draw)):
                return
            self._pending[draw.cls].settle(draw, wrong)
            if lost:
                self._uncounted[draw.cls] = self._uncounted[draw.cls].plus(Counts(lost=1))
            try:
                self._write(draw.cls)
            except StoreError as error:
                logger.warning("a label waits to be written, and nothing approximate is served: %s", error)

    def _write(self, cls: ClassKey) -> None:
        """Counts the labels that are ready."""
        for draw, wrong in self._pending[cls].ready():
            if wrong is None:
                self._ledger.drop(draw.id)
            else:
                self._learned(draw, wrong)
        if not self._pending[cls]:
            del self._pending[cls]

    def _learned(self, draw: Draw, wrong: bool) -> None:
        before = self._ledger.read(draw.cls)
        after = self._change(
            draw.cls,
            lambda state: state.learned(
                draw.round,
                draw.risk,
                draw.opened,
                wrong,
                self.terms,
                warned=draw.warned,
                time=draw.features.get(TIME_SHARE, 0.0),
            ),
            once=draw.id,
        )
        if before is not None and after.counts.alarms > before.counts.alarms:
            said = "the gate of %s, %s closes: more than %s of what it serves is wrong or was never audited"
            logger.warning(said, draw.cls.method, draw.cls.setting, self.terms.delta)

    def _change(self, cls: ClassKey, change: Callable[[State], State], *, once: str = "") -> State:
        """Applies a change to a class, together with the counts that this process has not written yet."""
        counts = self._uncounted.get(cls, Counts())
        taken = False

        def changed(state: State) -> State:
            nonlocal taken
            taken = True
            return change(state).counted(counts)

        state = self._ledger.change(cls, changed, once=once)
        if taken:
            self._uncounted.pop(cls, None)
        return state


_WAITS = f"{MOST_AUDITS} served hits wait for their audits"


def _may_serve(state: State, time: float) -> bool:
    """Whether an open rule serves hits whose try takes this share of the exact plan's time."""
    return state.opened > 0 and band_of(0.0, state.cutoffs, time) < state.opened


def _reason(state: State, served: bool, risk: float, least: int | None) -> str:
    if not state.cutoffs:
        return f"gate closed: {len(state.pilot)} of {PILOT} hits seen that choose the rules"
    if not state.opened:
        tally = state.tallies[0]
        wrong = f", {tally.band_wrong} of them wrong" if tally.band_wrong else ""
        return f"gate closed: {tally.band} labels{wrong} under the strictest rule, of {least} at least"
    cutoff = state.cutoffs[state.opened - 1]
    return f"risk {risk:.3g} is {'within' if served else 'above'} the open rules' {cutoff:.3g}"
