"""Storage of computed state: immutable segments, a catalog that finds them, budgets and purges."""

from dejakv.store.claim import purge_folder
from dejakv.store.open import open_store, purge_place, store_of
from dejakv.store.store import Store

__all__ = ["Store", "open_store", "purge_folder", "purge_place", "store_of"]
