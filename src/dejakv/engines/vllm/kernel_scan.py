"""A fault of vLLM 0.32 that ends its start where numba was imported before, as BM25 libraries do.

At its start vLLM looks through all loaded modules for Triton kernels and asks each object for its `__dict__`. llvmlite's
library object answers every name with a function, `__dict__` too, and vLLM stops with "'_lib_fn_wrapper' object has no
attribute 'get'".
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager

HIDDEN = "llvmlite.binding.ffi"


@contextmanager
def without_llvmlite() -> Generator[None]:
    """Keeps the one module that has such an object out of `sys.modules` inside the block. Modules that use it go on doing so."""
    module = sys.modules.pop(HIDDEN, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[HIDDEN] = module
