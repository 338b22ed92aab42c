"""Rules that make equal prefixes of requests that say the same.

    rewriter = PrefixStabilizer(("tools", "keys"))
    rewritten = rewriter.rewrite(body)   # .body, .changed, .reason

A rule moves texts as they are written, and writes nothing of its own but line feeds. A body that it
does not know in full is passed on byte for byte.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from cachetools import FIFOCache

from dejakv.errors import ConfigError, InputError
from dejakv.stabilize.chat_body import MARK, ChatBody, read_chat_body, texts_of
from dejakv.stabilize.spans import Span, splice, written
from dejakv.stabilize.volatile import move_volatile, tagged_blocks
from dejakv.store.forks import fork_safe_lock

RULES: Mapping[str, tuple[str, bool]] = {
    "keys": (
        "JSON keys of tools and of `response_format` in alphabetical order, but for the names of a"
        " schema's properties",
        True,
    ),
    "tools": ("definitions of tools in alphabetical order of their names", True),
    "properties": (
        "the names of a schema's properties too; a grammar writes arguments in their order",
        False,
    ),
    "volatile": (
        "dates, counters and reminders, on lines of their own, moved behind the last message of a"
        " user or a tool",
        False,
    ),
    "passages": (
        "neighbouring passages in tags (`<document>`, `<passage>`, ...) in the order in which an"
        " earlier request of the same client had them",
        False,
    ),
}
"""Rules by name: what each does, and whether it acts by default. They are applied in this order."""

DEFAULT_RULES = tuple(name for name, (_, by_default) in RULES.items() if by_default)

PASSAGES = (
    "document", "doc", "passage", "source", "chunk", "snippet", "search_result", "context",
)  # fmt: skip
"""Tags of passages."""

MAX_PASSAGES = 200_000
"""Passages, each behind what stood before it, whose order is remembered."""

MAX_PASSAGES_OF_BODY = 1000
"""Passages of one body whose order may change; further runs of them stay as they are."""

_NAMES = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keys of a schema whose objects have names of the user's for keys."""


@dataclass(frozen=True)
class Rewritten:
    """A body after the rules.

    Attributes
    ----------
    body : bytes
        The body to send; the very one that came if nothing was changed.
    given, text : str
        Names and texts of the prompt as it came and as it is sent; empty for an unknown body.
    changed : tuple[str, ...]
        Rules that changed something.
    reason : str
        What is not known of the body; empty if it is known.
    """

    body: bytes
    given: str = ""
    text: str = ""
    changed: tuple[str, ...] = ()
    reason: str = ""


def check_rules(rules: Iterable[str]) -> set[str]:
    """Return rules as a set; a ConfigError names what is none."""
    wanted = set(rules)
    if unknown := wanted - RULES.keys():
        raise ConfigError(f"there is no rule {min(unknown)!r}: give some of {', '.join(RULES)}")
    return wanted


class PrefixStabilizer:
    """Rules with the memory that `passages` needs. Thread-safe.

    Parameters
    ----------
    rules : Iterable[str]
        Names of `RULES`.

    Raises
    ------
    ConfigError
        For a name that is no rule.
    """

    def __init__(self, rules: Iterable[str] = DEFAULT_RULES) -> None:
        wanted = check_rules(rules)
        self.rules = tuple(name for name in RULES if name in wanted)
        self._orders = PassageOrders()

    def rewrite(self, raw: bytes, partition: str = "", *, remember: bool = True) -> Rewritten:
        """Apply the rules to a request's body.

        Parameters
        ----------
        raw : bytes
            The body, as it came.
        partition : str
            Whose request it is: passages are compared within a partition.
        remember : bool
            Whether the order of its passages is remembered.
        """
        steps: Mapping[str, Any] = {
            "keys": partial(sort_keys, names=False),
            "tools": sort_tools,
            "properties": partial(sort_keys, names=True),
            "volatile": move_volatile,
            "passages": partial(self._orders.arrange, partition=partition, remember=remember),
        }
        try:
            body = read_chat_body(raw)
            given, changed = body.prompt_text(), list[str]()
            for name in self.rules:
                text = steps[name](body)
                if text != body.text:
                    changed.append(name)
                    body = read_chat_body(text.encode())
        except InputError as error:
            return Rewritten(raw, reason=str(error))
        except RecursionError:
            return Rewritten(raw, reason="the body is nested too deep")

        if not changed:
            return Rewritten(raw, given, given)
        return Rewritten(body.text.encode(), given, body.prompt_text(), tuple(changed))


def sort_tools(body: ChatBody) -> str:
    """Return the body's text with its tools in alphabetical order, between marks.

    A marked tool keeps its place, so that the mark ends the same tools.
    """
    tools = body.tools
    ordered, between = list[str](), list[str]()
    for name, tool in tools.items():
        if MARK in tool.value:
            ordered += (*sorted(between), name)
            between.clear()
        else:
            between.append(name)
    return splice(
        body.text,
        [
            (slot.begin, slot.end, body.text[tools[name].begin : tools[name].end])
            for slot, name in zip(tools.values(), [*ordered, *sorted(between)], strict=True)
        ],
    )


