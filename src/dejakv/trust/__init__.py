"""Trust: a bound on wrong hits that the user sets, and the evidence that it is kept.

Evidence is collected by betting, and rules open one after the other.
"""
