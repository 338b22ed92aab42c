"""vLLM starts in a process that has numba in it. Tried in processes of their own: whatever starts a vLLM in this one would fail."""

import subprocess
import sys
from textwrap import dedent

SCAN = dedent("""
    import sys
    import llvmlite.binding.ffi as ffi
    from vllm.triton_utils.dispatcher import _rebind_kernels
    from dejakv.engines.vllm.kernel_scan import HIDDEN, without_llvmlite

    kernel = object()
    try:
        _rebind_kernels([(kernel, kernel)])
    except AttributeError as error:
        assert "_lib_fn_wrapper" in str(error)
    else:
        raise SystemExit("vLLM's scan is mended: kernel_scan.py can go")
    with without_llvmlite():
        _rebind_kernels([(kernel, kernel)])
    assert sys.modules[HIDDEN] is ffi
    try:
        with without_llvmlite():
            raise ValueError
    except ValueError:
        assert sys.modules[HIDDEN] is ffi
""")


def test_the_scan_for_kernels_passes_without_the_object_that_stops_it():
    done = subprocess.run([sys.executable, "-c", SCAN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
