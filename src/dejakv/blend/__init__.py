"""How a donor's state becomes a request's: token maps, selectors, schedules, moved keys, pruning."""
