"""Ways of blending that a frontier compares: token map, selector, share of rows, and the use of the share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dejakv.reuse.blend import BlendConfig
from dejakv.reuse.need import Rule
from dejakv.reuse.quality import MAP, QUALITIES
from dejakv.reuse.selector import Selector

SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
COARSE = (0.1, 0.2, 0.5)
WHOLE = (("context", "value"), ("embedding", "kv"), ("align", "kv"))
"""Map and selector, at every share: DejaKV's with V compared, the pair of the paper (SemShareKV), and one like CacheBlend's."""
PAIRS = (
    ("context", "kv"),
    ("context", "similarity"),
    ("context", "query"),
    ("context", "random"),
    ("embedding", "value"),
    ("lsh", "value"),
    ("align", "value"),
)
"""The other maps with the selector that compares V, and the other selectors with the default map, at `COARSE` shares."""


@dataclass(frozen=True)
class Cell:
    """One way of blending.

    budget    `share`: that share of rows, chosen by the selector alone; `within`: whole changed sentences, as many as
              fit into the share, then the selector; `need`: all changed rows, even beyond the share; `first`: these, and
              then the first rows of each copied run
    complete  layers computed completely before that
    quality   `strict`, `default` or `loose`, if it is one of them; then also the cell's name
    offsets, surroundings  see BlendConfig
    """

    map: str
    selector: str
    share: float
    budget: str = "share"
    complete: int = 1
    quality: str = ""
    offsets: bool = False
    surroundings: bool = False

    @property
    def name(self) -> str:
        made = f"{self.map}/{self.selector}/{self.budget}/{self.complete}/{self.share:g}"
        made += "/offsets" if self.offsets else ""
        return self.quality or made + ("/surroundings" if self.surroundings else "")

    @property
    def main(self) -> bool:
        """Measured on every case; the other cells on the first `detail` ones only."""
        ours = (
            self.selector in ("similarity", "value") and self.budget != "share" and self.share in (0.0, 0.05, 0.1, 0.2)
        )
        plain = (self.selector, self.share, self.offsets) == ("query", 0.2, False) and self.budget == "need"
        return bool(self.quality) or ours or plain or ((self.map, self.selector) in WHOLE and self.share in (0.1, 0.2))

    @property
    def config(self) -> BlendConfig:
        rules: dict[str, Rule] = {"share": "none", "first": "first"}
        return BlendConfig(
            map=self.map,
            selector=self.selector,
            share=self.share,
            by_need=self.budget in ("need", "first"),
            rule=rules.get(self.budget, "changed"),
            offsets=self.offsets,
            surroundings=self.surroundings,
            min_similarity=0.0 if self.budget == "share" else 0.2,
            complete=self.complete,
            max_share=1.0,
        )


def cells(shares: Sequence[float] = SHARES) -> list[Cell]:
    """All cells of the published frontier."""
    partial = [share for share in shares if share < 1.0]
    made = [Cell("context", "similarity", share, "within", 0) for share in partial]
    made += [*quality_cells(), Cell("context", "similarity", 0.0, "need", 0), Cell("context", "value", 0.0, "need")]
    made += [Cell(map, selector, share) for map, selector in WHOLE for share in partial]
    made += [Cell(map, selector, share) for map, selector in PAIRS for share in partial if share in COARSE]
    return [*made, Cell("context", "value", 1.0)]


def text_cells() -> list[Cell]:
    """The cells of the frontier on real text: the three qualities, other shares of their way, what each of its parts does
    alone, and at the default's share the ways of others."""
    made = quality_cells()
    made += [Cell("context", "prophet", share, "need", 0, offsets=True, surroundings=True) for share in (0.1, 0.3, 0.5)]
    made += [Cell("context", selector, 0.2, "need", 0) for selector in ("query", "prophet", "random")]
    made += [Cell("context", selector, 0.2, "need", 0, offsets=True) for selector in ("query", "prophet", "random")]
    made += [Cell("context", "similarity", 0.2, "first", 0), Cell("context", "value", 0.2, "need")]
    made += [Cell("embedding", "kv", 0.2), Cell("align", "kv", 0.2)]
    return made


def quality_cells() -> list[Cell]:
    """The values of `--blend-quality`."""
    return [
        Cell(
            MAP,
            quality.selector,
            quality.share,
            "need",
            int(Selector(quality.selector).deviation),
            name,
            offsets=True,
            surroundings=True,
        )
        for name, quality in QUALITIES.items()
    ]


def moved_by(row: Mapping[str, Any]) -> str:
    """What becomes of the rows that a way does not compute, in words; empty if they stay as they are. `row`: has a cell's fields."""
    named = [name for name in ("offsets", "surroundings") if row[name]]
    return "".join(f", {name}" for name in named)
