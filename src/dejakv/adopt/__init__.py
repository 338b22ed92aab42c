"""Middlewares before an OpenAI server: keys, labels of approximate answers, and adopting.

Adopting runs a similar earlier prompt in a request's place.

    vllm serve MODEL --middleware dejakv.adopt.ServerMiddleware   # keys and labels
    vllm serve MODEL --middleware dejakv.adopt.AdoptMiddleware    # and adopting
"""

from dejakv.adopt.adopter import AdoptRequest, PromptAdopter
from dejakv.adopt.middleware import AdoptMiddleware, ServerMiddleware
from dejakv.errors import former_names

__all__ = ["AdoptMiddleware", "AdoptRequest", "PromptAdopter", "ServerMiddleware"]


__getattr__ = former_names(__name__, Adopter="PromptAdopter")
