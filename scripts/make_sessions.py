"""Writes src/dejakv/datasets/sessions.jsonl: conversations about DejaKV's own source, all of it under this repository's
licence. Run it again only to record another set: results that were published name the set they were made with.

    python scripts/make_sessions.py src/dejakv/datasets/sessions.jsonl

In half of them an agent reads code with tools. In the other half a user pastes a file, changes it and pastes it again, and
corrects an earlier message. Code and documentation are quoted; the sentences around them are made by a rule.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from dejakv.datasets.repo import CodeObject, Package, read_package

SESSIONS = 12
CODE, FILES = 1_300, 60
TOOLS = """You are a coding assistant for the Python project DejaKV. You read code with tools and answer in a few sentences.
Tools: read_object(name) returns the source of a class or function. find_calls(name) returns the lines of the project that call it.
list_files(folder) returns the files of a folder. Call a tool as <tool_call>{"name": ..., "arguments": ...}</tool_call>.
Never guess what code does: read it first. Name the file when you speak of a function. Some of the project's files:"""
REVIEW = """You review Python code. Explain what the code does, name mistakes and say how to mend them, briefly and in plain English.
If the code is given again after a change, speak of the change only. The rules of the project:"""
RULES = Path(__file__).parents[1] / "CONTRIBUTING.md"

Message = dict[str, Any]


def call(tool: str, **arguments: str) -> Message:
    """An assistant's message that is a tool call and no text, as agents log them."""
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": tool, "arguments": arguments}}]}


def shown(item: CodeObject) -> str:
    code = item.code if len(item.code) <= CODE else item.code[:CODE].rpartition("\n")[0] + "\n    ..."
    return f"# {item.file}\n{code}"


def said(item: CodeObject) -> str:
    doc = " ".join(item.doc.split()) or f"It is {item.kind} {item.short}, which has no documentation."
    return f"`{item.short}` in {item.file}: {doc[:400]}"


def agent(package: Package, _: random.Random, items: list[CodeObject]) -> list[Message]:
    """Questions about objects one after the other, each read and searched for; the first is asked about again at the end."""
    files = "\n".join(package.files[:: max(1, len(package.files) // FILES)])
    messages: list[Message] = [{"role": "system", "content": f"{TOOLS}\n{files}"}]
    for item in [*items, items[0]]:
        messages.append({"role": "user", "content": f"What does {item.short} do, and where is it used?"})
        messages += [call("read_object", name=item.name), {"role": "tool", "content": shown(item)}]
        users = [other for other in package.objects if item.short in other.calls and other.name != item.name][:4]
        lines = [
            f"{other.file}: {line.strip()}" for other in users for line in other.code.splitlines() if item.short in line
        ]
        messages += [call("find_calls", name=item.short), {"role": "tool", "content": "\n".join(lines[:10]) or "none"}]
        where = ", ".join(sorted({other.file for other in users})) or "nowhere else in the project"
        messages.append({"role": "assistant", "content": f"{said(item)} It is used in {where}."})
    return messages


def review(_: Package, rng: random.Random, items: list[CodeObject]) -> list[Message]:
    """Code pasted, changed and pasted again; then the first message is corrected, which moves all that follows."""
    rules = "\n".join(line for line in RULES.read_text(encoding="utf-8").splitlines() if line.startswith("- "))
    messages: list[Message] = [{"role": "system", "content": f"{REVIEW}\n{rules}"}]
    for item in items:
        code = shown(item)
        messages.append({"role": "user", "content": f"Please review this:\n{code}"})
        messages.append({"role": "assistant", "content": f"{said(item)} I see no mistake in it."})
        lines = code.splitlines()
        at = rng.randrange(2, max(3, len(lines) - 1))
        changed = [*lines[:at], "    # TODO: say why", *lines[at:]]
        messages.append({"role": "user", "content": "I changed it:\n" + "\n".join(changed)})
        messages.append({"role": "assistant", "content": f"Line {at + 1} is new: a comment that says nothing yet."})
        if item is items[0]:
            messages.append({"edit": 1, "content": f"Please review this, above all its names:\n{code}"})
    messages.append(
        {"role": "user", "content": f"Which of them would you rename, {items[0].short} or {items[-1].short}?"}
    )
    messages.append(
        {"role": "assistant", "content": f"Neither: {items[0].short} and {items[-1].short} say what they are."}
    )
    return messages


def main(target: Path) -> None:
    package = read_package("dejakv")
    rng = random.Random(11)
    good = [
        item
        for item in package.objects
        if 500 <= len(item.code) <= 2_500 and len(item.doc) > 60 and item.short[0] != "_"
    ]
    with target.open("w", encoding="utf-8") as file:
        for number in range(SESSIONS):
            make, count = (agent, 3) if number % 2 == 0 else (review, 3)
            messages = make(package, rng, rng.sample(good, count))
            file.write(json.dumps({"id": f"session-{number}", "messages": messages}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
