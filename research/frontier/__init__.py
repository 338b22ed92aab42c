"""`python -m research.frontier`: speed against agreement of blending, over cases with known donors and changes."""

from research.frontier.run import run_frontier

__all__ = ["run_frontier"]
