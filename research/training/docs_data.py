"""Batches for docs-lm: documents as token ids, many questions behind each.

A batch also tells where in the document each answer is.
"""

import random
import re
from dataclasses import dataclass

import torch

from dejakv_models.docs import ANSWER, BOS, EOS, QUESTION, draw_facts
from dejakv_models.docs_facts import ATTRIBUTES, FILLERS, NAMES, OPENINGS
from research.training.docs_tokenizer import PAD, vocabulary

_IDS = {t: i for i, t in enumerate(vocabulary())}
_NAME, _OTHER, _VALUE = -1, -2, -3
_SLOTS = {"{n}": _NAME, "{m}": _OTHER, "{v}": _VALUE}
NAME_NUMBER = {n: i for i, n in enumerate(NAMES)}
ATTRIBUTE_NUMBER = {a: i for i, a in enumerate(ATTRIBUTES)}


def _pieces(template: str) -> list[int]:
    return [
        _SLOTS.get(w, _IDS.get(w, -9)) for w in re.findall(r"\{\w\}|\w+|[^\w\s]", template.lower())
    ]


_STATEMENTS = {a: [_pieces(w) for w in v.statements] for a, v in ATTRIBUTES.items()}
_QUESTIONS = {a: [_pieces(w) for w in v.questions] for a, v in ATTRIBUTES.items()}
_FILLERS = [_pieces(w) for w in FILLERS]
_OPENINGS = [_pieces(w) for w in OPENINGS]
_NAMES = [_IDS[n] for n in NAMES]
_PLAIN = sorted({p for x in _FILLERS for p in x if p >= 0})
_LETTERS = [_IDS[c] for c in "abcdefghijklmnopqrstuvwxyz0123456789"]
_MORE_LETTERS = [_IDS[f"##{c}"] for c in "abcdefghijklmnopqrstuvwxyz0123456789"]


@dataclass
class Batch:
    """B documents of up to T tokens, Q questions of up to L tokens each (question, answer and end
    marker).

    doc [B, T], doc_pos [B, T] positions, doc_len [B]; ask [B, Q, L], ask_pos [B, Q, L], ask_len [B,
    Q] real tokens; at [B, Q] index of the answer marker in its question; value_at [B, Q] index of
    the stated value in the document; facts [F, 4]: document, index of the value, number of the
    name, number of the attribute, for every stated fact; asked [B, Q, 2]: number of the name and of
    the attribute. `turns`: each question sees those before it.
    """

    doc: torch.Tensor
    doc_pos: torch.Tensor
    doc_len: torch.Tensor
    ask: torch.Tensor
    ask_pos: torch.Tensor
    ask_len: torch.Tensor
    at: torch.Tensor
    value_at: torch.Tensor
    facts: torch.Tensor
    asked: torch.Tensor
    turns: bool = False

    @property
    def tokens(self) -> int:
        return self.doc.numel() + self.ask.numel()

    def to(self, device: str) -> "Batch":
        moved = {
            k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(self).items()
        }
        return Batch(**moved)


def _noise(rng: random.Random) -> list[int]:
    """A sentence of filler words and of words spelled in characters: what the model must learn to
    pass over.
    """
    words: list[int] = []
    for _ in range(rng.randint(2, 6)):
        if rng.random() < 0.5:
            words.append(rng.choice(_PLAIN))
        else:
            words += [rng.choice(_LETTERS), *rng.choices(_MORE_LETTERS, k=rng.randint(1, 7))]
    return [*words, _IDS["."]]


def _stretched(rng: random.Random, borders: list[int], length: int, limit: int) -> list[int]:
    """Positions of a document whose sentences start at `borders`, with random gaps between
    sentences up to `limit`.

    A short document thus teaches long distances at the price of a short one.
    """
    spare = max(0, rng.randint(0, limit) - length)
    gaps = rng.sample(borders, rng.randint(1, len(borders))) if spare else []
    cuts = sorted(rng.randint(0, spare) for _ in gaps)
    sizes = dict(
        zip(sorted(gaps), (b - a for a, b in zip([0, *cuts], cuts, strict=False)), strict=True)
    )
    positions, shift, start = [], 0, 0
    for border, end in zip(borders, [*borders[1:], length], strict=True):
        shift += sizes.get(border, 0)
        positions.extend(range(start + shift, end + shift))
        start = end
    return positions


