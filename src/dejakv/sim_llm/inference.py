"""Former path of `dejakv.prototypes.sim_llm.inference`, for one release."""

from dejakv.errors import former_module

__getattr__ = former_module(__name__, "dejakv.prototypes.sim_llm.inference")
