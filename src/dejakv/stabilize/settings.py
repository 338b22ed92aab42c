"""Settings of the stabilizing middleware and proxy, and how they are read for vLLM."""

import json
import os

from dejakv.errors import ConfigError
from dejakv.settings import Positive, from_mapping, strict_dataclass
from dejakv.stabilize.rules import DEFAULT_RULES, check_rules

VARIABLE = "DEJAKV_STABILIZE"
"""Where vLLM's middleware looks for its settings, in JSON."""


@strict_dataclass()
class StabilizeSettings:
    """Keys of `DEJAKV_STABILIZE`, and options of `dejakv stabilize`."""

    rules: tuple[str, ...] = DEFAULT_RULES
    """rules that act: `keys`, `tools`, `properties`, `volatile`, `passages`"""
    check: bool = False
    """send both forms of a changed request, answer with that of the client's own form, and compare
    the answers where the temperature is 0"""
    model: str | None = None
    """model whose tokenizer counts the prefix; None: characters are counted"""
    max_body_bytes: Positive = 64 * 1024**2
    """largest body that is read; a larger one is passed on as it is"""

    def __post_init__(self) -> None:
        check_rules(self.rules)

    @classmethod
    def from_environment(cls) -> "StabilizeSettings":
        """Read the variable.

        Raises
        ------
        ConfigError
            For what is no JSON object, an unknown key and a wrong value.
        """
        try:
            values = json.loads(os.environ.get(VARIABLE) or "{}")
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise ConfigError(
                f'{VARIABLE} is no JSON object: give {{}} or such as {{"rules": ["volatile"]}}'
            )
        if isinstance(values.get("rules"), list):
            values["rules"] = tuple(values["rules"])
        return from_mapping(cls, values, VARIABLE)
