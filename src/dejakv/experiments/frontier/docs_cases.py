"""Cases from documents of facts, for docs-lm: every answer is known, also before a change."""

import random
from collections.abc import Sequence

from dejakv.datasets.docs import KINDS, Document, Kind, ask, change, make_document, prompt_of
from dejakv.experiments.frontier.cases import Case, Encode


class DocsCases:
    """See Cases. `facts` in a document, about 10 tokens each."""

    kinds: Sequence[str] = KINDS
    steps = 1

    def __init__(self, facts: int) -> None:
        self.facts = facts

    def settings(self) -> dict[str, object]:
        """See Cases."""
        return {"facts": self.facts}

    def make(self, kind: str, number: int, encode: Encode, seed: int) -> Case:
        """See Cases."""
        return make_case(kind, number, self.facts, encode, seed)  # type: ignore[arg-type]


def make_case(kind: Kind, number: int, facts: int, encode: Encode, seed: int = 0) -> Case:
    """Determined by its arguments. An edit asks about an edited fact; the other kinds ask in turn about facts that the
    donor also states and facts that it does not."""
    rng = random.Random(f"frontier/{seed}/{kind}/{number}")
    doc = make_document(rng, facts)
    made = change(kind, doc, rng, questions=2)
    changed = [q for q in made.questions if q.must_change]
    stay = [q for q in made.questions if not q.must_change]
    first, second = (changed, stay) if kind == "edit" or number % 2 == 0 else (stay, changed)
    question = (first or second)[0]
    donors = [doc]
    if kind == "merge":
        donors.append(Document(made.target.sentences[: len(made.target.sentences) - len(doc.sentences)]))
    prompts = tuple(encode(prompt_of(d.text, ask(rng.choice(d.facts), rng))) for d in donors)
    old = question.old_answer if question.must_change else None
    return Case(
        kind,
        number,
        encode(prompt_of(made.target.text, question.text)),
        prompts,
        encode(question.answer)[:1],
        encode(old)[:1] if old is not None else None,
    )
