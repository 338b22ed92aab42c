"""torch and numpy embeddings: real bytes, nothing kept alive besides, and back from raw bytes as they were."""

import numpy as np
import pytest
import torch

from dejakv.encoder_cache import VisualKVCache
from dejakv.encoder_cache.outputs import describe, from_raw, owned, size_of, to_raw
from dejakv.errors import InputError


def stored(embedding):
    return from_raw(to_raw(embedding), describe(embedding))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.float8_e4m3fn, torch.bool]
)
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
def test_torch_round_trip(dtype, shape):
    embedding = (torch.arange(np.prod(shape)).reshape(shape) % 5).to(dtype)
    back = stored(embedding)
    assert back.dtype == dtype
    assert back.shape == embedding.shape
    assert torch.equal(back.view(torch.uint8), embedding.view(torch.uint8))
    back.zero_()


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8", ">f4", "|u1", "<i8", "|b1"])
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (1, 1)])
def test_numpy_round_trip(dtype, shape):
    embedding = (np.arange(np.prod(shape)).reshape(shape) % 7).astype(dtype)
    back = stored(embedding)
    assert back.dtype == embedding.dtype
    np.testing.assert_array_equal(back, embedding)
    back[:] = 0


def test_a_transposed_tensor_round_trip():
    embedding = torch.arange(12.0).reshape(3, 4).T
    assert torch.equal(stored(embedding), embedding)
    array = np.arange(12.0).reshape(3, 4).T
    np.testing.assert_array_equal(stored(array), array)


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
