"""Caches and servers with a hole each, for tests that attacks find it."""

from dataclasses import replace
from typing import Any

from dejakv.api_keys import ApiKeys
from dejakv.attack.effort import Effort
from dejakv.build import build_cache
from dejakv.cache import HierarchicalCache
from dejakv.encoder_cache import VisualKVCache
from dejakv.engines.base import Prepared
from dejakv.find.ask import Ask
from dejakv.request import Request
from dejakv.store.open import open_store

TINY = Effort(
    victims=2, texts=400, mutations=60, poisonings=2, secrets=8, samples=1, probes=1, asked=12, largest=2 << 20
)


class SharingCache(HierarchicalCache):
    """All partitions are one."""

    def find(self, prepared: Prepared, ask: Any = None, *, costs: Any = None) -> Any:
        return super().find(_shared(prepared), ask, costs=costs)

    def record(self, prepared: Prepared, *others: Any, **more: Any) -> bool:
        return super().record(_shared(prepared), *others, **more)


def _shared(prepared: Prepared) -> Prepared:
    return replace(prepared, request=replace(prepared.request, partition="shared"))


def sharing(config: Any, engine: Any = None, **more: Any) -> HierarchicalCache:
    cache = build_cache(config, engine, **more)
    cache.__class__ = SharingCache
    return cache


def without_words(config: Any, engine: Any = None, **more: Any) -> HierarchicalCache:
    """Without the lexical guard."""
    return build_cache(replace(config, lexical_guard=False), engine, **more)


def sharing_without_words(config: Any, engine: Any = None, **more: Any) -> HierarchicalCache:
    return sharing(replace(config, lexical_guard=False), engine, **more)


def one_budget(*given: Any, **settings: Any) -> Any:
    """A store whose budget is not divided."""
    return open_store(*given, **{**settings, "partitions": 1})


class SharingRegistry(VisualKVCache):
    """All partitions have one view."""

    def view(self, encoder_epoch: str, partition: str = "default", **more: Any) -> Any:
        return super().view(encoder_epoch, "shared", **more)


def always_adopts(request: Request, _config: Any, **_: Any) -> Ask:
    """What `Ask.of` would be if it did not listen: every request is answered from a similar donor."""
    return Ask("adopt", no_store=request.no_store)


_partition_of = ApiKeys.partition_of


def one_partition(keys: ApiKeys, key: str | None) -> str | None:
    """What `ApiKeys.partition_of` would be if all keys were one tenant's; the operator's key is none of them."""
    return "shared" if _partition_of(keys, key) and keys.partitions > 1 else None