def _document(
    rng: random.Random, facts: int, filler: float
) -> tuple[list[int], list[int], list[tuple]]:
    """Token ids, where sentences start, and for each fact (index of its value, name, attribute,
    value).
    """
    tokens, borders, stated = [_IDS[BOS]], [0], []
    choice, chance = rng.choice, rng.random
    for fact in draw_facts(rng, facts):
        if chance() < filler:
            n, m = rng.sample(_NAMES, 2)
            borders.append(len(tokens))
            piece = choice(_FILLERS) if chance() < 0.8 else _noise(rng)
            tokens += [n if p == _NAME else m if p == _OTHER else p for p in piece]
        borders.append(len(tokens))
        if chance() < 0.1:
            tokens += choice(_OPENINGS)
        wording = choice(_STATEMENTS[fact.attribute])
        stated.append(
            (len(tokens) + wording.index(_VALUE), fact.name, fact.attribute, _IDS[fact.value])
        )
        name, value = _IDS[fact.name], _IDS[fact.value]
        tokens += [name if p == _NAME else value if p == _VALUE else p for p in wording]
    return tokens, borders, stated


def make_batch(
    rng: random.Random,
    facts: int,
    documents: int,
    questions: int,
    *,
    context: int = 2048,
    stretch: float = 0.7,
    turns: bool = False,
    filler: float = 0.15,
) -> Batch:
    """`documents` documents of `facts` facts; with probability `stretch` each gets gaps in its
    positions.
    """
    docs, positions, asks, ask_positions, ats, values, stated_at, asked = (
        [],
        [],
        [],
        [],
        [],
        [],
        [],
        [],
    )
    questions = min(questions, facts)
    # All of a batch or none: questions are padded to the longest.
    noisy = rng.random() < 0.05
    for number in range(documents):
        tokens, borders, stated = _document(rng, facts, filler)
        # Positions are kept free behind the document: 20 a question in a talk, enough for one with
        # noise otherwise.
        limit = context - (20 * questions if turns else 80)
        gaps = rng.random() < stretch and len(tokens) < limit
        where = _stretched(rng, borders, len(tokens), limit) if gaps else list(range(len(tokens)))
        docs.append(tokens)
        positions.append(where)
        stated_at += [(number, p, NAME_NUMBER[n], ATTRIBUTE_NUMBER[a]) for p, n, a, _ in stated]
        begin = where[-1] + 1
        for p, n, a, v in rng.sample(stated, questions):
            body = [_IDS[n] if t == _NAME else t for t in rng.choice(_QUESTIONS[a])]
            if noisy:
                body = [*_noise(rng), *body] if rng.random() < 0.5 else [*body, *_noise(rng)]
            asks.append([_IDS[QUESTION], *body, _IDS[ANSWER], v, _IDS[EOS]])
            ask_positions.append(range(begin, begin + len(asks[-1])))
            begin += len(asks[-1]) if turns else 0
            ats.append(len(body) + 1)
            values.append(p)
            asked.append((NAME_NUMBER[n], ATTRIBUTE_NUMBER[a]))
    shape = (documents, questions)
    return Batch(
        doc=_padded(docs, _IDS[PAD]),
        doc_pos=_padded(positions, 0),
        doc_len=torch.tensor([len(d) for d in docs]),
        ask=_padded(asks, _IDS[PAD]).view(*shape, -1),
        ask_pos=_padded(ask_positions, 0).view(*shape, -1),
        ask_len=torch.tensor([len(a) for a in asks]).view(shape),
        at=torch.tensor(ats).view(shape),
        value_at=torch.tensor(values).view(shape),
        facts=torch.tensor(stated_at),
        asked=torch.tensor(asked).view(*shape, 2),
        turns=turns,
    )


def _padded(rows: list, fill: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*r, *([fill] * (width - len(r)))] for r in rows])
