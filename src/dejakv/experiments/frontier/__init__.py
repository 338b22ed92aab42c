"""`dejakv frontier`: speed against agreement of blending, over cases with known donors and changes."""

from dejakv.experiments.frontier.run import run_frontier

__all__ = ["run_frontier"]
