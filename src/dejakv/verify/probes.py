"""Probes that a cache may confuse: pairs of requests that differ where a careless key does not."""

import base64
import random
import secrets
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dejakv.errors import InputError
from dejakv.verify.client import Body, RequestRefusedError, ServerClient

EDGES = (16, 32, 64, 128, 256, 48, 96, 512)
"""Tokens at which blocks of common sizes end."""

TEXT_KINDS: Mapping[str, str] = {
    "repeat": "the same prompt again, at block edges and long",
    "tail": "equal beginnings, other ends; the last or one word in the middle differs",
    "head": "other beginnings, equal ends",
    "cut": "the beginning of a prompt alone, cut at block edges",
    "grown": "a prompt that goes on",
    "turn": "a prompt that goes on behind the model's answer",
    "abort": "sent, broken off, sent again; and another end behind the broken one",
    "load": "many that can be confused, at once",
}
FIELD_KINDS: Mapping[str, str] = {
    "system": "equal text under another system prompt",
    "tools": "equal text with other tools",
    "picture": "equal text with another picture",
    "lora": "equal text for another model name of the server",
}
KINDS: Mapping[str, str] = {
    **TEXT_KINDS,
    **FIELD_KINDS,
    "salt": "equal text under another cache_salt",
    "evicted": "earlier probes again, after a flood of other prompts",
}
"""What is tried, with a line for the page."""

_WORDS = (
    "time year people way day man thing woman life child world school state family student group"
    " country problem hand part place case week company system program question work government"
    " number night point home water room mother area money story fact month lot right study book"
    " eye job word business issue side kind head house service friend father power hour game line"
    " end member law car city community name president team minute idea body information back"
    " parent face others level office door health person art war history party result change"
    " morning reason research girl guy moment air teacher force education"
).split()
_GROUP = 8
_CUE = 4


