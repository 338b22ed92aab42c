"""Cases of a frontier: donors, the changed prompt, and the right answer.

They are made from documents of facts, or from real text.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from dejakv.datasets.base import Sample
from dejakv.datasets.rag import Passage, docs_corpus
from dejakv.datasets.sessions import SessionsDataset
from dejakv.errors import ConfigError
from dejakv.identity import digest_of
from dejakv_models.docs import KINDS, Document, Kind, ask, change, make_document, prompt_of

Encode = Callable[[str], tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A changed prompt, and its donors, whose state is available. Token ids throughout.

    answer      first tokens of the right answer, None without a label
    old_answer  the right answer for the donor, if the change made it wrong
    """

    kind: str
    number: int
    target: tuple[int, ...]
    donors: tuple[tuple[int, ...], ...]
    answer: tuple[int, ...] | None
    old_answer: tuple[int, ...] | None


class DocsCases:
    """Documents of `facts` facts, about 10 tokens each, with known answers.

    They are compared at the first token (`steps`). `most` is the number of cases of a kind that has
    no more.
    """

    kinds: Sequence[str] = KINDS
    steps = 1
    most: Mapping[str, int] = {}

    def __init__(self, facts: int) -> None:
        self.facts = facts
        self.settings: dict[str, object] = {"facts": facts}

    def make(self, kind: str, number: int, encode: Encode, seed: int) -> Case:
        """Make a case, determined by kind, number, tokenizer and seed."""
        return make_case(kind, number, self.facts, encode, seed)  # type: ignore[arg-type]


def make_case(kind: Kind, number: int, facts: int, encode: Encode, seed: int = 0) -> Case:
    """Make a case, determined by the arguments.

    An edit asks about an edited fact; the other kinds ask in turn about facts that the donor also
    states and facts that it does not.
    """
    rng = random.Random(f"frontier/{seed}/{kind}/{number}")
    doc = make_document(rng, facts)
    made = change(kind, doc, rng, questions=2)
    changed = [q for q in made.questions if q.must_change]
    stay = [q for q in made.questions if not q.must_change]
    first, second = (changed, stay) if kind == "edit" or number % 2 == 0 else (stay, changed)
    question = (first or second)[0]
    donors = [doc]
    if kind == "merge":
        donors.append(
            Document(made.target.sentences[: len(made.target.sentences) - len(doc.sentences)])
        )
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


WORDS = (60, 160)
"""Least and most words of a passage."""
TEXT_KINDS = (
    "edit", "instruction", "partial", "reorder", "apart", "foreign", "several", "two-hop",
    "foreign-two-hop", "agent",
)  # fmt: skip
INSTRUCTIONS = (
    "Read the following passages of a manual.",
    "You answer from the passages below and from nothing else. Be brief.",
)
ASK = ("What is the release code of {name}?", "The release code of {name} is")
SUMMARIZE = ("Summarize the passages in two sentences.", "The passages describe")
SAME = "the release code of {name}"
WINDOW, TOOLS = 6, 1
"""Messages of an agent's conversation that its prompt keeps, and tool results that it keeps whole.
"""
BACK = 3
"""Turns between an agent's prompt and its donor, at most."""


class TextCases:
    """`passages` in a prompt, of about 140 tokens each, from the standard library's documentation;
    compared along `steps` tokens.

    edit         a word or number of one passage is replaced; questions ask for the changed code
    instruction  the same passages under another instruction
    partial      one passage is new
    reorder      the same passages in another order
    apart        each passage was computed in its own prompt
    foreign      each passage was computed in a prompt of its own, behind two that are not in this
                 one
    several      each passage stands in several donors, each two of them with another one, in any
                 order
    two-hop      as `apart`, and the answer needs two of them: one refers to the code that another
                 states; `foreign-two-hop` as `foreign`
    agent        a turn of `sessions` behind a tool's result; an earlier turn of the conversation,
                 with other messages in its window, is the donor. Of any length, about 1,000 tokens
    """

    kinds: Sequence[str] = TEXT_KINDS
    steps = 16

    def __init__(self, passages: int) -> None:
        if passages < 2:
            raise ConfigError(f"{passages} passages in a prompt: give at least 2")
        self.passages = passages
        self.most = {"agent": len(turns_of_agents())}
        text = digest_of(
            *(passage.text for passage in passages_of_manuals()),
            *(turn for turn, _ in turns_of_agents()),
        )
        self.settings: dict[str, object] = {"passages": passages, "text": text[:16]}

    def make(self, kind: str, number: int, encode: Encode, seed: int) -> Case:
        """Make a case, determined by kind, number, tokenizer and seed."""
        if kind == "agent":
            return _turn(number, encode, seed)
        rng = random.Random(f"frontier-text/{seed}/{kind}/{number}")
        texts = passages_of_manuals()
        chosen = rng.sample(range(len(texts)), self.passages + 1)
        *passages, spare = [texts[i] for i in chosen]
        two_hop = kind.endswith("two-hop")
        asks = number % 2 == 0 or two_hop
        code, other = (str(value) for value in rng.sample(range(1000, 10000), 2))
        told = rng.randrange(len(passages))
        codes = {told: code}
        if two_hop:
            second = rng.choice([i for i in range(len(passages)) if i != told])
            codes = {told: SAME.format(name=passages[second].title), second: code}
        target = [_told(passage, codes.get(i)) for i, passage in enumerate(passages)]
        question, begins = (
            part.format(name=passages[told].title) for part in (ASK if asks else SUMMARIZE)
        )
        donors = self._donors(
            kind, rng, passages, target, told, other, _told(spare, None), question, begins
        )
        stale = kind == "edit" and asks
        return Case(
            kind,
            number,
            encode(prompt(INSTRUCTIONS[0], target, question, begins)),
            tuple(encode(text) for text in donors),
            _answer(encode, code) if asks else None,
            _answer(encode, other) if stale else None,
        )

    @staticmethod
    def _donors(
        kind: str, rng: random.Random, passages: Sequence[Passage], target: list[str], told: int,
        other: str, spare: str,
        question: str, begins: str,
    ) -> list[str]:  # fmt: skip
        """Return the donor prompts."""
        before = list(target)
        instruction = INSTRUCTIONS[0]
        if kind == "edit":
            before[told] = _told(passages[told], other)
        elif kind == "instruction":
            instruction = INSTRUCTIONS[1]
        elif kind == "partial":
            before[rng.choice([i for i in range(len(target)) if i != told])] = spare
        elif kind == "reorder":
            while before == target:
                rng.shuffle(before)
        elif kind.startswith("foreign"):
            others = [passage.text for passage in passages_of_manuals() if passage not in passages]
            return [
                prompt(instruction, [*rng.sample(others, 2), text], question, begins)
                for text in target
            ]
        elif kind == "several":
            return [
                prompt(instruction, texts, question, begins)
                for texts in _pairs(rng, target, passages)
            ]
        else:
            return [prompt(instruction, [text], question, begins) for text in target]
        return [prompt(instruction, before, question, begins)]


