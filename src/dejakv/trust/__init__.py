"""A bound on wrong hits that the user sets: evidence is collected by betting, and rules open one after the other."""
