"""The part of an engine that knows which model it has, and whether it is still the same one."""

from threading import RLock

from dejakv.engines.transformers.vision import Vision
from dejakv.engines.transformers.watch import ModelWatch
from dejakv.errors import ModelChangedError


class WatchedModel:
    """Fingerprints of the model, and of its tower for the registry of encoder outputs."""

    vision: Vision | None
    _watch: ModelWatch
    _lock: RLock

    @property
    def epoch(self) -> str:
        """Fingerprint of the model at its last check, before each run (docs/exactness.md). Empty: state cannot be identified."""
        return self._watch.epoch

    @property
    def unidentified(self) -> str:
        """Why the epoch is empty; empty if it is not."""
        return self._watch.reason

    def weights_changed(self) -> str:
        """Fingerprints the whole model anew and returns the epoch: after changes that the check before a run may see late."""
        with self._lock:
            self._watch.renew()
            self._follow()
            return self.epoch

    def _check_model(self, expected: str = "", tokens: int = 1) -> None:
        """Raises: ModelChangedError if the model is not the one that state was looked up for, for a prompt of so many tokens."""
        self._watch.check()
        self._follow()
        if expected and expected != self._watch.epoch_for(tokens):
            raise ModelChangedError("the model was changed since state was looked up for it: look it up again")

    def _own_epoch(self, tokens: int) -> str:
        """The epoch of prompts of this length alone; empty where all lengths have the engine's."""
        return self._watch.epoch_for(tokens) if self._watch.by_length else ""

    def _follow(self) -> None:
        if self.vision is not None:
            self.vision.follow(self._watch.encoder_epoch)
