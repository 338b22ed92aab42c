"""Prove or refute, by HTTP alone, that the caches of a running server change no answer.

`verify_server` sends probes that a careless cache confuses, each fresh and cached, and compares
tokens and log probabilities with the server's own noise. It knows no engine.
"""

from dejakv.verify.client import ClientSettings
from dejakv.verify.run import Observation, VerifyResult, VerifySettings, verify_server

__all__ = ["ClientSettings", "Observation", "VerifyResult", "VerifySettings", "verify_server"]
