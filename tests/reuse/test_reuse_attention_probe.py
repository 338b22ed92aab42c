"""The probe sees the attention of the last rows, in the layers that are asked for."""

import torch
import torch.nn.functional as F

from dejakv.blend.attention_probe import AttentionProbe

TOKENS, LAYERS, LAST = 12, 5, 3


def attentions() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(1, 2, TOKENS, 4, generator=made) for _ in range(3)) for _ in range(LAYERS)]  # pyright: ignore


def expected(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    weights = (query[0] @ key[0].mT / 2).masked_fill(hidden, -torch.inf).softmax(-1)
    return weights[:, -LAST:].sum((0, 1))


def test_the_weights_are_those_of_the_last_rows_in_every_layer() -> None:
    layers = attentions()
    with AttentionProbe(LAST) as probe:
        for query, key, value in layers:
            F.scaled_dot_product_attention(query, key, value, is_causal=True)
    for got, (query, key, _) in zip(probe.weights, layers, strict=True):
        assert torch.allclose(got, expected(query, key), atol=1e-5)


def test_layers_before_the_first_are_not_looked_at_and_run_as_they_do() -> None:
    layers = attentions()
    with AttentionProbe(LAST, first=3) as probe:
        through = [F.scaled_dot_product_attention(*layer, is_causal=True) for layer in layers]
    assert all(
        torch.equal(got, F.scaled_dot_product_attention(*layer, is_causal=True))
        for got, layer in zip(through, layers, strict=True)
    )
    assert len(probe.weights) == 2
    wanted = sum(expected(query, key) for query, key, _ in layers[3:])
    assert torch.allclose(probe.total(TOKENS), wanted, atol=1e-5)  # pyright: ignore
