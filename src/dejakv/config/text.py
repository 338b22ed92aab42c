"""Settings of likeness and equality of text: what proposes a donor, and the guard that judges its words."""

from dataclasses import dataclass

from dejakv.settings import Cosine, Count

DEFAULT_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
SIMILARITY_THRESHOLD = 0.85
"""Least cosine of a level that is given none."""


@dataclass(frozen=True)
class TextSettings:
    """How prompts with other words are found and judged, by the cache and by vLLM's connector.

    similarity_threshold  least cosine of the semantic text level, [-1, 1]
    index_encoder         sentence-transformers name or folder; `model`: the served model's own input embeddings
    encoder_threads       threads of a sentence encoder in a process of its own, so that it does not hold this one's interpreter; 0:
                          it runs in this process, on one thread
    chunk_window          characters of the chunk that are embedded; 0 embeds all of it
    copied_text           blend looks for runs of tokens that stand in stored prompts, at whatever place
    lexical_guard         veto on other content words, numbers, polarity or question type
    """

    similarity_threshold: Cosine = SIMILARITY_THRESHOLD
    index_encoder: str = DEFAULT_ENCODER
    encoder_threads: Count = 0
    chunk_window: Count = 0
    copied_text: bool = True
    lexical_guard: bool = True
