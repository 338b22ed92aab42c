"""Before an OpenAI server: keys, labels of approximate answers, and adopting: a similar earlier prompt is run in a request's place.

vllm serve MODEL --middleware dejakv.adopt.ServerMiddleware   # keys and labels
vllm serve MODEL --middleware dejakv.adopt.AdoptMiddleware    # and adopting
"""

from dejakv.adopt.adopter import Adopter, AdoptRequest
from dejakv.adopt.middleware import AdoptMiddleware, ServerMiddleware

__all__ = ["AdoptMiddleware", "AdoptRequest", "Adopter", "ServerMiddleware"]
