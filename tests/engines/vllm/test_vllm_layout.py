"""Layouts: known ones are found by a round trip, others are observed, bit for bit where elements only change places and refused
where they do not."""

from types import SimpleNamespace

import pytest
import torch
from vllm_harness import running, tokens

from dejakv.engines.vllm.pages import PagedKV, read_packed, reader_for
from dejakv.errors import ConfigError


class _Packed:
    """A layer that writes K and V side by side, as FlashAttention does."""

    def do_kv_cache_update(self, layer, keys, values, cache, slots):
        block, offset = slots // cache.shape[2], slots % cache.shape[2]
        cache[block, :, offset] = torch.cat([keys, values], dim=-1)


class _Lossy(_Packed):
    def do_kv_cache_update(self, layer, keys, values, cache, slots):
        super().do_kv_cache_update(layer, keys.abs(), values, cache, slots)


def test_layout_is_found_by_a_round_trip():
    cache = torch.zeros(6, 2, 32, 16)
    assert reader_for({"a": SimpleNamespace(impl=_Packed())}, {"a": cache}, 32) is read_packed
    assert not cache.any()
    with pytest.raises(ConfigError, match=r"_Lossy could not be read back"):
        reader_for({"a": SimpleNamespace(impl=_Lossy())}, {"a": cache}, 32)
    assert not cache.any()


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 95])
def test_pages_are_unpacked_as_they_were_written(tokens):
    layers = {name: SimpleNamespace(impl=_Packed()) for name in ("a", "b")}
    caches = {name: torch.zeros(8, 2, 32, 8) for name in layers}
    paged = PagedKV(layers, caches, 32)
    state = torch.randn(paged.shape(tokens))
    blocks = [5, 2, 7]
    paged.scatter(blocks, 0, state)
    pages = paged.copy_pages(blocks, tokens)
    assert pages.shape == paged.pages_shape(tokens)
    caches["a"].zero_()  # the copy is enough: what happens to the blocks later does not matter
    assert torch.equal(paged.unpack(pages, tokens), state)


class _Shuffled:
    """Puts a block's elements anywhere in the block, always the same way."""

    def __init__(self, elements: int) -> None:
        self.order = torch.randperm(elements, generator=torch.Generator().manual_seed(1))

    def do_kv_cache_update(self, layer, keys, values, cache, slots):
        blocks, heads, tokens, width = cache.shape
        d = width // 2
        flat = cache.view(blocks, -1)
        place = self.order.view(2, heads, tokens, d)
        for row, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, tokens)
            flat[block, place[0, :, offset]] = keys[row]
            flat[block, place[1, :, offset]] = values[row]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_unknown_order_is_observed(dtype):
    layers = {name: SimpleNamespace(impl=_Shuffled(2 * 32 * 16)) for name in ("a", "b")}
    caches = {name: torch.zeros(8, 2, 32, 16, dtype=dtype) for name in layers}
    paged = PagedKV(layers, caches, 32)
    assert paged.reader.__name__ == "read_observed"
    assert not any(cache.any() for cache in caches.values())  # it leaves nothing behind
    state = torch.randn(paged.shape(70)).to(dtype)
    paged.scatter([5, 2, 7], 0, state)
    assert torch.equal(paged.gather([5, 2, 7], 70), state)


def test_bfloat16_comes_back_from_this_cpu():
    """Whatever this processor's layout is (AMX packs pairs of tokens), stored state equals computed state."""
    prompt = tokens(301, 5)
    with running(extra={}, dtype="bfloat16") as engine:
        (first,) = engine.ask([prompt])
        engine.settle()
        engine.reset_prefix_cache()
        (again,) = engine.ask([prompt])
    assert again.told["method"] == "exact"
    assert again.cached == len(prompt) - 1
    assert again.tokens == first.tokens
