"""Former path of `dejakv.prototypes.lsh`, for one release."""

from dejakv.errors import former_module

__getattr__ = former_module(__name__, "dejakv.prototypes.lsh")
