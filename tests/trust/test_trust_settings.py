from typing import Any

import pytest

from dejakv.errors import ConfigError
from dejakv.trust.settings import TrustSettings


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"error_bound": 0}, "error_bound=0 is too small: give a number above 0 and below 1"),
        ({"error_bound": 1.0}, "below 1"),
        ({"error_bound": float("nan")}, "not finite"),
        ({"error_bound": True}, "no number"),
        ({"confidence": 1}, "confidence=1"),
        ({"explore_share": 0}, "above 0 and up to 1"),
        ({"audit_share": 0.0}, "audit_share=0.0"),
        ({"audit_share": 1.1}, "up to 1"),
        ({"trust_groups": ("team",)}, "no group"),
        ({"trust_groups": ("team=",)}, "no group"),
        ({"trust_groups": ("=a",)}, "no group"),
        ({"trust_groups": ("one=a", "two=a,b")}, "in two groups"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrustSettings(**values)


def test_a_group_is_no_partition_and_no_name_is_shown() -> None:
    settings = TrustSettings(trust_groups=("team = a, b",))
    assert settings.group_of("a") == settings.group_of("b")
    assert len({settings.group_of(name) for name in ("a", "c", "team", "")}) == 4
    assert "team" not in settings.group_of("team")
