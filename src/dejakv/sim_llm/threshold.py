"""A threshold learnt from labelled answers: the lowest at which reuse is wrong seldom enough."""

import bisect
import threading
from collections import deque

from dejakv.errors import ConfigError, InputError
from dejakv.experiments.scoring import wilson


class AdaptiveThreshold:
    """Feedback is the similarity of a hit and whether its answer was right. Thread-safe.

    max_error  share of hits that may be wrong. The threshold is the lowest observed similarity from which on the 95% upper
               bound (Wilson) of the wrong share is at most this
    start      the threshold until enough is known, and when no similarity is safe enough
    window     labels remembered, the newest
    """

    def __init__(self, max_error: float = 0.05, start: float = 0.95, window: int = 1000) -> None:
        if not 0.0 < max_error < 1.0:
            raise ConfigError(
                f"max_error={max_error} is no share of hits: give a number between 0 and 1 (0.05 is usual)"
            )
        if not -1.0 <= start <= 1.0:
            raise ConfigError(f"start={start} is no cosine: give a number from -1 to 1")
        if window < 1:
            raise ConfigError(f"window={window} remembers nothing: give at least 1")
        self.max_error, self.start = max_error, start
        self._labels: deque[tuple[float, bool]] = deque(maxlen=window)
        self._lock = threading.Lock()

    def observe(self, similarity: float, right: bool) -> float:
        """Learns a label; the threshold from now on. Raises: InputError for what is no cosine."""
        if not -1.001 <= similarity <= 1.001:
            raise InputError(f"a similarity of {similarity} is no cosine: give what the search returned")
        with self._lock:
            self._labels.append((similarity, right))
        return self.value

    @property
    def value(self) -> float:
        """The threshold."""
        with self._lock:
            labels = sorted(self._labels)
        scores = [score for score, _ in labels]
        for at in sorted({bisect.bisect_left(scores, score) for score in scores}):
            above = labels[at:]
            wrong = sum(not right for _, right in above)
            if wilson(wrong, len(above))[1] <= self.max_error:
                return scores[at]
        return self.start
