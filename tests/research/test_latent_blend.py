"""`python -m research.latent_blend`: what a blend moves of latent rows, beside whole keys."""

from research import latent_blend


def test_latent_blend_counts_what_moves() -> None:
    figures = latent_blend.measure(tokens=250, layers=2, times=1)
    assert {name: (row["token_bytes"], row["moved_numbers"]) for name, row in figures.items()} == {
        "latent": (4 * 2 * (512 + 64), 2 * 64),
        "ordinary": (4 * 2 * 2 * 16 * 128, 2 * 16 * 128),
        "ordinary, 4 heads of keys": (4 * 2 * 2 * 4 * 128, 2 * 4 * 128),
    }
