"""The donor token of each target token, and the computed rows: as a value, in the terminal, and as one HTML file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dejakv.blend.blend import BlendReport, find
from dejakv.blend.sentences import sentence_ends
from dejakv.blend.settings import BlendConfig
from dejakv.blend.token_map import Donors
from dejakv.engines.base import Completion
from dejakv.errors import InputError
from dejakv.experiments.reports.report import Section, facts, page, paragraph, table, text
from dejakv.experiments.table import Sheet
from dejakv.request import Request, Sampling
from dejakv.store.base import Chunk, ChunkMeta


@dataclass(frozen=True)
class ExplainedToken:
    """One target token. `computed`: its state was computed; `forced`: this was required; `source`: position of the donor token
    whose state it took otherwise, `source_text`: that token."""

    position: int
    text: str
    source: int
    source_text: str
    similarity: float
    computed: bool
    forced: bool

    @property
    def same(self) -> bool:
        return self.text == self.source_text


@dataclass(frozen=True)
class Explanation:
    """`answer` from blending, `full_answer` from full computation; `report`: the cost of blending or, if nothing was blended, the
    reason; `donor`: the earlier prompt; `settings`: the way of blending, by name."""

    tokens: tuple[ExplainedToken, ...]
    report: BlendReport
    answer: str
    full_answer: str
    donor: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def summary(self) -> str:
        report = self.report
        if not report.rows:
            return f"computed in full: {report.reason}"
        taken = sum(not token.computed for token in self.tokens)
        return (
            f"{taken} of {report.tokens} tokens took the donor's state, {report.share:.1%} were computed ({report.forced_share:.1%} had to "
            f"be); the token map took {report.map_s * 1e3:.1f} ms"
        )


def explain(
    engine: Any, donor: str, target: str, config: BlendConfig | None = None, *, max_new_tokens: int = 16
) -> Explanation:
    """Computes the donor, blends it into the target, and computes the target in full beside it.

    Raises: InputError for an empty text or an engine without blend.
    """
    config = config or BlendConfig()
    if not hasattr(engine, "tokenizer"):
        raise InputError(f"the engine {engine.name} cannot blend: use the transformers engine")
    sampling = Sampling(max_new_tokens=max_new_tokens)
    first, second = (
        engine.prepare(Request(name, text, text, sampling=sampling))
        for name, text in (("donor", donor), ("target", target))
    )
    state = engine.full(first.sampled(Sampling(max_new_tokens=1))).capture()
    if state is None:
        raise InputError("this model's state cannot be captured: choose another model")
    chunk = Chunk(ChunkMeta("donor", "default", engine.epoch, first.token_ids, donor, donor), state)
    blended = engine.blend(second, [chunk], config)
    full = engine.full(second)
    completion = blended if isinstance(blended, Completion) else full
    report: BlendReport = blended.details["blend"]
    held = Donors.of(first.token_ids)
    found, needed = find(
        np.asarray(second.token_ids, dtype=np.int64),
        held,
        engine.embed_tokens,
        config,
        sentence_ends(engine.tokenizer),
        [True],
    )
    here, there = _pieces(engine.tokenizer, second.token_ids), _pieces(engine.tokenizer, first.token_ids)
    computed = set(range(report.tokens) if report.active is None else report.active)
    tokens = tuple(
        ExplainedToken(i, here[i], int(s), there[s], float(found.similarity[i]), i in computed, bool(needed.forced[i]))
        for i, s in enumerate(found.source)
    )
    return Explanation(tokens, report, completion.text, full.text, donor, vars(config))


def _pieces(tokenizer: Any, ids: tuple[int, ...]) -> list[str]:
    return [tokenizer.decode([token]) for token in ids]


MARKS = {
    "x": ("!", "bold white on red", "changed, so computed"),
    "f": ("*", "white on dark_orange3", "computed with it (rest of a sentence, the question)"),
    "c": ("+", "black on yellow", "chosen and computed"),
    "k": ("", "green", "the donor's state (its token in parentheses if it is another)"),
}
"""What became of a token: its mark where there are no colours, its colours, and what they mean."""


def _kind(token: ExplainedToken) -> str:
    if token.forced:
        return "f" if token.same else "x"
    return "c" if token.computed else "k"


def to_terminal(explained: Explanation, console: Any) -> None:
    """Prints the target with what became of each token: in colours on a terminal, with marks elsewhere."""
    from rich.text import Text

    colours = console.is_terminal and console.color_system is not None
    marked = Text()
    for token in explained.tokens:
        kind = _kind(token)
        mark, style, _ = MARKS[kind]
        marked.append((token.text or "·") if colours else mark + (token.text or "·"), style)
        if kind == "k" and not token.same:
            marked.append(f"({token.source_text})", "dim")
        marked.append(" ")
    console.print(marked)
    legend = [f"{style if colours else mark or 'no mark'}: {says}" for mark, style, says in MARKS.values()]
    console.print("; ".join(legend), style="dim", markup=False, highlight=False)
    console.print(explained.summary)
    console.print(f"answer, blended: {explained.answer!r}; in full: {explained.full_answer!r}")


def to_html(explained: Explanation, model: str) -> str:
    """One self-contained page: the marked text, the donor's text, the map as a table, the model and the settings."""
    marked = " ".join(_span(_kind(token), token.text or "·") for token in explained.tokens)
    legend = " ".join(_span(kind, says) for kind, (_, _, says) in MARKS.items())
    rows = [
        [
            str(token.position), token.text, str(token.source), token.source_text, f"{token.similarity:.2f}",
            "yes" if token.computed else "no",
        ]
        for token in explained.tokens
    ]  # fmt: skip
    columns = ("place", "token", "donor's place", "donor's token", "similarity", "computed")
    answers = f"Answer, blended: {explained.answer}; in full: {explained.full_answer}"
    blocks = [
        f"<p>{legend}</p><p>{marked}</p>",
        paragraph(explained.summary, answers, f"Donor: {explained.donor}"),
        table(Sheet("Map", columns, rows)),
        facts({"model": model, **explained.settings}, "Settings"),
    ]  # fmt: skip
    return page("Which token took whose state", [Section("", blocks)])


def _span(kind: str, said: str) -> str:
    return f'<span class="{kind}">{text(said)}</span>'
