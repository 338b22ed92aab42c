"""Write docs/prototypes/index.md: `python -m scripts.prototypes_page`.

It has the tables of docs/prototypes/prototypes.toml.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs" / "prototypes"
START, END = "<!-- made by scripts/prototypes_page.py from prototypes.toml -->", "<!-- end -->"
TITLES = {
    "hierarchical-semantic-cache": "Hierarchical semantic cache",
    "cache-layers": "Its cache layers",
    "semantic-share-kv": "SemanticShareKV",
    "sim-llm": "Sim-LLM",
    "visual-kv-cache": "VisualKVCache",
}

Table = Mapping[str, Mapping[str, Mapping[str, str]]]


def section(table: Table) -> str:
    """The tables as Markdown, between the two marks."""
    parts = [START, "", "## Every name", ""]
    for document, rows in table.items():
        kept = [
            f"`{name}`" for name, row in rows.items() if "here" not in row and "instead" not in row
        ]
        parts += [f"### {TITLES[document]}: names", "", f"Unchanged: {', '.join(kept)}.", ""]
        parts += ["| prototype | in its place |", "|---|---|"]
        parts += [
            f"| `{_cell(name)}` | {_cell(_here(row))} |"
            for name, row in rows.items()
            if f"`{name}`" not in kept
        ]
        parts.append("")
    return "\n".join([*parts, END])


def page(text: str, table: Table) -> str:
    """The page with its tables made anew."""
    before, _, rest = text.partition(START)
    return before + section(table) + rest.partition(END)[2]


def _here(row: Mapping[str, str]) -> str:
    return row["instead"] if "instead" in row else f"`{row['here']}`"


def _cell(text: str) -> str:
    return text.replace("|", "¦")


if __name__ == "__main__":
    target = DOCS / "index.md"
    table = tomllib.loads((DOCS / "prototypes.toml").read_text(encoding="utf-8"))
    target.write_text(page(target.read_text(encoding="utf-8"), table), encoding="utf-8")
