"""Policies and budgets of eviction."""

import pytest

from dejakv.errors import ConfigError
from dejakv.store.eviction import POLICIES, Budget, Usage, policy_named


def test_priorities_of_the_policies() -> None:
    often, lately = Usage(hits=9, last_used=1), Usage(hits=0, last_used=2)
    assert POLICIES["lru"].priority(often) < POLICIES["lru"].priority(lately)
    assert POLICIES["lfu"].priority(often) > POLICIES["lfu"].priority(lately)


def test_wrong_settings_say_what_is_right() -> None:
    with pytest.raises(ConfigError, match="lru, lfu"):
        policy_named("fifo")
    with pytest.raises(ConfigError, match="max_bytes=-1 is negative"):
        Budget(max_bytes=-1)
    with pytest.raises(ConfigError, match="max_entries"):
        Budget(max_entries=-5)
