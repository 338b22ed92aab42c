"""Layouts are observed: read bit for bit where elements only change places, and refused where they do not."""

from types import SimpleNamespace

import pytest
import torch

from dejakv.engines.vllm.pages import PagedKV, reader_for
from dejakv.engines.vllm.recurrent.states import StatePages
from dejakv.errors import ConfigError


class _Packed:
    """A layer that writes K and V side by side, as FlashAttention does."""

    def do_kv_cache_update(self, layer, keys, values, cache, slots):
        block, offset = slots // cache.shape[2], slots % cache.shape[2]
        cache[block, :, offset] = torch.cat([keys, values], dim=-1).to(cache.dtype)


class _Lossy(_Packed):
    def do_kv_cache_update(self, layer, keys, values, cache, slots):
        super().do_kv_cache_update(layer, keys.abs(), values, cache, slots)


def test_what_a_layer_loses_is_found_by_a_round_trip():
    cache = torch.zeros(6, 2, 32, 16)
    reader_for({"a": SimpleNamespace(impl=_Packed())}, {"a": cache}, 32)
    assert not cache.any()
    with pytest.raises(ConfigError, match=r"_Lossy could not be read back"):
        reader_for({"a": SimpleNamespace(impl=_Lossy())}, {"a": cache}, 32)
    assert not cache.any()


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 95])
def test_pages_are_copied_and_put_as_they_are(tokens):
    """Bytes of other tokens in the last one, which may be anybody's, are left out."""
    layers = {name: SimpleNamespace(impl=_Packed()) for name in ("a", "b")}
    caches = {name: torch.zeros(8, 2, 32, 8) for name in layers}
    paged = PagedKV(layers, caches, 32, 8, torch.float32, entries=True)
    state = torch.randn(paged.shape(96))
    blocks = [5, 2, 7]
    paged.scatter(blocks, 0, state)
    pages = paged.copy_pages((tuple(blocks),), tokens)
    assert pages.shape == paged.pages_shape(tokens)
    caches["a"].zero_()  # the copy is enough: what happens to the blocks later does not matter
    assert torch.equal(paged.entries(pages, tokens), state[:, :, :, :tokens])
    assert not paged.entries(pages, 32 * len(pages))[:, :, :, tokens:].any()
    paged.put_pages(((1, 3, 4),), pages)
    assert torch.equal(paged.gather([1, 3, 4], tokens), state[:, :, :, :tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_a_block_may_be_of_several_kernel_blocks(dtype):
    """And its layers side by side in memory."""
    memory = torch.zeros(12, 2, 2, 16, 8, dtype=dtype)
    layers = {name: SimpleNamespace(impl=_Packed()) for name in ("a", "b")}
    caches = {"a": memory[:, 0], "b": memory[:, 1]}
    paged = PagedKV(layers, caches, 32, 6, torch.float32)
    memory.copy_(torch.randint(1, 100, memory.shape))
    before = memory.clone()
    pages = paged.copy_pages(((4, 2),), 33)
    memory.zero_()
    paged.put_pages(((4, 2),), pages)
    assert torch.equal(memory[8:10], before[8:10])
    assert torch.equal(memory[4, :, :, 0], before[4, :, :, 0])
    assert not memory[4, :, :, 1:].any()
    assert not memory[5:8].any()


class _Latent:
    kv_lora_rank = 6


@pytest.mark.parametrize("shape", [(4, 16, 8), (2, 32, 8), (2, 1, 32, 8)])
def test_a_latent_row_is_a_tokens(shape):
    cache = torch.rand(shape) + 1
    paged = PagedKV({"a": SimpleNamespace(impl=_Latent())}, {"a": cache}, 32, 2, torch.float32)
    pages = paged.copy_pages(((1,),), 20).view(torch.float32).view(32, 8)
    assert torch.equal(pages[:20], cache.view(2, 32, 8)[1, :20])
    assert not pages[20:].any()


STATES = {
    "mamba, jamba": [((3, 64), torch.float32), ((64, 16), torch.float32)],
    "nemotron_h, bamba": [((3, 96), torch.bfloat16), ((4, 16, 16), torch.float32)],
    "kimi_linear": [((3, 64), torch.bfloat16)] * 3 + [((4, 16, 16), torch.float32)],
    "rg-lru": [((3, 64), torch.float16)],
}


@pytest.mark.parametrize("parts", list(STATES.values()), ids=list(STATES))
def test_a_state_is_copied_and_put_as_it_is(parts):
    """By the shapes of models whose kernels vLLM's CPU backend lacks; two groups share memory with padded pages."""
    size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in parts)
    memory = torch.randint(-128, 128, (6, 2, size + 40), dtype=torch.int8)
    caches = {name: memory[:, layer, :size].view(6, 1, 1, size) for name, layer in (("a", 0), ("b", 1), ("c", 0))}
    states = StatePages(caches, {"a": 1, "b": 1, "c": 2}, 6)
    before, out = memory.clone(), torch.empty(states.nbytes, dtype=torch.uint8)
    states.copy([(1, 3), (2, 5)], out)
    assert states.nbytes == 3 * size
    memory[3:] = 0
    states.put(((9, 9), (0, 3), (0, 4)), 1, out)
    assert torch.equal(memory[3, :, :size], before[3, :, :size])
    assert torch.equal(memory[4, 0, :size], before[5, 0, :size])
    assert not memory[3:, :, size:].any()
    assert not memory[5].any()
    with pytest.raises(IndexError, match="no block 0"):
        states.put(((9, 9), (0, 3), (0, 4)), 0, out)
    with pytest.raises(ConfigError, match="6 blocks in place of 5"):
        StatePages(caches, {"a": 1, "b": 1, "c": 2}, 5)


class _Padded(_Packed):
    def do_kv_cache_update(self, layer, keys, values, cache, slots):
        super().do_kv_cache_update(layer, keys, values, cache, slots)
        cache[1, :, :, -1] = 0


class _Scaled(_Packed):
    def do_kv_cache_update(self, layer, keys, values, cache, slots):
        super().do_kv_cache_update(layer, keys, values, cache, slots)
        cache[1, :, 0, 0] = keys.max()  # of all tokens of the block


@pytest.mark.parametrize("layer", [SimpleNamespace(impl=_Padded()), SimpleNamespace(impl=_Scaled()), SimpleNamespace()])
def test_bytes_that_are_no_tokens_are_refused(layer):
    """Nobody could say whose they are in the last page of a prompt."""
    cache = torch.zeros(4, 2, 32, 8)
    with pytest.raises(ConfigError, match=f"{type(getattr(layer, 'impl', layer)).__name__} could not be read"):
        PagedKV({"a": layer}, {"a": cache}, 32, 4, torch.float32)
    assert not cache.any()


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
def test_any_order_is_read(dtype):
    layers = {name: SimpleNamespace(impl=_Shuffled(2 * 32 * 16)) for name in ("a", "b")}
    caches = {name: torch.zeros(8, 2, 32, 16, dtype=dtype) for name in layers}
    paged = PagedKV(layers, caches, 32, 8, dtype, entries=True)
    assert not any(cache.any() for cache in caches.values())  # it leaves nothing behind
    state = torch.randn(paged.shape(70)).to(dtype)
    paged.scatter([5, 2, 7], 0, state)
    assert torch.equal(paged.gather([5, 2, 7], 70), state)


def _side_by_side(heads, tokens, d):
    """FlashAttention's."""
    return torch.arange(2 * heads * tokens * d).view(heads, tokens, 2, d).permute(2, 0, 1, 3)


def _keys_transposed(heads, tokens, d):
    """That of vLLM's kernels for CPUs: of each head K by number and V by token."""
    keys, values = torch.arange(2 * heads * tokens * d).view(heads, 2, tokens * d).unbind(1)
    return torch.stack([keys.view(heads, d, tokens).mT, values.view(heads, tokens, d)])


def _keys_packed(heads, tokens, d):
    """Of AMX: K in groups of 16 tokens, in which pairs of numbers lie side by side."""
    keys, values = torch.arange(2 * heads * tokens * d).view(heads, 2, tokens * d).unbind(1)
    packed = keys.view(heads, tokens // 16, d // 2, 16, 2).permute(0, 1, 3, 2, 4).reshape(heads, tokens, d)
    return torch.stack([packed, values.view(heads, tokens, d)])


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("order", [_side_by_side, _keys_transposed, _keys_packed])
def test_kernels_orders_are_read_without_a_copy(order, heads):
    layer = _Shuffled(0)
    layer.order = order(heads, 32, 8).reshape(-1)
    layers = {name: SimpleNamespace(impl=layer) for name in ("a", "b")}
    caches = {name: torch.zeros(8, heads, 32, 16, dtype=torch.bfloat16) for name in layers}
    paged = PagedKV(layers, caches, 32, 8, torch.bfloat16, entries=True)
    state = torch.randn(paged.shape(70)).to(torch.bfloat16)
    paged.scatter([5, 2, 7], 0, state)
    pages = paged.copy_pages(((5, 2, 7),), 70)
    assert torch.equal(paged.entries(pages, 70), state)
    assert torch.equal(paged.entries(pages[1:], 38), state[:, :, :, 32:])
    assert torch.equal(paged.keys(paged.page_index([5, 2, 7], 70), 1, 70), state[0, 1])
    assert {part.untyped_storage().data_ptr() for part in paged.split(pages)} == {pages.untyped_storage().data_ptr()}
