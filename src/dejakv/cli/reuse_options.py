"""Options of reuse: who may stand in and how texts and pictures are compared, what a blend computes, and how often an answer may be wrong."""

from functools import partial
from typing import Annotated

import typer

from dejakv.config import SemanticCacheConfig
from dejakv.config.text import TextSettings
from dejakv.trust.settings import TrustSettings

_blend = partial(typer.Option, rich_help_panel="Blend")
_reuse = partial(typer.Option, rich_help_panel="Reuse")
_levels = partial(typer.Option, rich_help_panel="Finding a donor")
_bound = partial(typer.Option, rich_help_panel="Error bound")

BlendQuality = Annotated[
    str | None,
    _blend(
        help="strict (more rows computed, closer to full computation), default, or loose (fewer rows, faster; only for "
        f"prompts whose passages stay in place) (default: {SemanticCacheConfig.blend_quality})."
    ),
]
BlendMap = Annotated[
    str | None, _blend(help=f"Token map: context, embedding, lsh or align (default: {SemanticCacheConfig.blend_map}).")
]
BlendSelector = Annotated[
    str | None,
    _blend(
        help="How rows are ranked: value, kv, similarity, query, prophet or random (default: set by --blend-quality)."
    ),
]
BlendShare = Annotated[
    float | None, _blend(help="Share of rows to recompute, from 0 to 1 (default: set by --blend-quality).")
]
Costs = Annotated[
    str | None,
    _reuse(
        help="Seconds of a row, of a pair of tokens, of a byte loaded and of a token blended, with commas, for a run that "
        "chooses plans as another did (default: measured)."
    ),
]
Prune = Annotated[
    str | None,
    _reuse(
        help="Decode from the tokens that matter most: attention, snapkv or random (a control); approximate "
        f"(default: {SemanticCacheConfig.prune})."
    ),
]
IndexEncoder = Annotated[
    str | None, _levels(help="sentence-transformers name or folder, or model: the served model's own embeddings.")
]
EncoderThreads = Annotated[
    int | None,
    _levels(
        help="Threads of the semantic text level's sentence encoder, in a process of its own; 0: it runs in this process, on one "
        f"thread (default: {SemanticCacheConfig.encoder_threads})."
    ),
]
ImageEncoder = Annotated[
    str | None,
    _levels(
        help="Of the layer vision: CLIP model of sentence-transformers by name or folder, or model: the served model's own "
        "tower (default: CLIP if it can be loaded, else the tower)."
    ),
]
CrossEncoder = Annotated[
    str | None,
    _reuse(
        help="Hub name or folder of a model for pairs of texts (paraphrases, duplicates, entailment): donors in other words are accepted "
        "where it takes them for paraphrases. Numbers, units, negations, opposites and names stay vetoes."
    ),
]
ParaphraseThreshold = Annotated[
    float | None,
    _reuse(
        help=f"Least probability of a paraphrase that --cross-encoder gives (default: {TextSettings.paraphrase_threshold})."
    ),
]
ErrorBound = Annotated[
    float | None,
    _bound(
        help="Largest share of wrong answers among the approximate ones that are served, such as 0.01. Nothing approximate is served "
        "until labelled requests show that it holds. Without it there is no bound."
    ),
]
Confidence = Annotated[
    float | None, _bound(help=f"Probability that the bound holds (default: {TrustSettings.confidence}).")
]
ExploreShare = Annotated[
    float | None,
    _bound(
        help="Share of would-be hits that are computed both ways, to learn from, while they are not served "
        f"(default: {TrustSettings.explore_share})."
    ),
]
AuditShare = Annotated[
    float | None,
    _bound(
        help=f"Share of approximate answers that are computed in full as well, behind the answer (default: {TrustSettings.audit_share})."
    ),
]
Differs = Annotated[
    str | None,
    _bound(
        help="What a wrong answer is: first (another first token), answer, tool (another tool call), kl:NATS (such as kl:0.05), or "
        f"package.module:function; of greedy answers, whatever requests sample with (default: {TrustSettings.differs})."
    ),
]
TrustGroups = Annotated[
    list[str] | None,
    _bound(help="NAME=PARTITION,PARTITION: partitions that share evidence. May be given more than once."),
]
