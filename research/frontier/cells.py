"""Ways of blending that a frontier compares: token map, selector, share of rows, and the use of the share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dejakv.blend.settings import MAP, QUALITIES, BlendConfig

SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
COARSE = (0.1, 0.2, 0.5)
WHOLE = (("context", "value"), ("embedding", "kv"))
"""Map and selector, at every share: DejaKV's with V compared, and the pair of the paper (SemShareKV)."""
PAIRS = (
    ("context", "kv"),
    ("context", "similarity"),
    ("context", "prophet"),
    ("context", "random"),
    ("embedding", "value"),
    ("lsh", "value"),
)
"""The other maps with the selector that compares V, and the other selectors with the default map, at `COARSE` shares."""


@dataclass(frozen=True)
class Cell:
    """One way of blending.

    selector  `prophet` and `similarity` (see BlendConfig), or a published choice (`research.frontier.choices`): `value`, `kv`, `random`
    budget    `share`: that share of rows, chosen by the selector alone; `within`: whole changed sentences, as many as
              fit into the share, then the selector; `need`: all changed rows, even beyond the share; `first`: these, and
              then the first rows of each copied run
    quality   `strict`, `default` or `loose`, if it is one of them; then also the cell's name
    offsets, surroundings  see BlendConfig
    """

    map: str
    selector: str
    share: float
    budget: str = "share"
    quality: str = ""
    offsets: bool = False
    surroundings: bool = False

    @property
    def name(self) -> str:
        made = f"{self.map}/{self.selector}/{self.budget}/{self.share:g}"
        made += "/offsets" if self.offsets else ""
        return self.quality or made + ("/surroundings" if self.surroundings else "")

    @property
    def main(self) -> bool:
        """Measured on every case; the other cells on the first `detail` ones only."""
        ours = (
            self.selector in ("similarity", "value") and self.budget != "share" and self.share in (0.0, 0.05, 0.1, 0.2)
        )
        plain = (self.selector, self.share, self.offsets) == ("prophet", 0.2, False) and self.budget == "need"
        return bool(self.quality) or ours or plain or ((self.map, self.selector) in WHOLE and self.share in (0.1, 0.2))

    @property
    def config(self) -> BlendConfig:
        return BlendConfig(
            map=self.map,  # pyright: ignore[reportArgumentType]
            selector="prophet" if self.selector == "prophet" else "similarity",
            share=self.share,
            by_need=self.budget in ("need", "first"),
            offsets=self.offsets,
            surroundings=self.surroundings,
            max_share=1.0,
        )


def cells(shares: Sequence[float] = SHARES) -> list[Cell]:
    """All cells of the published frontier."""
    partial = [share for share in shares if share < 1.0]
    made = [Cell("context", "similarity", share, "within") for share in partial]
    made += [*quality_cells(), Cell("context", "similarity", 0.0, "need")]
    made += [Cell(map, selector, share) for map, selector in WHOLE for share in partial]
    made += [Cell(map, selector, share) for map, selector in PAIRS for share in partial if share in COARSE]
    return [*made, Cell("context", "value", 1.0)]


def text_cells() -> list[Cell]:
    """The cells of the frontier on real text: the three qualities, other shares of their way, what each of its parts does
    alone, and at the default's share the ways of others."""
    made = quality_cells()
    made += [Cell("context", "prophet", share, "need", offsets=True, surroundings=True) for share in (0.1, 0.3, 0.5)]
    made += [Cell("context", selector, 0.2, "need") for selector in ("prophet", "random")]
    made += [Cell("context", selector, 0.2, "need", offsets=True) for selector in ("prophet", "random")]
    made += [Cell("context", "similarity", 0.2, "first"), Cell("context", "value", 0.2, "need")]
    made += [Cell("context", "kv", 0.2, "need"), Cell("embedding", "kv", 0.2)]
    return made


def quality_cells() -> list[Cell]:
    """The values of `--blend-quality`."""
    return [
        Cell(MAP, quality.selector, quality.share, "need", name, offsets=True, surroundings=True)
        for name, quality in QUALITIES.items()
    ]


def moved_by(row: Mapping[str, Any]) -> str:
    """What becomes of the rows that a way does not compute, in words; empty if they stay as they are. `row`: has a cell's fields."""
    named = [name for name in ("offsets", "surroundings") if row[name]]
    return "".join(f", {name}" for name in named)
