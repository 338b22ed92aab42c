"""Former path of `dejakv.prototypes.fusion`, for one release."""

from dejakv.errors import former_module

__getattr__ = former_module(__name__, "dejakv.prototypes.fusion")
