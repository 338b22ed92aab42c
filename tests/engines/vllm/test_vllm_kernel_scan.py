"""vLLM starts in a process that has numba in it."""

import sys

import pytest

from dejakv.engines.vllm.kernel_scan import HIDDEN, without_llvmlite


def test_the_scan_for_kernels_passes_without_the_object_that_stops_it():
    import llvmlite.binding.ffi as ffi
    from vllm.triton_utils.dispatcher import _rebind_kernels

    kernel = object()
    with pytest.raises(AttributeError, match="_lib_fn_wrapper"):
        _rebind_kernels([(kernel, kernel)])
    with without_llvmlite():
        _rebind_kernels([(kernel, kernel)])
    assert sys.modules[HIDDEN] is ffi


def test_the_module_comes_back_after_a_failure():
    import llvmlite.binding.ffi as ffi

    with pytest.raises(ValueError, match="boom"), without_llvmlite():
        raise ValueError("boom")
    assert sys.modules[HIDDEN] is ffi