class ProbeWriter:
    """Writes prompts of random words, of a length in tokens where the server counts them.

    Attributes
    ----------
    words : list[str]
        Words of a token each, as far as the server says.
    base_tokens : int
        Tokens of a prompt without its words.
    longest : int
        Words of the longest prompt that fits; before `calibrate` its tokens.
    counted : bool
        Whether lengths are in tokens; else in words.
    """

    def __init__(self, rng: random.Random, client: ServerClient) -> None:
        self.rng, self._client = rng, client
        self.words = list(_WORDS)
        self.base_tokens, self.counted = 0, False
        entry = next((each for each in client.listed if each.get("id") == client.model), {})
        context = entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx")
        self.longest = max(int(context or 2048) - client.settings.answer_tokens - 64, 64)

    def calibrate(self, map_all: Callable[..., Iterable[int | None]] = map) -> None:
        """Keep the words that are one token each, and count the tokens around them.

        A server that does not count tokens leaves all as it is.

        Parameters
        ----------
        map_all : callable
            `map`, or that of a pool.
        """
        starts = range(0, len(_WORDS) - _GROUP + 1, _GROUP)
        groups = [_WORDS[start : start + _GROUP] for start in starts]
        once = self._tokens_of(groups[0])
        if once is None:
            return
        counts = [once, *map_all(self._tokens_of, groups[1:])]

        known = [count for count in counts if count is not None]
        least = min(known)
        single = [
            word
            for group, count in zip(groups, counts, strict=True)
            if count == least
            for word in group
        ]
        twice = self._tokens_of([*groups[0], *groups[0]])
        if twice is None:
            return
        self.base_tokens = 2 * once - twice
        # By the words with most tokens: a prompt that does not fit is refused.
        self.longest = self.longest * _GROUP // max(max(known) - self.base_tokens, _GROUP)
        # The least of all groups may still be more than a token for each word.
        if len(single) >= 2 * _GROUP and least == self.base_tokens + _GROUP:
            self.words, self.counted = single, True

    def _tokens_of(self, words: Sequence[str]) -> int | None:
        return self._client.ask({**self.plain(" ".join(words)), **self.one_token()}).prompt_tokens

    def one_token(self) -> Body:
        """Return the fields of a request for one token."""
        fields = self._client.routes[self.text_route]
        name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        return {name: 1}

    @property
    def text_route(self) -> str:
        """Route of plain text: completions, if the server has them."""
        return "prompt" if "prompt" in self._client.routes else "messages"

    def words_of(self, count: int) -> list[str]:
        """Return so many random words of the writer's seed, at least one."""
        return self.rng.choices(self.words, k=max(count, 1))

    def text(self, count: int) -> str:
        """Return so many random words as a text."""
        return " ".join(self.words_of(count))

    def recited(self, count: int) -> str:
        """Return `count` random words that end with a repeat of `_CUE` earlier ones.

        A model tends to continue as after the first occurrence, so its answer depends on the state
        there. Texts of fewer than twice `_CUE` words repeat fewer.
        """
        words = self.words_of(count - _CUE)
        place = self.rng.randrange(min(_CUE, len(words) - 1), len(words))
        return " ".join([*words, *words[max(place - _CUE, 0) : place]])

    def edge(self) -> int:
        """Return how many words make a prompt end at a block's edge, or one token beside it."""
        edges = [edge for edge in EDGES if edge < self.longest - 80] or [16]
        return max(self.rng.choice(edges) + self.rng.choice((-1, 0, 1)) - self.base_tokens, 4)

    def plain(self, text: str) -> Body:
        """Return a probe with a text alone."""
        # The first word of a text has no space before it, and may be another token.
        text = f"A {text}"
        return {"prompt": text} if self.text_route == "prompt" else self.chat(text)

    def chat(self, text: str, system: str = "", picture: bytes | None = None) -> Body:
        """Return a chat of one turn."""
        content: Any = text
        if picture is not None:
            url = "data:image/png;base64," + base64.b64encode(picture).decode()
            content = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": text},
            ]
        instruction = [{"role": "system", "content": system}] if system else []
        return {"messages": [*instruction, {"role": "user", "content": content}]}

    def pair(self, kind: str, turn: int, models: Sequence[str] = ()) -> tuple[Body, Body]:
        """Return two probes that a cache may take for each other.

        Parameters
        ----------
        kind : str
            One of `KINDS` that compares two prompts.
        turn : int
            Number of the round: forms and orders alternate.
        models : sequence of str
            Other model names of the server, for `lora`.
        """
        first, second = self._pair(kind, turn, models)
        # In both orders: a cache in which the first writer wins corrupts the second alone.
        return (second, first) if turn % 2 and kind not in ("cut", "grown") else (first, second)

    def _pair(self, kind: str, turn: int, models: Sequence[str]) -> tuple[Body, Body]:
        text, other = self.text(self.edge()), self.text(40)
        if kind == "tail":
            return self._tails()
        if kind == "head":
            opening, heads = self.text(_CUE), (self.text(16), self.text(16))
            first, second = (self.plain(f"{opening} {head} {text} {opening}") for head in heads)
            return first, second
        if kind in ("cut", "grown"):
            text = self.recited(self.edge())
            short, long = self.plain(text), self.plain(f"{text} {other}")
            return (long, short) if kind == "cut" else (short, long)
        if kind == "system":
            opening, systems = self.text(_CUE), (self.text(20), self.text(20))
            first, second = (
                self.chat(f"{text} {opening}", f"{opening} {system}") for system in systems
            )
            return first, second
        if kind == "picture":
            return self.chat(text, picture=self.picture()), self.chat(text, picture=self.picture())
        if kind == "tools":
            return self._with_tool(text), self._with_tool(text)
        text = self.recited(self.edge())
        return self.plain(text), {**self.plain(text), "model": models[turn // 2 % len(models)]}

    def _tails(self) -> tuple[Body, Body]:
        """Return prompts that part at a block's edge or within a block."""
        # Where a block begins, ends, and in its middle: a key may see a part of it alone.
        common = self.words_of(self.edge() + self.rng.choice((0, self.rng.randrange(1, 16))))
        tail, form = self.words_of(36), self.rng.randrange(3)
        other, cue = self.words_of(36), common[-_CUE:]
        if form == 1:  # the last word of the tail alone
            other, cue = [*tail[:-1], self._unlike(tail[-1])], tail[-1 - _CUE : -1]
        elif form == 2:  # the word at the edge alone
            other = [self._unlike(tail[0]), *tail[1:]]
        first, second = (self.plain(" ".join([*common, *end, *cue])) for end in (tail, other))
        return first, second

    def _unlike(self, word: str) -> str:
        return self.rng.choice([other for other in self.words if other != word])

    def _with_tool(self, text: str) -> Body:
        function = {
            "name": f"look_up_{self.rng.randrange(10**6)}",
            "description": self.text(12),
            "parameters": {"type": "object", "properties": {"of": {"type": "string"}}},
        }
        tools = [{"type": "function", "function": function}]
        return {**self.chat(text), "tools": tools, "tool_choice": "none"}

    def picture(self, side: int = 64) -> bytes:
        """Return a PNG of `side` x `side` pixels with four fields in random colours."""
        colours = [bytes(self.rng.randrange(256) for _ in range(3)) for _ in range(4)]
        half = side // 2
        rows = [b"\0" + colours[pair] * half + colours[pair + 1] * half for pair in (0, 2)]
        parts = (
            (b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)),
            (b"IDAT", zlib.compress(b"".join(row * half for row in rows))),
            (b"IEND", b""),
        )
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
            for name, data in parts
        )


