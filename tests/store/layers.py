"""What a store is made of."""

from typing import TypeVar

from dejakv.store.base import Store
from dejakv.store.wrapper import WrapperStore

S = TypeVar("S", bound=Store)


def layer(store: Store, kind: type[S]) -> S:
    """The store of this kind that is inside of another."""
    while not isinstance(store, kind):
        assert isinstance(store, WrapperStore)
        store = store.inner
    return store