def sort_keys(body: ChatBody, *, names: bool) -> str:
    """Return the body's text with the keys of tools and of `response_format` sorted.

    Parameters
    ----------
    body : ChatBody
        The body.
    names : bool
        Sort the names of properties, and not the other keys.
    """
    spans = [
        body.root.value[name] for name in ("tools", "response_format") if name in body.root.value
    ]
    return splice(
        body.text,
        [(span.begin, span.end, _sorted(body.text, span, names, named=False)) for span in spans],
    )


def _sorted(text: str, span: Span, names: bool, *, named: bool) -> str:
    """Return the text of a value with its keys sorted.

    `named` tells that its keys are names of the user's.
    """
    inner: dict[Any, str]
    if isinstance(span.value, dict):
        fields: dict[str, Span] = span.value
        inner = {
            name: text[field.key : field.begin]
            + _sorted(text, field, names, named=not named and name in _NAMES)
            for name, field in fields.items()
        }
        order = sorted(inner) if named is names else list(inner)
        slots = [(field.key, field.end) for field in fields.values()]
    elif isinstance(span.value, list):
        items: list[Span] = span.value
        inner = {n: _sorted(text, item, names, named=False) for n, item in enumerate(items)}
        order, slots = list(inner), [(item.begin, item.end) for item in items]
    else:
        return text[span.begin : span.end]

    edits = [
        (begin - span.begin, end - span.begin, inner[name])
        for (begin, end), name in zip(slots, order, strict=True)
    ]
    return splice(text[span.begin : span.end], edits)


class PassageOrders:
    """Orders of passages in earlier requests, as hashes of each passage and of all before it."""

    def __init__(self) -> None:
        self._seen: FIFOCache[bytes, None] = FIFOCache(MAX_PASSAGES)
        self._lock = fork_safe_lock()

    def arrange(self, body: ChatBody, partition: str, *, remember: bool) -> str:
        """Return the body's text with its passages in the order of earlier ones.

        Those that came before behind the same text come first, as they came; the others follow in
        the order given.
        """
        chain = _link(b"", partition.encode("utf-8", "surrogatepass"))
        edits: list[tuple[int, int, str]] = []
        left = MAX_PASSAGES_OF_BODY
        # In the order of the prompt, so that what stands before a passage has its final order.
        for name in ("tools", "system", "messages"):
            span: Span | None = body.root.value.get(name)
            for part in body.messages if name == "messages" else [span]:
                if part is None:
                    continue
                role = part.field("role") if name == "messages" else name
                content = part.value.get("content") if name == "messages" else part
                at = part.begin
                for text in texts_of(content) if role in ("system", "developer", "user") else ():
                    for slots in _runs(body.text, text):
                        if len(slots) > left:
                            continue
                        left -= len(slots)
                        chain = _link(chain, body.text[at : slots[0][0]].encode())
                        passages = [body.text[begin:end] for begin, end in slots]
                        chain, arranged = self._order(passages, chain, remember)
                        edits += [(*slot, new) for slot, new in zip(slots, arranged, strict=True)]
                        at = slots[-1][1]
                chain = _link(chain, body.text[at : part.end].encode())
        return splice(body.text, edits)

    def _order(
        self, passages: Sequence[str], chain: bytes, remember: bool
    ) -> tuple[bytes, list[str]]:
        """Return the hash of all up to the last passage, and the passages in their new order."""
        waiting = [(_link(b"", passage.encode()), passage) for passage in passages]
        arranged, new = list[str](), list[bytes]()
        while waiting:
            with self._lock:
                known = (
                    place
                    for place, (digest, _) in enumerate(waiting)
                    if chain + digest in self._seen
                )
                place = next(known, None)
            # Behind a new one nothing was seen.
            count = len(waiting) if place is None else 1
            for digest, passage in [waiting.pop(place or 0) for _ in range(count)]:
                new.append(chain + digest)
                chain = _link(chain, digest)
                arranged.append(passage)
        if remember:
            with self._lock:
                self._seen.update(dict.fromkeys(new))
        return chain, arranged


def _runs(text: str, span: Span) -> list[list[tuple[int, int]]]:
    """Return the places of passages in a string, by run.

    A run is two passages or more with nothing but space between them.
    """
    content = str(span.value)
    runs: list[list[tuple[int, int]]] = []
    end = 0
    for begin, block_end in tagged_blocks(content, PASSAGES):
        if not runs or content[end:begin].strip():
            runs.append([])
        runs[-1].append((begin, block_end))
        end = block_end
    runs = [run for run in runs if len(run) > 1]
    if not runs:
        return []

    lengths = map(len, written(text, span))
    starts = [span.begin + 1, *(span.begin + 1 + length for length in accumulate(lengths))]
    return [[(starts[begin], starts[end]) for begin, end in run] for run in runs]


def _link(chain: bytes, part: bytes) -> bytes:
    return hashlib.sha256(chain + part).digest()
