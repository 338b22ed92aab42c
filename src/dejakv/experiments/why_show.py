"""Why a sample hit or missed, for a terminal and as a page."""

from typing import Any

from rich.console import Console
from rich.table import Table

from dejakv.experiments.commands import run_command_of
from dejakv.experiments.plain_words import counted
from dejakv.experiments.report.page import Section, command, facts, page, paragraph, table
from dejakv.experiments.why import Why, from_donors

METHODS = {
    "none": "compute everything", "prefix": "exact prefix", "exact": "exact reuse", "adopt": "adopt the donor's prompt",
    "blend": "blend", "top_layer": "the top layer's state",
}  # fmt: skip


def in_words(found: Why) -> list[str]:
    """What was decided and why, in sentences."""
    lines = [found.differs] if found.differs else []
    lines.append(f"plan: {METHODS[found.method]}{from_donors(found.donors)}")
    if found.reason:
        lines.append(f"why not more: {found.reason}")
    if not found.candidates:
        lines.append(f"no level found any of the {found.earlier} earlier samples")
    copied = sum(run.length for run in found.runs)
    lines.append(
        f"exact prefix: {found.prefix} of {found.tokens} tokens" + (f", from {found.prefix_of}" if found.prefix else "")
        + f"; copied text: {copied} of {found.tokens} tokens in {counted(len(found.runs), 'run')}"
    )  # fmt: skip
    if found.recorded:
        lines.append(f"the run noted: {found.recorded}")
    return lines


def to_terminal(found: Why, console: Console) -> None:
    """Prints the candidates, the runs, the costs and the sentences."""
    console.print(f"{found.sample}: {_short(found.question, 300)}", soft_wrap=True, markup=False, highlight=False)
    candidates = Table(title=f"nearest of {found.earlier} earlier samples, by level")
    for title in ("level", "score", "sample", "guards"):
        candidates.add_column(title, justify="right" if title == "score" else "left")
    for one in found.candidates:
        said = "\n".join(one.verdicts)
        candidates.add_row(one.level, f"{one.score:.3f}", f"{one.sample}\n{_short(one.chunk, 80)}", said)
    console.print(candidates)
    costs = Table(title=f"prompt tokens computed, of {found.tokens}")
    costs.add_column("method")
    costs.add_column("tokens", justify="right")
    for name, tokens in found.costs.items():
        costs.add_row(f"{METHODS[name]}{' (chosen)' if name == found.method else ''}", _cost(tokens))
    console.print(costs)
    for run in found.runs:
        console.print(f"tokens {run.start} to {run.start + run.length} stand in {run.sample}: {_short(run.text, 80)!r}",
                      soft_wrap=True, markup=False, highlight=False)  # fmt: skip
    for line in in_words(found):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def to_html(found: Why) -> str:
    """One self-contained page."""
    candidates = [
        (
            one.level,
            one.sample,
            f"{one.score:.3f}",
            "yes" if one.trusted else "no",
            "; ".join(one.verdicts),
            _short(one.chunk, 200),
        )
        for one in found.candidates
    ]
    costs = [
        (f"{METHODS[name]}{' (chosen)' if name == found.method else ''}", _cost(tokens))
        for name, tokens in found.costs.items()
    ]
    runs = [
        (f"{run.start} to {run.start + run.length}", run.sample, run.length, _short(run.text, 200))
        for run in found.runs
    ]
    blocks = [
        paragraph(found.question, *in_words(found)),
        table(("method", f"tokens computed, of {found.tokens}"), costs),
        table(("level", "earlier sample", "score", "trusted", "guards", "its text"), candidates),
        *([table(("tokens", "stand in", "length", "text"), runs)] if runs else []),
        facts({"model": found.settings.model, "data set": found.settings.dataset, "earlier samples": found.earlier}),
        command(run_command_of(found.settings.named())),
    ]
    return page(
        f"Why {found.sample} was a {'miss' if found.method in ('none', 'prefix') else 'hit'}", [Section("", blocks)]
    )


def _cost(tokens: Any) -> str:
    return "no donor" if tokens is None else f"{tokens:,}"


def _short(text: str, most: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= most else f"{flat[:most]}..."
