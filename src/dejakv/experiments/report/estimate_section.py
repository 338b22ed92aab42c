"""The section of an estimate: hits against false hits by level and threshold, and the recommendation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv.experiments.advice import DONORS, in_plain_words
from dejakv.experiments.report.charts import Series, lines
from dejakv.experiments.report.page import Section, charts, interval, paragraph, share, table

Found = Mapping[str, Any]


def estimate_section(folder: Path, found: Found, prefix: str) -> Section:
    """Hits against false hits by level and threshold, and the recommendation."""
    rows: Sequence[Found] = found["rows"]
    series: list[list[Series]] = [[], []]
    for guard, label in ((True, "words checked"), (False, "words not checked")):
        chosen = [row for row in rows if row["level"] == "semantic_text" and row["lexical_guard"] is guard]
        for place, (rate, ends) in enumerate((("hit_rate", "hit_interval"), ("false_hit_rate", "false_hit_interval"))):
            known = [row for row in chosen if row[rate] is not None]
            if known:
                low, high = ([row[ends][end] for row in known] for end in (0, 1))
                x = [row["threshold"] for row in known]
                series[place].append(Series(label, x, [row[rate] for row in known], low, high))
    titles = (("hits", "Hit rate of similar texts"), ("false", "Of the judged hits, false ones"))
    drawn = [
        lines(f"{prefix}-{name}", f"{title}, with 95% intervals", "least cosine", "share", part, marker="o")
        for (name, title), part in zip(titles, series, strict=True)
        if part
    ]
    cells = [
        [
            DONORS[row["level"]], "-" if row["threshold"] is None else f"{row['threshold']:g}",
            "checked" if row["lexical_guard"] else "-", share(row["hit_rate"]), interval(row["hit_interval"]),
            share(row["false_hit_rate"]), interval(row["false_hit_interval"]), share(row["tokens_saved"] / found["prompt_tokens"]),
        ]
        for row in rows
    ]  # fmt: skip
    columns = ("donors", "least cosine", "words", "hit rate", "95%", "false of judged", "95%", "tokens saved")
    return Section(
        f"Settings for {found['log']}", [paragraph(*in_plain_words(dict(found))), charts(drawn), table(columns, cells)]
    )
