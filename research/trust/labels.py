"""A table of labelled would-be hits: JSON lines, one hit a line, with what was known before it ran and what came of it.

    {"request": 7, "workload": "rag", "method": "blend", "features": {"share_rows": 0.2}, "wrong": {"first": false, "answer": true}, "kl": 0.01}

Replayed, it says what an error bound would have done: `python -m research.trust replay TABLE.jsonl`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import TypeAdapter, ValidationError

from dejakv.errors import ConfigError, DatasetError


@dataclass(frozen=True)
class LabelledHit:
    """One would-be hit.

    request   number or name of the request, in the order in which they came
    features  what was known of the plan: `trust.features.features_of`
    wrong     by what "wrong" means (`first`, `answer`, `tool`), whether it was
    kl        divergence of the first token from full computation's, in nats
    entropy, margin                 of the first token after the approximate run, in nats: known only once it has run
    prompt_tokens, computed_tokens  of the prompt, and of them computed
    """

    __pydantic_config__: ClassVar = {"strict": True, "allow_inf_nan": False}
    request: int | str
    method: str
    features: Mapping[str, float]
    wrong: Mapping[str, bool]
    score: float | None = None
    kl: float | None = None
    prompt_tokens: int | None = None
    computed_tokens: int | None = None
    entropy: float | None = None
    margin: float | None = None

    @property
    def computed(self) -> float:
        """Share of the prompt that the approximate run computes; 0 where the table does not say, and of a stored answer."""
        return (self.computed_tokens or 0) / (self.prompt_tokens or 1)

    def is_wrong(self, differs: str) -> bool:
        """Whether it is wrong by `first`, `answer`, `tool` or `kl:NUMBER`. Raises: ConfigError where the table does not say."""
        if differs.startswith("kl:") and self.kl is not None:
            try:
                return self.kl > float(differs[3:])
            except ValueError:
                raise ConfigError(f"{differs!r} has no number: give kl:0.05, for example") from None
        if differs in self.wrong:
            return self.wrong[differs]
        known = ", ".join([*self.wrong, *(["kl:NUMBER"] if self.kl is not None else [])])
        raise ConfigError(
            f"the table does not say whether request {self.request} is wrong by {differs!r}: choose one of {known}"
        )


def read_labels(path: Path) -> list[LabelledHit]:
    """The hits of a table, in its order. Fields that are not known here are ignored.

    Raises: DatasetError for a file that cannot be read, or a line that is no hit, with its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"the table {path.name!r} cannot be read ({error}): give a file of labelled hits") from error
    return [_hit(line, f"line {number} of {path.name!r}") for number, line in enumerate(lines, 1) if line.strip()]


_ADAPTER = TypeAdapter(LabelledHit)


def _hit(line: str, where: str) -> LabelledHit:
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = f"{first['loc'][0]!r}: " if first["loc"] else ""
        raise DatasetError(
            f"{where} is no labelled hit ({field}{first['msg']}): see research.trust.labels for what one has"
        ) from error
