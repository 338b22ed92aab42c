"""torch and numpy embeddings: real bytes, nothing kept alive besides, and raw bytes that are not taken for what they are not."""

import numpy as np
import pytest
import torch

from dejakv.encoder_cache import VisualKVCache
from dejakv.encoder_cache.arrays import describe, from_raw, owned, size_of, to_raw
from dejakv.errors import InputError


@pytest.mark.parametrize("change", [{"shape": [9, 9]}, {"dtype": "nn"}])
@pytest.mark.parametrize("make", [torch.ones, np.ones], ids=["torch", "numpy"])
def test_a_description_that_does_not_fit(change, make):
    tensor, described = to_raw(make((2, 4))), describe(make((2, 4)))
    with pytest.raises(InputError, match="does not fit"):
        from_raw(tensor, described | change)


def test_a_slice_of_a_batch_does_not_keep_the_batch():
    batch = torch.zeros(64, 4, 8)
    kept = owned(batch[3])
    assert kept.untyped_storage().nbytes() == size_of(kept) == 4 * 8 * 4
    array = owned(np.zeros((64, 4, 8))[3])
    assert array.base is None
    whole = np.zeros((4, 8))
    assert owned(whole) is whole


def test_the_autograd_graph_is_not_kept():
    weights = torch.ones(4, 4, requires_grad=True)
    block = VisualKVCache().store("h", "image", weights @ weights)
    assert not block.embedding.requires_grad


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_in_torch(bad, dtype):
    embedding = torch.ones(2, 4, dtype=dtype)
    embedding[1, 2] = bad
    with pytest.raises(InputError, match="NaN"):
        VisualKVCache().store("h", "image", embedding)


def test_numbers_without_nan_need_no_check():
    cache = VisualKVCache()
    assert cache.store("a", "image", torch.ones(2, 4, dtype=torch.int8)) is not None
    assert cache.store("b", "image", np.ones((2, 4), np.int8)) is not None
