"""Questions about pictures of simple things, as a stream with natural repetition. All of it is generated.

The pictures are scenes that the bundled model `shapes-vlm` was not trained on. Training draws from its own seeds.
"""

import random
from collections.abc import Iterator
from functools import lru_cache

from dejakv.datasets.base import Sample
from dejakv.datasets.shapes_language import Split
from dejakv.datasets.shapes_programs import KINDS
from dejakv.datasets.shapes_records import record
from dejakv.datasets.shapes_render import png, render
from dejakv.datasets.shapes_scene import GRID, MAX_THINGS
from dejakv.datasets.shapes_stream import Ask, Mix, Pictures, stream
from dejakv.errors import DatasetError
from dejakv.request import Media

IMAGE_TOKEN = "<image>"
ANSWER_TOKEN = "<|answer|>"


def prompt(question: str) -> str:
    """The prompt of shapes-vlm for a question: the picture's placeholder, the question, the cue to answer.

    It equals the model's chat template, rendered for one user message with a picture and the question.
    """
    return f"{IMAGE_TOKEN}{question}{ANSWER_TOKEN}"


class ShapesDataset:
    """Questions about generated pictures, each a `Sample` with one PNG and GQA's record in `fields`.

    seed, samples   seed and length of the stream (None: endless)
    images          pictures in the pool (default: one for six samples, at least 8)
    things          least and most things in a picture
    wordings        "seen" in shapes-vlm's training, "held-out" from it, or "all"
    kinds           kinds of questions, of `shapes_programs.KINDS`
    mix             shares of repeats of each kind in the stream

    Beside GQA's fields a record has the origin of its question: `origin` ("new", "exact", "paraphrase",
    "other-image", "near-duplicate"), `of` (id of the sample it repeats), `altered` (other case or spacing) and
    `reencoded` (other bytes, same pixels). Iterating twice gives the same samples.
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
        if samples is not None and samples < 1:
            raise DatasetError(f"shapes: samples must be 1 or more (or None for an endless stream), not {samples}")
        if images is not None and images < 1:
            raise DatasetError(f"shapes: images must be 1 or more, not {images}")
        least, most = things
        if most > GRID * GRID:
            raise DatasetError(
                f"shapes: a scene of {most} things is too crowded to draw, its grid has room for {GRID * GRID}: lower `things`"
            )
        if not 1 <= least <= most:
            raise DatasetError(f"shapes: things = {things}: give the least (1 or more) and the most in a picture")
        if wordings not in ("seen", "held-out", "all"):
            raise DatasetError(f"shapes: wordings is one of 'seen', 'held-out', 'all', not {wordings!r}")
        unknown = sorted(set(kinds) - set(KINDS))
        if unknown or not kinds:
            raise DatasetError(f"shapes: unknown kinds {unknown}: the kinds of questions are {', '.join(KINDS)}")
        self.wordings: Split = wordings
        self.seed, self.samples, self.kinds, self.mix = seed, samples, kinds, mix or Mix()
        count = images or max(8, (samples or 6000) // 6)
        self._pictures = Pictures(seed, count, things, self.mix.near_duplicate)

    def __iter__(self) -> Iterator[Sample]:
        asks = stream(self.seed, self._pictures, self.mix, self.wordings, self.kinds)
        encode = lru_cache(maxsize=256)(self._media)
        for place, ask in enumerate(asks):
            if self.samples is not None and place >= self.samples:
                return
            yield self._sample(place, ask, encode(ask.image, ask.reencoded))

    def __len__(self) -> int:
        """Number of samples; TypeError for an endless stream."""
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

    def _sample(self, place: int, ask: Ask, media: Media) -> Sample:
        scene = self._pictures.scene(ask.image)
        fields = record(self._image_id(ask.image), scene, ask.query, ask.wording, self.wordings)
        if ask.altered:
            fields["question"] = _alter_text(fields["question"], random.Random(f"{self.seed}-{place}"))
        fields["origin"] = ask.origin
        fields["of"] = None if ask.of is None else self._sample_id(ask.of)
        fields["altered"], fields["reencoded"] = ask.altered, ask.reencoded
        return Sample(self._sample_id(place), fields["question"], fields["answer"], (media,), fields=fields)


def _alter_text(question: str, rng: random.Random) -> str:
    """The same words in other case or spacing."""
    ways = (str.lower, str.upper, str.title, lambda q: "  ".join(q.split(" ")), lambda q: f" {q} ")
    return rng.choice(ways)(question)
