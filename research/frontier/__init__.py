"""`python -m research.frontier`: speed against agreement of blending, over cases with known donors and changes."""
