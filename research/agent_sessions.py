"""Sessions of agents whose prompts change in the middle, as data sets.

    dejakv run --dataset research.agent_sessions:reminders --output FOLDER

`reminders`: a reminder with the step's number moves to the newest message at each turn.
`compaction`: what is older than a limit becomes a summary. `subagents`: three agents share a head
and get each other's latest answers. The agents read docstrings of the standard library, one a turn;
answers are recorded, not generated, so that all arms of a comparison get the same prompts.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dejakv.datasets.base import Sample
from research.generated_text import docstrings

TURNS = 40
LIMIT_CHARACTERS = 24_000
"""Characters of a history before it is compacted, about 6,000 tokens."""

KEPT_RESULTS = 3
"""Tool results that compaction leaves whole."""

AGENTS = 3
HEAD = (
    "You document a library. Read one function at a time, say in a sentence what it does, and "
    "name the mistake that a beginner would make with it. Answer from what you have read alone."
)
REMINDER = "<system-reminder>\nStep {step} of {turns}. Open: {open}.\n</system-reminder>\n"

Messages = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ReadStep:
    """A turn of an agent: what it is asked, a function's docstring, and its answer to it."""

    number: int
    docstring: str

    @property
    def result(self) -> str:
        """The message that asks the agent for its next answer."""
        question = f"What does function {self.number} do?"
        return f"<tool_response>\n{self.docstring}\n</tool_response>\n{question}"

    @property
    def answer(self) -> str:
        """The recorded answer: the docstring's first paragraph."""
        first = " ".join(self.docstring.split("\n\n")[0].split())
        return f"Function {self.number}: {first}"


def read_steps(seed: int, count: int) -> list[ReadStep]:
    """Return the turns of one agent, in an order of its seed."""
    texts = docstrings(10_000)
    chosen = random.Random(f"agents/{seed}").sample(texts, min(count, len(texts)))
    return [ReadStep(number, text) for number, text in enumerate(chosen, 1)]


def history_of(steps: Sequence[ReadStep]) -> Messages:
    """Return the messages of finished turns."""
    return tuple(
        message for step in steps for message in (("user", step.result), ("assistant", step.answer))
    )


def sample_of(kind: str, name: str, messages: Messages, step: ReadStep) -> Sample:
    """Return the request of a turn, with the recorded answer as `fields["recorded"]`."""
    return Sample(
        id=f"{kind}-{name}",
        question=messages[-1][1],
        messages=messages,
        fields={"session": kind, "recorded": step.answer},
    )


def reminders(*, seed: int = 0, **_: Any) -> Iterator[Sample]:
    """Yield a session in which a reminder stands before the newest message, and only there."""
    steps = read_steps(seed, TURNS)
    for place, step in enumerate(steps):
        waiting = ", ".join(str(later.number) for later in steps[place : place + 4])
        reminder = REMINDER.format(step=step.number, turns=len(steps), open=waiting)
        messages = (
            ("system", HEAD),
            *history_of(steps[:place]),
            ("user", reminder + step.result),
        )
        yield sample_of("reminders", str(step.number), messages, step)


def compaction(*, seed: int = 0, **_: Any) -> Iterator[Sample]:
    """Yield a session whose older turns become a summary once they are too long."""
    steps = read_steps(seed, TURNS)
    first_kept = 0
    for place, step in enumerate(steps):
        if sum(len(old.result) + len(old.answer) for old in steps[first_kept:place]) > (
            LIMIT_CHARACTERS
        ):
            first_kept = place - KEPT_RESULTS
        summary = "\n".join(old.answer for old in steps[:first_kept])
        head = f"{HEAD}\n\nWhat you found so far:\n{summary}" if summary else HEAD
        messages = (
            ("system", head),
            *history_of(steps[first_kept:place]),
            ("user", step.result),
        )
        yield sample_of("compaction", str(step.number), messages, step)


def subagents(*, seed: int = 0, **_: Any) -> Iterator[Sample]:
    """Yield turns of several agents; each gets the others' latest answers with its result."""
    steps = read_steps(seed, TURNS)
    turns = [steps[place : place + AGENTS] for place in range(0, len(steps), AGENTS)]
    # The shared head: what all of them have read before they part.
    head = f"{HEAD}\n\n" + "\n\n".join(step.docstring for step in read_steps(seed + 1, 4))
    histories: list[Messages] = [()] * AGENTS
    latest: list[str] = [""] * AGENTS
    for turn, of_agents in enumerate(turns):
        known = list(latest)
        for agent, step in enumerate(of_agents):
            told = "\n".join(
                f"Agent {other} says: {text}"
                for other, text in enumerate(known)
                if text and other != agent
            )
            request = ("user", f"{told}\n{step.result}" if told else step.result)
            messages = (("system", head), *histories[agent], request)
            yield sample_of("subagents", f"{turn}-{agent}", messages, step)
            histories[agent] = (*histories[agent], request, ("assistant", step.answer))
            latest[agent] = step.answer
