"""Write the page of model types: `python -m tests.engines.transformers.model_types [TYPE ...]`.

Whether a type hits exactly, and why not, is what `test_every_model_type.py` shows; whether it blends is tried here. Without
types the page is written anew; with some, their rows alone.
"""

import sys
import warnings
from pathlib import Path

import transformers
from tests.engines.transformers.test_every_model_type import NOT_BUILT, expected
from tests.tiny_models import CAUSAL, Numbers, small_model

from dejakv.engines.transformers import TransformersEngine
from dejakv.engines.transformers.blend_model import BlendModel

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "model-types.md"


def row_of(kind: str) -> tuple[str, str, str]:
    """Whether a type hits exactly, whether it blends, and why not."""
    if cause := NOT_BUILT["causal"].get(kind):
        return "", "", f"not run: {cause.split(chr(124))[-1]}"
    reason, _ = expected(kind, "causal")
    if reason:
        return "no", "no", reason
    blend = TransformersEngine(small_model(kind, image_text=False), Numbers()).blend_model
    return (
        "yes",
        "yes" if isinstance(blend, BlendModel) else "no",
        "" if isinstance(blend, BlendModel) else _short(blend),
    )


def _short(error: object) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    return text if len(text) < 120 else f"{text[:117]}..."


def page(rows: dict[str, tuple[str, str, str]]) -> str:
    """The whole page."""
    ran = [row for row in rows.values() if row[0]]
    counts = {name: sum(row[place] == "yes" for row in ran) for place, name in ((0, "exact"), (1, "blend"))}
    table = [f"| {kind} | {' | '.join(row)} |" for kind, row in sorted(rows.items())]
    return "\n".join(
        [
            "# Types of models",
            "",
            "*Made by `python -m tests.engines.transformers.model_types`.*",
            "",
            f"Causal types of transformers {transformers.__version__}, each tested as a small random model in float32 on a "
            "CPU: a prompt, the same again, a longer one and a padded batch, with DejaKV and without. "
            f"Of {len(rows)} types {len(ran)} run small; {counts['exact']} of these hit exactly, and {counts['blend']} blend. "
            "The others are computed in full, for the reason in the last column. "
            "[Models](models.md) names those that were run in other ways.",
            "",
            "| type | exact | blend | why not |",
            "|---|---|---|---|",
            *table,
            "",
        ]
    )


def read_rows() -> dict[str, tuple[str, str, str]]:
    """The rows of the page as it stands."""
    cells = [
        line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "
    ]
    return {row[0]: tuple((*(cell.strip() for cell in row[1:]), "", "")[:3]) for row in cells if row[0] != "type"}  # pyright: ignore


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    rows = read_rows() if sys.argv[1:] else {}
    for kind in sys.argv[1:] or CAUSAL:
        rows[kind] = row_of(kind)
        print(kind, *rows[kind], sep=" | ", flush=True)
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
