"""Former path of `dejakv.testing.stored_states`."""

from dejakv.errors import former_module

__getattr__ = former_module(__name__, "dejakv.testing.stored_states")