def _pairs(rng: random.Random, target: list[str], passages: Sequence[Passage]) -> list[list[str]]:
    """Each two of the texts with another passage, shuffled; all of them shuffled."""
    others = [passage.text for passage in passages_of_manuals() if passage not in passages]
    made = [
        [*pair, other]
        for pair, other in zip(
            combinations(target, 2), rng.sample(others, len(others)), strict=False
        )
    ]
    for texts in made:
        rng.shuffle(texts)
    rng.shuffle(made)
    return made


def _turn(number: int, encode: Encode, seed: int) -> Case:
    turns = list(turns_of_agents())
    random.Random(f"frontier-agent/{seed}").shuffle(turns)
    target, before = turns[number]
    return Case("agent", number, encode(target), (encode(before),), None, None)


@cache
def turns_of_agents() -> tuple[tuple[str, str], ...]:
    """Return prompts of the shipped conversations that end with a tool's result.

    Each comes with one of the conversation's `BACK` prompts before it. A pair whose earlier prompt
    begins the later one is left out: prefix caching serves it.
    """
    before: defaultdict[object, list[str]] = defaultdict(list)
    found: list[tuple[str, str]] = []
    for sample in SessionsDataset(window=WINDOW, compact_tools=TOOLS):
        text, held = _conversation(sample), before[sample.fields["session"]]
        if "<tool_response>" in sample.question:
            found += [
                (text, one) for one in held[-BACK:] if not text.startswith(one.removesuffix(BEGIN))
            ]
        held.append(text)
    return tuple(found)


BEGIN = "<|im_start|>assistant\n"


def _conversation(sample: Sample) -> str:
    """Return the conversation in ChatML, to the beginning of the answer."""
    return (
        "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in sample.messages) + BEGIN
    )


@cache
def passages_of_manuals() -> tuple[Passage, ...]:
    """Return documentation of the standard library as running text, without code examples.

    It depends on the Python version.
    """
    flat = (
        Passage(passage.title, " ".join(passage.text.split())) for passage in docs_corpus().passages
    )
    return tuple(
        p for p in flat if WORDS[0] <= len(p.text.split()) <= WORDS[1] and ">>>" not in p.text
    )


def prompt(instruction: str, passages: Sequence[str], question: str, begins: str) -> str:
    """Return a chat turn in ChatML, SmolLM2's and Qwen's format, and the answer's first words."""
    return f"{opening(instruction, passages)}{question}<|im_end|>\n<|im_start|>assistant\n{begins}"


def opening(instruction: str, passages: Sequence[str]) -> str:
    """Return a chat turn up to its question."""
    text = "\n\n".join(passages)
    return f"<|im_start|>user\n{instruction}\n\n{text}\n\n"


def _told(passage: Passage, code: str | None) -> str:
    """The passage, with the sentence that states its code in the middle."""
    if code is None:
        return passage.text
    sentences = passage.text.split(". ")
    half = len(sentences) // 2
    stated = f"The release code of {passage.title} is {code}"
    return ". ".join([*sentences[:half], stated, *sentences[half:]])


def _answer(encode: Encode, code: str) -> tuple[int, ...]:
    """The code's tokens after other text."""
    before = encode("is")
    return encode(f"is {code}")[len(before) :]
