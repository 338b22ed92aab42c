"""Shares of a run's prompts that occurred before (`dejakv.shares`): with every run, or alone, from a tokenizer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dejakv import __version__
from dejakv.datasets.base import Sample
from dejakv.engines.base import Prepared
from dejakv.errors import InputError, ModelError
from dejakv.experiments.prompting import Prompter
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.watch import Watch
from dejakv.models import RECIPES, fetched, resolve, tokenizer_folder
from dejakv.models.gguf import SUFFIX, load_gguf_tokenizer
from dejakv.part_order import SeenPrompts, arranged
from dejakv.request import Request
from dejakv.shares import Share, Shares


def share_figures(total: Share, complete: bool = True) -> dict[str, Any]:
    """`share_prefix` and `share_anywhere` for a summary, [0, 1]; `shares_complete` if a table became full."""
    figures: dict[str, Any] = {"share_prefix": total.share_prefix, "share_anywhere": total.share_anywhere}
    return figures if complete else {**figures, "shares_complete": False}


def measured(chosen: Sequence[Sample], prompter: Prompter, prepare: Callable[[Request], Prepared]) -> dict[str, Any]:
    """The shares of a run's prompts, in its order."""
    shares = Shares()
    for sample in chosen:
        prepared = prepare(prompter.request(sample))
        shares.add(prepared.token_ids, prepared.request.partition, prepared.spans)
    return share_figures(shares.total, shares.complete)


def model_is_missing(settings: RunSettings) -> bool:
    """Whether the model can be fetched and is not: its tokenizer ships with the package anyway."""
    return any(item.recipe.name == settings.model and item.state != "ready" for item in fetched())


def shares_alone(
    settings: RunSettings, chosen: Sequence[Sample], watch: Watch
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary and a line a sample of a run without a model: the shares, and no look-ups.

    Raises: InputError for samples with pictures, whose tokens depend on the model; ModelError for a missing tokenizer.
    """
    tokenizer = tokenizer_of(settings)
    prompter = Prompter(tokenizer, settings.prompt_template, settings.chunk_source, raw=settings.raw_prompts)
    shares, seen = Shares(), SeenPrompts()
    lines: list[dict[str, Any]] = []

    def tokenize(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for number, sample in enumerate(chosen, 1):
        if sample.media:
            raise InputError(f"sample {sample.id} has pictures: name an image-text model with --model")
        request = prompter.request(sample)
        if request.order == "free":
            request = arranged(request.frame, seen, tokenize, request.partition).of(request)
        ids = tokenize(request.prompt)
        seen.add(ids, request.partition)
        found = shares.add(ids, request.partition)
        lines.append({"id": sample.id, "question": sample.question, "answer": sample.answer, **vars(found)})
        watch.sample(number, len(chosen), None)
    summary = {
        "cache_mode": settings.cache_mode,
        "model": settings.model,
        "dataset": settings.dataset,
        "samples": len(lines),
        "prompt_tokens": shares.total.tokens,
        **share_figures(shares.total, shares.complete),
        "dejakv_version": __version__,
    }
    if settings.cache_mode == "dry-run":
        summary["warning"] = (
            f"the levels were not asked, for that the model must be here: {RECIPES[settings.model].command}"
        )
    return summary, lines


def tokenizer_of(settings: RunSettings) -> Any:
    """The tokenizer of a run's model, without its weights. Raises: ModelError."""
    from transformers import AutoTokenizer

    if settings.model in RECIPES:
        return AutoTokenizer.from_pretrained(tokenizer_folder(settings.model))
    found = resolve(settings.model)
    if isinstance(found, Path) and found.suffix == SUFFIX:
        return load_gguf_tokenizer(found)
    try:
        return AutoTokenizer.from_pretrained(str(found), trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{settings.model!r} has no tokenizer that can be loaded ({error}): give another --model"
        ) from error


def in_words(summary: dict[str, Any]) -> list[str]:
    """The shares as lines for a terminal."""
    prefix, anywhere = summary["share_prefix"], summary["share_anywhere"]
    lines = [
        f"tokens in prefix blocks of earlier prompts: {prefix:.1%} (prefix caching saves these at best)",
        f"tokens anywhere in earlier prompts: {anywhere:.1%} (in runs of 32 or more)",
        f"beyond prefix caching: {max(0.0, anywhere - prefix):.1%}, what reuse at any position can save at best",
    ]
    if not summary.get("shares_complete", True):
        lines.append("the prompts were too many to remember all: the share found anywhere is a lower bound")
    return lines
