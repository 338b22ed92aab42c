"""Where chunks of computed state are kept, with byte budgets and eviction."""

from dejakv.store.open import open_store, store_of
from dejakv.store.purge import purge_folder

__all__ = ["open_store", "purge_folder", "store_of"]
