"""Replay of multi-turn conversations: one request for each call of the model.

Each request holds the history before its call. Recorded edits, `window` and `compact_tools` change
this history, so text of an earlier request may be at another position, or follow changed text.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from dejakv.datasets.base import Sample
from dejakv.datasets.files import json_lines, read_json
from dejakv.datasets.messages import LoggedMessage, merged, read_messages
from dejakv.errors import ConfigError, DatasetError

AT_ONCE = 4
"""Conversations in progress at once: a request of one follows a request of another."""


class SessionsDataset:
    """One sample for each call of the model in recorded conversations.

    The recorded answer is in the field `recorded`. Other answers may be right too, so it is not
    used for scoring. A call whose trimmed history ends with an answer has no sample.

    Parameters
    ----------
    path : str, optional
        JSON lines, one conversation a line, or a JSON file with one or a list of them (SWE-agent's
        `.traj`, tau-bench's results); by default the conversations that ship with the package.
    seed : int
        How conversations alternate.
    window : int
        Messages kept after the system message; 0 keeps all.
    compact_tools : int, optional
        Tool results kept whole, older ones become one line; by default all are kept.

    Raises
    ------
    DatasetError
        For a file that is missing or empty, and for a line that is not a conversation; the error
        names the line.
    ConfigError
        For a negative number.
    """

    def __init__(
        self,
        path: str | None = None,
        seed: int = 0,
        window: int = 0,
        compact_tools: int | None = None,
    ) -> None:
        if window < 0 or (compact_tools or 0) < 0:
            raise ConfigError(
                f"--window {window} and --compact-tools {compact_tools}: give 0 or more"
            )

        self.seed, self.window, self.compact_tools = seed, window, compact_tools
        self.sessions: Sequence[Sequence[LoggedMessage]] = [
            read_messages(r, where) for where, r in _records(path)
        ]
        if not self.sessions:
            raise DatasetError(f"{path} is empty: give a file with conversations")

    def __iter__(self) -> Iterator[Sample]:
        rng = random.Random(f"sessions/{self.seed}")
        waiting = [
            (number, enumerate(self._calls(session)))
            for number, session in enumerate(self.sessions)
        ]
        rng.shuffle(waiting)

        going: list[tuple[int, Iterator[tuple[int, tuple[tuple[LoggedMessage, ...], str]]]]] = []
        while waiting or going:
            # As on a server, where a user's next turn comes behind turns of others.
            while waiting and len(going) < AT_ONCE:
                going.append(waiting.pop())
            chosen = rng.randrange(len(going))
            session, calls = going[chosen]

            call = next(calls, None)
            # An ended conversation makes room for the next one.
            if call is None:
                del going[chosen]
            else:
                number, (messages, recorded) = call
                yield Sample(
                    id=f"session-{session}-{number}",
                    question=messages[-1].text,
                    messages=tuple((message.role, message.text) for message in messages),
                    fields={"session": session, "recorded": recorded},
                )

    def _calls(
        self, session: Sequence[LoggedMessage]
    ) -> Iterator[tuple[tuple[LoggedMessage, ...], str]]:
        """Yield the history before each model call, and the model's answer."""
        history: list[LoggedMessage] = []
        for message in session:
            if message.edits is not None:
                history[message.edits] = replace(history[message.edits], text=message.text)
                continue
            # A greeting before the first question answers no request.
            if message.role == "assistant" and any(m.role == "user" for m in history):
                seen = merged(windowed(compacted(history, self.compact_tools), self.window))
                # What trimming leaves may end with an answer, and no template takes that.
                if seen and seen[-1].role == "user":
                    yield seen, message.text
            history.append(message)


def compacted(history: Sequence[LoggedMessage], keep: int | None) -> list[LoggedMessage]:
    """Return the history with only the last `keep` tool results whole.

    A line on its length stands in place of each other one.
    """
    results = [place for place, message in enumerate(history) if message.tool]
    # results[:-0] is empty, so that keeping none is a case of its own.
    old = set(results if keep == 0 else results[:-keep]) if keep is not None else set[int]()
    line = "<tool_response>\n({} characters, left out)\n</tool_response>"
    return [
        replace(m, text=line.format(len(m.text))) if place in old else m
        for place, m in enumerate(history)
    ]


def windowed(history: Sequence[LoggedMessage], window: int) -> list[LoggedMessage]:
    """Return the system messages at the beginning and the last `window` messages (0: all).

    The last messages start with a user's, so they may be fewer than `window`.
    """
    start = next(
        (place for place, message in enumerate(history) if message.role != "system"), len(history)
    )
    tail = list(history[start:])
    if window and len(tail) > window:
        tail = tail[-window:]
        # Templates want a user's message first.
        while len(tail) > 1 and tail[0].role != "user":
            tail = tail[1:]

    return [*history[:start], *tail]


def _records(path: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    if path is None:
        lines = (
            files("dejakv.datasets")
            .joinpath("sessions.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        )
        yield from (
            (f"sessions.jsonl line {number}", json.loads(line))
            for number, line in enumerate(lines, 1)
        )
        return

    file = Path(path).expanduser()
    if not file.is_file():
        raise DatasetError(f"no file {path!r}: give JSON lines with 'messages' with --dataset-path")
    if file.suffix == ".jsonl":
        yield from json_lines(file)
        return

    content = read_json(file, "if it has JSON lines, name it .jsonl")
    listed = content if isinstance(content, list) else [content]
    if listed and all(isinstance(item, dict) and "role" in item for item in listed):
        listed = [{"messages": listed}]
    for number, item in enumerate(listed, 1):
        if not isinstance(item, dict):
            raise DatasetError(
                f"{file.name} item {number} is not an object: give a conversation as an object with"
                " 'messages'"
            )
        yield f"{file.name} item {number}", item
