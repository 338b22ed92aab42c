"""Conformance suites: what every backend of a seam must do, as test classes to subclass. Needs `pytest`.

from dejakv.testing.stores import StoreTests

class TestMyStore(StoreTests):
    def make_store(self, folder, **settings):
        return MyStore(**settings)
"""
