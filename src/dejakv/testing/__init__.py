"""Stored states for tests of caches, and the suite of each seam as a class to subclass.

A stored state with random content, and the suite of a store (the suites need `pytest`):

    from dejakv.testing import make_stored_state
    from dejakv.testing.stores import StoreTests

    store = dejakv.open_store()
    assert store.put(make_stored_state(1))

    class TestMyStore(StoreTests):
        def make_store(self, folder, **settings):
            return MyStore(**settings)
"""

from dejakv.errors import former_names
from dejakv.testing.stored_states import make_stored_state

__all__ = ["make_stored_state"]

__getattr__ = former_names(__name__, make_chunk="make_stored_state")
