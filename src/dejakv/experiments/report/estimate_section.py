"""The section of an estimate: hits against false hits by level and threshold, and the recommendation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dejakv.experiments.advice import in_plain_words, settings_sheet
from dejakv.experiments.report.charts import Series, lines
from dejakv.experiments.report.page import Section, charts, paragraph, table

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
    blocks = [paragraph(*in_plain_words(found)), charts(drawn), table(settings_sheet(found))]
    return Section(f"Settings for {found['log']}", blocks)
