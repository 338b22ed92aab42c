"""Where chunks of computed state are kept, with byte budgets and eviction."""

from dejakv.store.open import open_store, store_of

__all__ = ["open_store", "store_of"]
