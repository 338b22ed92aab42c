"""Questions about pictures of simple things, as a stream with natural repetition.

All of it is generated.

The pictures are scenes that the bundled model `shapes-vlm` was not trained on. Training draws from
its own seeds.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from dejakv.datasets.base import Sample
from dejakv.errors import DatasetError
from dejakv.request import Media
from dejakv_models.shapes_language import Split
from dejakv_models.shapes_programs import (
    KINDS,
    TYPES,
    SceneQuestion,
    Wording,
    answer,
    find,
    record,
    sample,
    wordings,
)
from dejakv_models.shapes_scene import MAX_THINGS, Scene, alter, make_scene, png, render

Origin = Literal["new", "exact", "paraphrase", "other-image", "near-duplicate"]


@dataclass(frozen=True)
class Mix:
    """Shares of the stream, each 0 to 1. The rest asks something new about a picture.

    Attributes
    ----------
    exact : float
        The same words about the same picture again.
    paraphrase : float
        The same query about the same picture in other words.
    altered : float
        Share of the exact repeats in other case or spacing.
    recurring : float
        Share of new questions that were asked before about another picture, in the same words.
    near_duplicate : float
        Share of pictures that differ from another one in a single attribute of a single thing.
    reencoded : float
        Share of repeats whose picture has other bytes with the same pixels.
    zipf : float
        Exponent of the popularity of pictures and of questions; 0: all equally popular.
    """

    exact: float = 0.25
    paraphrase: float = 0.275
    altered: float = 0.4
    recurring: float = 0.25
    near_duplicate: float = 0.3
    reencoded: float = 0.1
    zipf: float = 1.0


@dataclass(frozen=True)
class PictureQuestion:
    """One question of the stream.

    `of` is the index in the stream of the question it repeats, and None for a new one.
    """

    image: int
    query: SceneQuestion
    wording: Wording
    origin: Origin
    of: int | None = None
    altered: bool = False
    reencoded: bool = False


class Pictures:
    """Pool of scenes, made when first asked for.

    The same seed gives the same scenes, and training never uses them.
    """

    def __init__(
        self, seed: int, count: int, things: tuple[int, int], near_duplicate: float
    ) -> None:
        self._seed, self.count, self._things, self._share = seed, count, things, near_duplicate
        self._made: dict[int, Scene] = {}
        self._kin: dict[int, list[int]] | None = None

    def twin(self, image: int) -> int | None:
        """Return the picture (a lower number) that this one nearly equals, if there is one."""
        rng = random.Random(f"shapes-{self._seed}-twin-{image}")
        if not image or rng.random() >= self._share:
            return None
        return int(
            image * rng.random() ** 2
        )  # low numbers are asked about most, so a pair is soon seen

    def kin(self, image: int) -> list[int]:
        """Return the near-duplicates of this picture: its twin, and pictures whose twin it is."""
        if self._kin is None:
            self._kin = {}
            for one in range(self.count):
                other = self.twin(one)
                if other is not None:
                    self._kin.setdefault(one, []).append(other)
                    self._kin.setdefault(other, []).append(one)
        return self._kin.get(image, [])

    def scene(self, image: int) -> Scene:
        """Return the scene of a picture."""
        if image not in self._made:
            rng = random.Random(f"shapes-{self._seed}-image-{image}")
            twin = self.twin(image)
            if twin is None:
                made = make_scene(rng, rng.randint(*self._things))
            else:
                base = self.scene(twin)
                made = alter(
                    base,
                    rng,
                    rng.randrange(len(base.things)),
                    rng.choice(("color", "shape", "size")),
                )
            self._made[image] = made
        return self._made[image]


class _Stream:
    """Endless stream of questions, the same for the same arguments."""

    def __init__(
        self, rng: random.Random, pictures: Pictures, mix: Mix, split: Split, kinds: tuple[str, ...]
    ) -> None:
        self._rng, self._pictures, self._mix, self._kinds = rng, pictures, mix, kinds
        self._split: Split = split
        self._asked: list[PictureQuestion] = []
        self._firsts: list[int] = []  # indices of new questions in the stream
        self._weights: list[float] = []  # their popularity, summed up
        self._said: dict[
            int, dict[SceneQuestion, list[int]]
        ] = {}  # indices in the stream, by picture and query
        self._popular = list(accumulate(self._weight(rank) for rank in range(pictures.count)))

    def run(self) -> Iterator[PictureQuestion]:
        """Yield the questions."""
        while True:
            ask = self._next()
            self._said.setdefault(ask.image, {}).setdefault(ask.query, []).append(len(self._asked))
            if ask.origin not in ("exact", "paraphrase"):
                self._weights.append(
                    (self._weights[-1] if self._weights else 0.0) + self._weight(len(self._firsts))
                )
                self._firsts.append(len(self._asked))
            self._asked.append(ask)
            yield ask

    def _weight(self, rank: int) -> float:
        return (rank + 1) ** -self._mix.zipf

    def _next(self) -> PictureQuestion:
        draw = self._rng.random()
        if self._firsts and draw < self._mix.exact:
            return self._again()
        if self._firsts and draw < self._mix.exact + self._mix.paraphrase:
            ask = self._in_other_words()
            if ask is not None:
                return ask
        return self._new()

    def _earlier(self) -> int:
        """Return the index of an earlier question, by Zipf over the order of first occurrence."""
        first = self._asked[self._rng.choices(self._firsts, cum_weights=self._weights)[0]]
        return self._rng.choice(self._said[first.image][first.query])

    def _again(self) -> PictureQuestion:
        place = self._earlier()
        old = self._asked[place]
        altered = self._rng.random() < self._mix.altered
        return PictureQuestion(
            old.image, old.query, old.wording, "exact", place, altered, self._copy()
        )

    def _in_other_words(self) -> PictureQuestion | None:
        for _ in range(8):
            place = self._earlier()
            old = self._asked[place]
            used = {self._asked[p].wording for p in self._said[old.image][old.query]}
            fresh = [w for w in wordings(old.query, self._split) if w not in used]
            if fresh:
                return PictureQuestion(
                    old.image,
                    old.query,
                    self._rng.choice(fresh),
                    "paraphrase",
                    place,
                    False,
                    self._copy(),
                )
        return None

    def _copy(self) -> bool:
        return self._rng.random() < self._mix.reencoded

    def _new(self) -> PictureQuestion:
        for _ in range(200):
            image = self._rng.choices(range(self._pictures.count), cum_weights=self._popular)[0]
            ask = self._of_twin(image) or self._recurring(image) or self._fresh(image)
            if ask is not None:
                return ask
        raise DatasetError(
            f"shapes: {self._pictures.count} pictures do not allow so many different questions: "
            "give more images, more things a picture, or a larger share of repeats"
        )

    def _of_twin(self, image: int) -> PictureQuestion | None:
        """Return a question asked about a near-duplicate, which has another answer here."""
        for kin in self._pictures.kin(image):
            for query, places in self._said.get(kin, {}).items():
                if self._fits(image, query) and self._differs(query, image, kin):
                    return PictureQuestion(
                        image, query, self._asked[places[0]].wording, "near-duplicate", places[0]
                    )
        return None

    def _differs(self, query: SceneQuestion, one: int, other: int) -> bool:
        return answer(query, self._pictures.scene(one)) != answer(
            query, self._pictures.scene(other)
        )

    def _recurring(self, image: int) -> PictureQuestion | None:
        if not self._firsts or self._rng.random() >= self._mix.recurring:
            return None
        place = self._rng.choice(self._firsts)
        old = self._asked[place]
        if old.image == image or not self._fits(image, old.query):
            return None
        return PictureQuestion(image, old.query, old.wording, "other-image", place)

    def _fits(self, image: int, query: SceneQuestion) -> bool:
        """Tell whether the query is new to the picture and has one answer there."""
        if query in self._said.get(image, {}):
            return False
        scene = self._pictures.scene(image)
        if query.kind in ("exist", "count"):
            return True
        found = [find(scene, r) for r in query.references]
        if any(len(f) != 1 for f in found) or len({f[0] for f in found}) != len(found):
            return False
        if query.kind in ("left", "right"):
            return scene.things[found[0][0]].column != scene.things[found[1][0]].column
        if query.kind in ("above", "below"):
            return scene.things[found[0][0]].row != scene.things[found[1][0]].row
        return True

    def _fresh(self, image: int) -> PictureQuestion | None:
        """Return a random query, if possible about a difference from the near-duplicates."""
        kin = self._pictures.kin(image)
        for attempt in range(12 if kin else 1):
            types = sorted({TYPES[k] for k in self._kinds})
            chosen = self._rng.choice(types)
            kind = self._rng.choice([k for k in self._kinds if TYPES[k] == chosen])
            query = sample(self._pictures.scene(image), self._rng, kind)
            if query is None or query in self._said.get(image, {}):
                continue
            apart = any(self._fits(k, query) and self._differs(query, image, k) for k in kin)
            if apart or attempt >= 8 or not kin:
                return PictureQuestion(
                    image, query, self._rng.choice(wordings(query, self._split)), "new"
                )
        return None


IMAGE_TOKEN = "<image>"
ANSWER_TOKEN = "<|answer|>"


def prompt(question: str) -> str:
    """Return the prompt of shapes-vlm for a question.

    It has the picture's placeholder, the question and the cue to answer, and equals the model's
    chat template, rendered for one user message with a picture and the question.
    """
    return f"{IMAGE_TOKEN}{question}{ANSWER_TOKEN}"


class ShapesDataset:
    """Questions about generated pictures.

    Each is a `Sample` with one PNG and GQA's record in `fields`. Beside GQA's fields a record has
    the origin of its question: `origin` ("new", "exact", "paraphrase", "other-image",
    "near-duplicate"), `of` (id of the sample it repeats), `altered` (other case or spacing) and
    `reencoded` (other bytes, same pixels). Iterating twice gives the same samples.

    Parameters
    ----------
    seed : int
        Seed of the stream.
    samples : int, optional
        Length of the stream; None: endless.
    images : int, optional
        Pictures in the pool; by default one for six samples, at least 8.
    things : tuple[int, int]
        Least and most things in a picture.
    wordings : Split
        "seen" in shapes-vlm's training, "held-out" from it, or "all".
    kinds : tuple[str, ...]
        Kinds of questions, of `shapes_programs.KINDS`.
    mix : Mix, optional
        Shares of repeats of each kind in the stream.
    """

    name = "shapes"

    def __init__(
        self,
        seed: int = 0,
        samples: int | None = 300,
        *,
        images: int | None = None,
        things: tuple[int, int] = (2, MAX_THINGS),
        wordings: Split = "all",
        kinds: tuple[str, ...] = KINDS,
        mix: Mix | None = None,
    ) -> None:
        if wordings not in ("seen", "held-out", "all"):
            raise DatasetError(
                f"shapes: wordings is one of 'seen', 'held-out', 'all', not {wordings!r}"
            )
        unknown = sorted(set(kinds) - set(KINDS))
        if unknown or not kinds:
            raise DatasetError(
                f"shapes: unknown kinds {unknown}: the kinds of questions are {', '.join(KINDS)}"
            )
        self.wordings: Split = wordings
        self.seed, self.samples, self.kinds, self.mix = seed, samples, kinds, mix or Mix()
        count = images or max(8, (samples or 6000) // 6)
        self._pictures = Pictures(seed, count, things, self.mix.near_duplicate)

    def __iter__(self) -> Iterator[Sample]:
        rng = random.Random(f"shapes-{self.seed}-stream")
        asks = _Stream(rng, self._pictures, self.mix, self.wordings, self.kinds).run()
        encode = lru_cache(maxsize=256)(self._media)
        for place, ask in enumerate(asks):
            if self.samples is not None and place >= self.samples:
                return
            yield self._sample(place, ask, encode(ask.image, ask.reencoded))

    def __len__(self) -> int:
        """Return the number of samples; a TypeError tells of an endless stream."""
        if self.samples is None:
            raise TypeError("an endless stream has no length")
        return self.samples

    def _image_id(self, image: int) -> str:
        return f"shapes-{self.seed}-{image}"

    def _media(self, image: int, reencoded: bool) -> Media:
        pixels = render(self._pictures.scene(image))
        name = self._image_id(image) + ("-copy.png" if reencoded else ".png")
        return Media(png(pixels, compression=1 if reencoded else 6), "image", name)

    def _sample_id(self, place: int) -> str:
        return f"shapes-{self.seed}-q{place:06d}"

    def _sample(self, place: int, ask: PictureQuestion, media: Media) -> Sample:
        scene = self._pictures.scene(ask.image)
        fields = record(self._image_id(ask.image), scene, ask.query, ask.wording)
        if ask.altered:
            fields["question"] = _alter_text(
                fields["question"], random.Random(f"{self.seed}-{place}")
            )
        fields["origin"] = ask.origin
        fields["of"] = None if ask.of is None else self._sample_id(ask.of)
        fields["altered"], fields["reencoded"] = ask.altered, ask.reencoded
        return Sample(
            self._sample_id(place), fields["question"], fields["answer"], (media,), fields=fields
        )


def _alter_text(question: str, rng: random.Random) -> str:
    """Return the same words in other case or spacing."""
    ways = (str.lower, str.upper, str.title, lambda q: "  ".join(q.split(" ")), lambda q: f" {q} ")
    return rng.choice(ways)(question)


def dataset(seed: int, samples: int | None) -> ShapesDataset:
    """Return the data set of `--dataset shapes`: 320 samples unless said otherwise.

    A picture has 13 questions as in GQA, whose balanced validation split asks 132,062 questions
    about 10,234 pictures.
    """
    count = samples or 320
    return ShapesDataset(seed=seed, samples=count, images=max(8, count // 13))
