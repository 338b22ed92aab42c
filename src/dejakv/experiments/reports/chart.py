"""Curves over the requests of a run, as pictures in the report's page. Their colours are the page's own, light and dark."""

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 8, 12, 28
"""Margins, for the labels of the axes."""

STYLE = (
    "svg{width:100%;max-width:40rem;height:auto;font:12px system-ui,sans-serif;fill:currentColor}svg .grid{stroke:var(--line)}"
    "svg path{fill:none;stroke-width:2}.none{--arm:#8a8f98}.prefix{--arm:#b35900}.cache{--arm:#1a7f64}"
    "@media(prefers-color-scheme:dark){.prefix{--arm:#f0a04b}.cache{--arm:#4cc9a0}}svg path{stroke:var(--arm)}"
    ".key{border-top:3px solid var(--arm);padding:0;margin-right:1rem;border-radius:0;color:inherit}"
)


def curves(title: str, unit: str, arms: Mapping[str, Sequence[float]], names: Mapping[str, str]) -> str:
    """HTML of one curve for each arm, over the number of the request.

    unit   of the values
    arms   values by arm, all of one length
    names  of the arms, for the key
    """
    count = max((len(values) for values in arms.values()), default=0)
    if count < 2:
        return ""
    top = _round(max(max(values) for values in arms.values()) or 1.0)

    def at(place: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * place / (count - 1)
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top

    grid: list[str] = []
    for part in range(5):
        _, y = at(0, top * part / 4)
        label = f"{top * part / 4:,.10g}"
        grid.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"></line>')
        grid.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for number in sorted({1, (count + 1) // 2, count}):
        x, _ = at(number - 1, 0)
        end = "end" if number == count else "middle"
        grid.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{end}">{number}</text>')
    drawn = "".join(
        f'<path class="{arm}" d="M{" L".join("{:.1f} {:.1f}".format(*at(n, value)) for n, value in enumerate(values))}"></path>'
        for arm, values in arms.items()
    )
    key = "".join(f'<span class="key {arm}">{html.escape(names[arm])}</span>' for arm in arms)
    last = ", ".join(f"{names[arm]} {values[-1]:,.4g}" for arm, values in arms.items())
    said = html.escape(f"{title}, {unit}, over {count} requests; at the last: {last}")
    return (
        f"<h3>{html.escape(title)}</h3><p>{key}<small>{html.escape(unit)}, by request</small></p>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">{"".join(grid)}{drawn}</svg>'
    )


def _round(value: float) -> float:
    """The least of 1, 2, 4, 5, 8 and 10 times a power of ten that is not below the value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value * (1 - 1e-9))
