"""Adopt for OpenAI servers: a similar earlier prompt is run in a request's place. It knows no engine.

vllm serve MODEL --middleware dejakv.adopt.AdoptMiddleware
"""

from dejakv.adopt.adopter import Adopter, AdoptRequest
from dejakv.adopt.middleware import AdoptMiddleware

__all__ = ["AdoptMiddleware", "AdoptRequest", "Adopter"]
