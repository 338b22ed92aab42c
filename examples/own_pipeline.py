"""Drive the hierarchy yourself: a picture model, and requests, a level and a guard of your own.

python examples/own_pipeline.py
"""

from dejakv import Pipeline, SemanticCacheConfig, TransformersEngine, VisualKVCache, build_cache
from dejakv.decide.guards.base import Guard, GuardVerdict
from dejakv.decide.levels.base import LevelSearch, Match, Query
from dejakv.request import Request, Sampling
from dejakv.store.base import StateInfo
from dejakv_models.shapes import ShapesDataset, prompt


class SameWords:
    """A level: a donor whose question has the same words in any order."""

    name = "same_words"
    status_names = ("same_words",)

    def __init__(self, _config: SemanticCacheConfig) -> None:
        self._donors: dict[tuple[str, frozenset[str]], str] = {}

    def search(self, query: Query) -> LevelSearch:
        donor = self._donors.get((query.space, _words(query.text)))
        matches = (Match(donor, self.name, 1.0),) if donor else ()
        return LevelSearch(matches, {self.name: "hit" if matches else "miss"})

    def add(self, donor: str, query: Query) -> None:
        self._donors[query.space, _words(query.text)] = donor

    def remove(self, donor: str) -> None:
        self._donors = {words: other for words, other in self._donors.items() if other != donor}

    def __len__(self) -> int:
        return len(self._donors)


class NoShortQuestions(Guard):
    """A guard: a question of fewer than four words says too little to be matched."""

    name = "no_short_questions"

    def judge(self, request: Request, donor: StateInfo, match: Match) -> GuardVerdict:
        if len(request.chunk.split()) < 4:
            return GuardVerdict("reject", self.name, "fewer than four words")
        return GuardVerdict("accept", self.name, "long enough")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.lower().strip(" ?.").split())


def main() -> None:
    engine = TransformersEngine.from_pretrained("shapes-vlm", encoder_cache=VisualKVCache())
    config = SemanticCacheConfig(
        reuse="adopt", index_encoder="model", similarity_threshold=0.5, min_gain=1
    )
    cache = build_cache(config, engine, levels=[SameWords(config)], guards=[NoShortQuestions()])
    pipeline = Pipeline(engine, cache)
    for sample in ShapesDataset(samples=40, images=4):
        request = Request(
            sample.id, prompt(sample.question), sample.question, sample.media, sampling=Sampling(4)
        )
        answer = pipeline.answer(request)
        record = answer.record
        print(
            f"{record.provenance:24} {record.computed_tokens:3} tokens  {sample.question} "
            f"{answer.text} ({sample.answer})"
        )
    counts = cache.stats("default")
    print(f"{counts.lookups} lookups, hits {counts.hits}, rejected by {counts.rejections}")
    cache.close()


if __name__ == "__main__":
    main()
