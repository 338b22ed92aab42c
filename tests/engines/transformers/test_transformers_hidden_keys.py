"""Masked attention in pieces: the result of torch's own, of the visible keys alone, and nothing left behind."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny_models import architecture_model as tiny
from torch.nn.functional import scaled_dot_product_attention as attention

from dejakv.engines.transformers.hidden_keys import MIN_KEYS, ROWS, VisibleKeys, pieces_of, skip_hidden_keys
from dejakv.engines.transformers.kv import empty_cache
from dejakv.models.cache_name import CACHE_NAME

LONG = MIN_KEYS + 88


def causal(rows: torch.Tensor, keys: int) -> torch.Tensor:
    return (torch.arange(keys)[None] <= rows[:, None])[None, None]


class Keys(torch.overrides.TorchFunctionMode):
    """Notes how many keys each call of the attention was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is attention:
            self.seen.append((args[0].shape[2], args[1].shape[2]))
        return func(*args, **(kwargs or {}))


@settings(deadline=None, max_examples=30)
@given(st.integers(ROWS + 1, 300), st.integers(MIN_KEYS, 900), st.integers(0, 400), st.randoms(use_true_random=False))
def test_pieces_give_what_the_whole_gives(rows: int, keys: int, window: int, rng: Any) -> None:
    places = torch.tensor(sorted(rng.sample(range(keys), rows)))
    mask = causal(places, keys)
    if window:  # as layers with a sliding window have it
        mask = mask & (torch.arange(keys)[None] > places[:, None] - window)[None, None]
    torch.manual_seed(rows)
    query, key, value = (torch.randn(1, 2, n, 8) for n in (rows, keys, keys))
    whole = attention(query, key, value, attn_mask=mask)
    with Keys() as calls, VisibleKeys():
        pieces = attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-5)
    assert sum(count for count, _ in calls.seen) == rows
    assert all(count <= ROWS for count, _ in calls.seen)
    assert calls.seen[0][1] == int(places[min(rows, ROWS) - 1]) + 1 - (
        max(0, int(places[0]) - window + 1) if window else 0
    )


def test_every_row_of_every_piece_keeps_what_it_sees() -> None:
    torch.manual_seed(0)
    mask = torch.rand(2, 1, 200, 700) < 0.01
    mask[:, :, 70] = False  # a row that sees nothing
    covered = torch.zeros_like(mask)
    for rows, keys in pieces_of(mask):
        covered[:, :, rows, keys] = True
    assert bool((covered | ~mask).all())
    assert (slice(ROWS, 2 * ROWS), slice(0, 700)) in pieces_of(mask)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_sees_what_any_of_its_prompts_sees(batch: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(batch, 2, n, 8) for n in (100, LONG, LONG))
    mask = torch.cat([causal(torch.arange(100) + 40 * prompt, LONG) for prompt in range(batch)])
    with VisibleKeys():
        pieces = attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(pieces, attention(query, key, value, attn_mask=mask))


@pytest.mark.parametrize("what", ["few rows", "few keys", "float mask", "no mask"])
def test_other_calls_are_left_as_they_are(what: str) -> None:
    rows, keys = (ROWS, LONG) if what == "few rows" else (100, MIN_KEYS - 1 if what == "few keys" else LONG)
    query, key, value = (torch.randn(1, 2, n, 8) for n in (rows, keys, keys))
    mask = None if what == "no mask" else causal(torch.arange(rows), keys)
    if what == "float mask" and mask is not None:
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    with Keys() as calls, VisibleKeys():
        made = attention(query, key, value, attn_mask=mask)
    assert calls.seen == [(rows, keys)]
    assert torch.equal(made, attention(query, key, value, attn_mask=mask))


@pytest.mark.parametrize("name", ["llama", "mistral+window", "gemma3_text"])
def test_rows_behind_a_prefix_come_out_as_without(name: str) -> None:
    model = tiny(name, max_position_embeddings=2 * LONG)
    ids = torch.randint(3, 90, (1, LONG), generator=torch.Generator().manual_seed(1))

    def logits() -> torch.Tensor:
        cache = empty_cache(None)
        with torch.inference_mode():
            model(input_ids=ids[:, :100], **{CACHE_NAME: cache}, use_cache=True)
            return model(input_ids=ids[:, 100:], **{CACHE_NAME: cache}, use_cache=True).logits

    plain = logits()
    with Keys() as calls, skip_hidden_keys(model, "sdpa"):
        pieces = logits()
    torch.testing.assert_close(pieces, plain, rtol=1e-3, atol=1e-4)
    assert any(count <= ROWS for count, _ in calls.seen)


def test_few_rows_eager_attention_and_the_time_behind_it_see_nothing_of_it() -> None:
    model = tiny("llama", max_position_embeddings=2 * LONG)
    hooks = dict(model._forward_pre_hooks), dict(model._forward_hooks)
    inside: list[int] = []

    def count(*_: Any) -> None:
        inside.append(torch._C._len_torch_function_stack())

    handle = model.model.register_forward_pre_hook(count)
    with torch.inference_mode():
        for attention_name, tokens in (("sdpa", ROWS), ("eager", 100), ("sdpa", 100)):
            with skip_hidden_keys(model, attention_name):
                model(input_ids=torch.full((1, tokens), 5))
    handle.remove()
    assert inside == [0, 0, 1]
    assert torch._C._len_torch_function_stack() == 0
    assert hooks == (dict(model._forward_pre_hooks), dict(model._forward_hooks))


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    model = tiny("llama")

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    handle = model.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"), skip_hidden_keys(model, "sdpa"):
        model(input_ids=torch.full((1, 100), 5))
    handle.remove()
    assert torch._C._len_torch_function_stack() == 0
