"""Documents of facts, questions about them, and changed versions of them: the data that docs-lm is trained on.

    rng = random.Random(0)
    doc = make_document(rng, facts=16)
    for question in edit(doc, rng, facts=3).questions:
        ...  # question.answer now, question.old_answer before; question.must_change

Everything follows from the seed. `docs_facts` has the words, `docs_document` a document, `docs_changes` its
possible changes, `docs_stream` the samples.
"""

from dejakv.datasets.docs_changes import (
    KINDS,
    Change,
    Kind,
    Question,
    change,
    edit,
    extend,
    merge,
    paraphrase,
    reorder,
    unrelated,
)
from dejakv.datasets.docs_document import CONTEXT, Document, Fact, Sentence, ask, count_tokens, make_document
from dejakv.datasets.docs_stream import DocsDataset, DocsStream, prompt, prompt_of

__all__ = [
    "CONTEXT",
    "KINDS",
    "Change",
    "DocsDataset",
    "DocsStream",
    "Document",
    "Fact",
    "Kind",
    "Question",
    "Sentence",
    "ask",
    "change",
    "count_tokens",
    "edit",
    "extend",
    "make_document",
    "merge",
    "paraphrase",
    "prompt",
    "prompt_of",
    "reorder",
    "unrelated",
]