def related_models(client: ServerClient) -> list[str]:
    """Return the server's other names of the same model: its LoRA adapters, and their base."""
    entry = next((each for each in client.listed if each.get("id") == client.model), {})
    base = entry.get("parent") or client.model
    return [
        str(each["id"])
        for each in client.listed
        if each.get("id") != client.model and base in (each.get("parent"), each.get("id"))
    ]


class FreshWay:
    """A way to have a prompt computed without any cache.

    Attributes
    ----------
    name : str
        Name of the field that does it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def fields(self) -> Body:
        """Return the fields of one request; a salt is new each time."""
        if self.name == "cache_salt":
            # Never from the seed: another run with it would find what this one left.
            return {"cache_salt": f"verify-{secrets.token_hex(8)}"}
        if self.name == "dejakv":
            return {"dejakv": {"no_cache": True}}
        return {"cache_prompt": False}


_WRONG_VALUES: Mapping[str, Body] = {
    "cache_salt": {"cache_salt": 7},
    "dejakv": {"dejakv": {"no_cache": "no such value"}},
}


def find_fresh_way(client: ServerClient, writer: ProbeWriter) -> FreshWay | None:
    """Find out how this server computes a known prompt anew; None if no way is known.

    A field counts if the server refuses a wrong value of it, or if its count of cached tokens shows
    an effect: many servers take unknown fields and ignore them.
    """
    for name in ("cache_salt", "dejakv", "cache_prompt"):
        way = FreshWay(name)
        probe = {**writer.plain(writer.text(min(300, writer.longest))), **writer.one_token()}
        try:
            client.ask({**probe, **way.fields()})
            if name in _WRONG_VALUES and _refuses(client, {**probe, **_WRONG_VALUES[name]}):
                return way
            client.ask(probe)
            cached = client.ask(probe).cached_tokens
            anew = client.ask({**probe, **way.fields()}).cached_tokens
        except RequestRefusedError:
            continue
        if cached and anew is not None and anew < cached / 2:
            return way
    return None


def _refuses(client: ServerClient, probe: Body) -> bool:
    try:
        client.ask(probe)
    except InputError:  # a 400, or a 500 of a server that does not check what it gets
        return True
    return False
