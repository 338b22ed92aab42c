"""How many of the plans that were tried are served in the end. One that is not was tried in vain: it takes its own time and that of
full computation."""

from dataclasses import dataclass

REMEMBERED = 64
"""Tries of which half is forgotten at a time: the rate follows the traffic."""


@dataclass
class Passing:
    """Begins with the hope that every one is."""

    tried: float = 1.0
    passed: float = 1.0

    @property
    def rate(self) -> float:
        """In (0, 1]."""
        return self.passed / self.tried

    def add(self, passed: bool) -> None:
        """One more try."""
        if self.tried >= REMEMBERED:
            self.tried, self.passed = self.tried / 2, self.passed / 2
        self.tried += 1
        self.passed += passed
