"""The donor token of each target token, and the computed rows: as a value, in the terminal, and as one HTML file."""

import html
from dataclasses import dataclass
from typing import Any

import numpy as np

from dejakv.costs import Costs
from dejakv.engines.base import costs_of
from dejakv.engines.blending import run_blend
from dejakv.errors import InputError
from dejakv.find.candidates import Candidate, exact_ways
from dejakv.find.found import Found
from dejakv.find.ways import Plan
from dejakv.request import Request, Sampling
from dejakv.reuse.blend import BlendConfig, BlendReport, find
from dejakv.reuse.sentences import sentence_ends
from dejakv.reuse.token_map import Donors
from dejakv.store.base import Chunk, ChunkMeta
from dejakv.store.prefix import PrefixHit


@dataclass(frozen=True)
class ExplainedToken:
    """One target token. `computed`: share of the layers that computed its row; `forced`: this was required; `source`: position
    of the donor token whose state it took, `source_text`: that token."""

    position: int
    text: str
    source: int
    source_text: str
    similarity: float
    computed: float
    forced: bool

    @property
    def same(self) -> bool:
        return self.text == self.source_text


@dataclass(frozen=True)
class Explanation:
    """`answer` from blending, `full_answer` from full computation; `report`: the cost of blending or, if nothing was blended, the
    reason; `plans`: what each way to run the prompt takes, by the engine's costs, with the rows that the token map asks for."""

    tokens: tuple[ExplainedToken, ...]
    report: BlendReport
    answer: str
    full_answer: str
    plans: str = ""

    @property
    def summary(self) -> str:
        report = self.report
        if not report.rows:
            return f"computed in full: {report.reason}"
        taken = sum(token.computed < 1 for token in self.tokens)
        return (
            f"{taken} of {report.tokens} tokens took the donor's state, {report.share:.1%} of all rows were computed "
            f"({report.forced_share:.1%} had to be); the token map took {report.map_s * 1e3:.1f} ms"
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
    state = engine.run(first, sampling=Sampling(max_new_tokens=1)).capture()
    if state is None:
        raise InputError("this model's state cannot be captured: choose another model")
    chunk = Chunk(ChunkMeta("donor", "default", engine.epoch, first.token_ids, donor, donor), state)
    costs = costs_of(engine, ())  # as they were before: the runs below are the first, and slow
    completion = run_blend(engine, second, [chunk], config)
    full = engine.run(second)
    report: BlendReport = completion.details["blend"]
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
    computed = _computed(report)
    tokens = tuple(
        ExplainedToken(i, here[i], int(s), there[s], float(found.similarity[i]), computed[i], bool(needed.forced[i]))
        for i, s in enumerate(found.source)
    )
    plans = _plans(chunk.meta, len(tokens), needed.exact, report, costs)
    return Explanation(tokens, report, completion.text, full.text, plans)


def _plans(donor: ChunkMeta, tokens: int, held: int, report: BlendReport, costs: Costs | None) -> str:
    """What each way takes; a blend that was not made is not among them."""
    ways = list(exact_ways(tokens, Found(prefix=(PrefixHit(donor.id, held), donor) if held else None), costs))
    if report.blended:
        blend = Plan("blend", (donor,), kept=held)
        took = costs.blending(report.share * tokens, tokens, donor.num_tokens) if costs else None
        ways.append(Candidate(blend, took))
    return ", ".join(map(str, ways))


def _computed(report: BlendReport) -> list[float]:
    if not report.rows:
        return [1.0] * report.tokens
    counts = np.zeros(report.tokens)
    for rows in report.active:
        counts[list(rows) if rows is not None else slice(None)] += 1
    return (counts / len(report.active)).tolist()


def _pieces(tokenizer: Any, ids: tuple[int, ...]) -> list[str]:
    return [tokenizer.decode([token]) for token in ids]


def to_terminal(explained: Explanation, console: Any) -> None:
    """Prints the target: computed tokens on a coloured ground, tokens with a donor's state followed by the donor's token."""
    from rich.text import Text

    text = Text()
    for token in explained.tokens:
        piece = token.text or "·"
        if token.computed >= 1 or token.forced:
            text.append(piece, "bold white on red" if not token.same else "white on dark_orange3")
        elif token.computed > 1 / max(1, len(explained.report.rows)):
            text.append(piece, "black on yellow")
        else:
            text.append(piece, "green")
            if not token.same:
                text.append(f"({token.source_text})", "dim")
        text.append(" ")
    console.print(text)
    console.print(
        "computed because it changed: white on red; computed with it (rest of a sentence, the question): white on orange; "
        "chosen: black on yellow; the donor's state: green (its token in parentheses if it is another)",
        style="dim",
    )
    console.print(explained.summary)
    console.print(f"plans: {explained.plans}")
    console.print(f"answer, blended: {explained.answer!r}; in full: {explained.full_answer!r}")


_STYLE = """body{font:15px/1.9 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;background:#fff;color:#222}
span{border-radius:3px;padding:1px 3px}.k{background:#e3f4e3}.c{background:#ffe9a8}.f{background:#ffd0a6}.x{background:#ffb3b3}
small{color:#777}@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}.k{background:#1f3a1f}.c{background:#554a14}
.f{background:#5a3512}.x{background:#642020}}"""


def to_html(explained: Explanation) -> str:
    """One self-contained page; hovering over a token shows the origin of its state."""
    parts: list[str] = []
    for token in explained.tokens:
        kind = "k"
        if token.computed >= 1 or token.forced:
            kind = "f" if token.same else "x"
        elif explained.report.rows and token.computed > 1 / len(explained.report.rows):
            kind = "c"
        title = (
            f"{token.position} takes {token.source} ({token.source_text}), similarity {token.similarity:.2f}, "
            f"computed in {token.computed:.0%} of the layers"
        )
        shown = html.escape(token.text or "·")
        other = "" if token.same or kind != "k" else f" <small>({html.escape(token.source_text)})</small>"
        parts.append(f'<span class="{kind}" title="{html.escape(title)}">{shown}</span>{other}')
    legend = (
        '<span class="x">changed, computed</span> <span class="f">computed with it</span> '
        '<span class="c">chosen, computed</span> <span class="k">the donor\'s state</span>'
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>dejakv explain</title><style>{_STYLE}</style>'
        f"<h1>Which token took whose state</h1><p>{legend}</p><p>{' '.join(parts)}</p><p>{html.escape(explained.summary)}</p>"
        f"<p>Answer, blended: <b>{html.escape(explained.answer)}</b>; in full: <b>{html.escape(explained.full_answer)}</b></p></html>\n"
    )
