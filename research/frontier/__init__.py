"""`python -m research.frontier`: speed against agreement of blending.

Its cases have known donors and changes.
"""
