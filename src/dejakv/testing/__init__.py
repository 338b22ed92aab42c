"""For tests of caches and of their callers: chunks to store, and the suite of each seam as a class to subclass.

from dejakv.testing import make_chunk

store = dejakv.open_store()
assert store.put(make_chunk(1))

from dejakv.testing.stores import StoreTests  # the suites need `pytest`

class TestMyStore(StoreTests):
    def make_store(self, folder, **settings):
        return MyStore(**settings)
"""

from dejakv.testing.chunks import make_chunk

__all__ = ["make_chunk"]
