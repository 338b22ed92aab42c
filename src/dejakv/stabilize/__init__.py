"""Requests that keep their prefix: rules for bodies of OpenAI's and Anthropic's chat requests.

dejakv stabilize http://127.0.0.1:8000                          # before any server
vllm serve MODEL --middleware dejakv.stabilize.StabilizeMiddleware
"""

from dejakv.stabilize.forward import ForwardingApp
from dejakv.stabilize.middleware import StabilizeMiddleware
from dejakv.stabilize.prefixes import PrefixMeter
from dejakv.stabilize.rules import DEFAULT_RULES, RULES, PrefixStabilizer, Rewritten
from dejakv.stabilize.settings import StabilizeSettings

__all__ = [
    "DEFAULT_RULES",
    "RULES",
    "ForwardingApp",
    "PrefixMeter",
    "PrefixStabilizer",
    "Rewritten",
    "StabilizeMiddleware",
    "StabilizeSettings",
]
