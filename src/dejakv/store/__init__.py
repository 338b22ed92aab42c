"""Where chunks of computed state are kept, with byte budgets and eviction."""
