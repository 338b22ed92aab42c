"""A cache that settles: its prefills end where token-by-token decoding would, however the prompt was divided."""

import pytest
import torch
from tests.models.lckv.conftest import sequential_prefill

from dejakv.models.cache_name import CACHE_NAME
from dejakv.prototypes.lckv.cache import LCKVCache
from dejakv.prototypes.lckv.passes import CondensedPasses, LoopIterations


@pytest.fixture(autouse=True)
def one_iteration(model):
    """What the configuration asks for is far from settled."""
    model.config.forward_passes, model.config.backward_passes = 0, 1


@torch.no_grad()
def parts(model, ids, *lengths):
    cache = LCKVCache(model.model.layout, settled=True)
    logits = [model(part, **{CACHE_NAME: cache}, use_cache=True).logits for part in ids.split(lengths, 1)]
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("lengths", [(24,), (9, 15), (1, 22, 1)])
def test_a_prompt_is_what_token_by_token_decoding_makes_of_it(model, ids, lengths):
    expected, sequential = sequential_prefill(model, ids)
    logits, cache = parts(model, ids, *lengths)
    assert torch.allclose(logits, expected, atol=1e-4)
    for one, other in zip(cache.layers, sequential.layers, strict=True):
        assert torch.allclose(one.keys, other.keys, atol=1e-4)
        assert torch.allclose(one.values, other.values, atol=1e-4)


def test_another_cache_follows_the_configuration(model, ids):
    with torch.no_grad():
        expected = model(ids, use_cache=True).logits
        logits = model(ids, **{CACHE_NAME: LCKVCache(model.model.layout)}, use_cache=True).logits
    assert torch.equal(logits, expected)
    assert not torch.allclose(logits, parts(model, ids, 24)[0], atol=1e-3)


@torch.no_grad()
def test_it_ends_once_nothing_changes_but_the_rounding(model, ids):
    long = ids.repeat(1, 5)
    inner = model.model
    rows = inner.rows(inner.embed_tokens(long), None, None, 0)
    passes = CondensedPasses(inner.layout, inner.layers, None, long.shape[1])
    passes.settle(passes.run_layers(rows, inner.layout.bottom), LoopIterations.to_the_end(long.shape[1]))
    assert 2 < passes.iterations < long.shape[1] / 2


def test_beams_share_what_was_given(model, ids):
    """Given rows are of one prompt, the batch is as wide as the search."""
    from dejakv.prototypes.lckv.cache import GivenRows

    _, held = parts(model, ids[:1], 24)
    task = model.model.layout.task_layers
    kv = {layer: (held.layers[held.slots[layer]].keys, held.layers[held.slots[layer]].values) for layer in task}
    given = GivenRows(kv, torch.tensor([[20, 21, 22, 23]]))
    cache = LCKVCache(model.model.layout, given, settled=True)
    with torch.no_grad():
        wide = model(ids[:1].repeat(3, 1), **{CACHE_NAME: cache}, use_cache=True).logits
    expected = sequential_prefill(model, ids[:1])[0][:, -4:]
    assert torch.allclose(wide, expected.expand(3, -1, -1), atol=1e-4)
