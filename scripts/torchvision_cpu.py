"""Lets PyPI's torchvision (a CUDA build) be imported beside `torch+cpu`.

For the test environment alone.

Its compiled half cannot be loaded there, and its Python half then stops at `torchvision::nms`, an
operator nobody registered. Declaring the operators' schemas, at the moment torchvision is first
imported, lets transforms work; calling the operators stays an error. `scripts/setup-vllm-env.sh`
puts this module on the environment's path.
"""

import sys
from importlib.abc import MetaPathFinder

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DeclareBeforeTorchvision(MetaPathFinder):
    library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if hasattr(torch.ops.torchvision, "nms"):
            return
        type(self).library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            self.library.define(name + SCHEMA)


sys.meta_path.insert(0, _DeclareBeforeTorchvision())
