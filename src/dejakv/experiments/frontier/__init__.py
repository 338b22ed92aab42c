"""`dejakv frontier`: speed against agreement of blending, over cases whose donors and changes are known."""

from dejakv.experiments.frontier.run import run_frontier

__all__ = ["run_frontier"]
