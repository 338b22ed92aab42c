"""Adopt: a similar earlier prompt is run in a request's place, and vLLM's own prefix cache has its state.

Nothing is injected, so nothing can be poisoned; the answer is the answer to the donor's prompt, and the provenance says so.
`Adopter` finds and judges donors; `AdoptingLLM` rewrites prompts for an offline `LLM`, `middleware` for the OpenAI server.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dejakv.build import build_guards, build_levels
from dejakv.config import DEFAULT_ENCODER, SemanticCacheConfig
from dejakv.engines.vllm.keys import partition_of
from dejakv.errors import ConfigError
from dejakv.guards.chain import judge
from dejakv.identity import digest_of
from dejakv.levels.base import Match, Query
from dejakv.promotion import Promotions
from dejakv.request import Request
from dejakv.store.base import ChunkMeta


@dataclass(frozen=True)
class Asked:
    """What is compared and what must be equal.

    text     the part that varies (the last user message, or the prompt)
    context  everything else that shapes the prompt, as one digest: earlier messages, media by content, model, tools
    """

    partition: str
    text: str
    context: str
    threshold: float | None = None
    donor: str | None = None
    no_store: bool = False

    @property
    def id(self) -> str:
        return digest_of("adopt", self.partition, self.context, self.text)[:40]


@dataclass(frozen=True)
class Provenance:
    """What the client is told. `method`: `adopt` or `none`; `score`: cosine, 1 for equal text."""

    method: str = "none"
    level: str = ""
    donor: str | None = None
    score: float | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"dejakv": asdict(self)}


class Adopter:
    """Earlier prompts, by what they say. Thread-safe. What differs in context, media or partition never meets.

    config       similarity_threshold, index_encoder, lexical_guard, chunk_window, min... as for the other engines
    max_donors   prompts remembered; the one used longest ago goes first
    embeddings   lends `embed_text` if `index_encoder` is `model`
    """

    def __init__(
        self, config: SemanticCacheConfig | None = None, max_donors: int = 10_000, embeddings: Any = None
    ) -> None:
        if max_donors < 1:
            raise ConfigError(f"max_donors={max_donors}: give 1 or more")
        self.config = config or SemanticCacheConfig(reuse="adopt", index_encoder=DEFAULT_ENCODER)
        self._levels = build_levels(self.config, embeddings)
        self._guards = build_guards(self.config, self._levels)
        self._donors: OrderedDict[str, Asked] = OrderedDict()
        self._promotions = Promotions()
        self._limit = max_donors
        self._lock = threading.Lock()

    def find(self, asked: Asked) -> tuple[str, Provenance]:
        """The text to run, and why. Never raises: an error is a miss with its reason."""
        try:
            return self._find(asked)
        except Exception as error:
            return asked.text, Provenance(reason=f"the lookup failed: {type(error).__name__}: {error}")

    def learn(self, asked: Asked, provenance: Provenance) -> None:
        """After the answer: a prompt that ran as it was becomes a donor, one that another stood in for does not."""
        if provenance.method == "adopt":
            self._promotions.note(asked.id, asked.partition)
            return
        if asked.no_store or not asked.text.strip() or asked.id in self._donors:
            return
        query = self._query(asked)
        for level in self._levels:
            level.add(asked.id, query)
        self._promotions.forget(asked.id)
        with self._lock:
            self._donors[asked.id] = asked
            gone = [self._donors.popitem(last=False)[0] for _ in range(len(self._donors) - self._limit)]
        for donor in gone:
            for level in self._levels:
                level.remove(donor)

    def __len__(self) -> int:
        return len(self._donors)

    def _find(self, asked: Asked) -> tuple[str, Provenance]:
        if asked.id in self._donors:
            return asked.text, Provenance(reason="this very prompt ran before: vLLM's prefix cache has it")
        if self._promotions.due(asked.id):
            return asked.text, Provenance(reason="promoted: served approximately before, exact from now on")
        if asked.donor is not None:
            return self._named(asked)
        query, reason = self._query(asked), "no donor"
        for level in self._levels:
            for match in level.search(query).matches:
                donor = self._donors.get(match.donor)
                if donor is None or (donor.partition, donor.context) != (asked.partition, asked.context):
                    continue
                if asked.threshold is not None and match.score < asked.threshold:
                    reason = f"score {match.score:.3f} is below the request's {asked.threshold:g}"
                    continue
                verdict = judge(self._guards, query.request, _meta(donor), match)
                if verdict.decision == "accept":
                    return self._taken(donor, match)
                reason = f"{verdict.guard}: {verdict.reason}"
        return asked.text, Provenance(reason=reason)

    def _named(self, asked: Asked) -> tuple[str, Provenance]:
        donor = self._donors.get(asked.donor or "")
        if donor is None or (donor.partition, donor.context) != (asked.partition, asked.context):
            return asked.text, Provenance(reason="the donor that the request names is not known in its partition")
        return self._taken(donor, Match(donor.id, "named", 1.0))

    def _taken(self, donor: Asked, match: Match) -> tuple[str, Provenance]:
        with self._lock:
            if donor.id in self._donors:
                self._donors.move_to_end(donor.id)
        return donor.text, Provenance("adopt", match.level, donor.id, match.score)

    @staticmethod
    def _query(asked: Asked) -> Query:
        request = Request(id=asked.id, prompt=asked.text, chunk=asked.text, partition=asked.partition)
        return Query(request, digest_of("space", asked.partition, asked.context)[:40])


class AdoptingLLM:
    """An offline `vllm.LLM` whose prompts are rewritten. Prompts are texts, or dictionaries with `prompt` and perhaps
    `multi_modal_data` and `cache_salt`; whatever else they are runs as it is.

        llm = AdoptingLLM(vllm.LLM(model), Adopter())
        for output in llm.generate(["What is the capital of France?"]):
            print(output.outputs[0].text, output.dejakv.method)
    """

    def __init__(self, llm: Any, adopter: Adopter) -> None:
        self.llm = llm
        self.adopter = adopter

    def generate(self, prompts: Sequence[Any], sampling_params: Any = None, **options: Any) -> list[Any]:
        """As `LLM.generate`; each output carries its `Provenance` as `output.dejakv`."""
        asked = [_asked(prompt) for prompt in prompts]
        rewritten: list[Any] = []
        notes: list[Provenance] = []
        for prompt, what in zip(prompts, asked, strict=True):
            if what is None:
                rewritten.append(prompt)
                notes.append(Provenance(reason="not a text prompt with media that can be told apart"))
                continue
            text, note = self.adopter.find(what)
            rewritten.append({**prompt, "prompt": text} if isinstance(prompt, Mapping) else text)
            notes.append(note)
        outputs = self.llm.generate(rewritten, sampling_params, **options)
        for output, what, note in zip(outputs, asked, notes, strict=True):
            if what is not None:
                self.adopter.learn(what, note)
            output.dejakv = note
        return outputs


def _asked(prompt: Any) -> Asked | None:
    if isinstance(prompt, str):
        return Asked(partition_of(None), prompt, digest_of())
    if not isinstance(prompt, Mapping) or not isinstance(prompt.get("prompt"), str):
        return None
    media = _media_digests(prompt.get("multi_modal_data") or {})
    if media is None:
        return None
    return Asked(partition_of(prompt.get("cache_salt")), prompt["prompt"], digest_of(*media))


def _media_digests(data: Mapping[str, Any]) -> list[str] | None:
    """Media by their pixels; None if there are some that are no pictures."""
    digests: list[str] = []
    for kind, items in data.items():
        for item in items if isinstance(items, list | tuple) else [items]:
            if kind != "image" or not hasattr(item, "tobytes") or not hasattr(item, "mode"):
                return None
            digests.append(digest_of(item.mode, str(item.size), item.tobytes()))
    return digests


def _meta(donor: Asked) -> ChunkMeta:
    return ChunkMeta(donor.id, donor.partition, "", (), donor.text, donor.text)
