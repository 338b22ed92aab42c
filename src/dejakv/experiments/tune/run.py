"""`dejakv tune`: shares, every setting over the log, and the recommendation."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dejakv import __version__
from dejakv.config import SemanticCacheConfig
from dejakv.datasets.base import Sample
from dejakv.datasets.jsonl import JsonlDataset
from dejakv.datasets.registry import DatasetOptions, begin, samples, told
from dejakv.encoders.text import text_encoder
from dejakv.engines.base import Prepared
from dejakv.errors import ConfigError, DatasetError, InputError
from dejakv.experiments.prompting import Prompter
from dejakv.experiments.run import opened
from dejakv.experiments.settings import RunSettings
from dejakv.experiments.shares import model_is_missing, share_figures, tokenizer_of
from dejakv.experiments.tune.advice import labels_for, recommend
from dejakv.experiments.tune.labels import labelled_by
from dejakv.experiments.tune.measure import Asked, Remembering, measure, settings_to_try
from dejakv.experiments.watch import Silent, Watch
from dejakv.models import RECIPES
from dejakv.settings import shown
from dejakv.shares import Shares

_EPOCH = "tune"


def tune(
    path: Path,
    model: str,
    *,
    max_false_hits: float = 0.01,
    label_with: str | None = None,
    index_encoder: str = "model",
    chunk_source: str = "question",
    raw_prompts: bool = False,
    max_samples: int = 2000,
    min_gain: int = SemanticCacheConfig.min_gain,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """The figures of `tune.json`: the shares, a row a setting (see `measure`), and `recommended` (see `recommend`).

    model          whose tokenizer reads the prompts and, with `index_encoder="model"`, whose embeddings compare them
    label_with     model whose answers are taken as right, instead of those in the log
    raw_prompts    `prompt` is read as it stands, without the model's chat template

    Raises: DatasetError, ConfigError, InputError, ModelError, each naming what to change.
    """
    if not 0 < max_false_hits <= 1:
        raise ConfigError(
            f"--max-false-hits {shown(max_false_hits)}: give a share above 0, up to 1 (0.01 is one in a hundred)"
        )
    watch = watch or Silent()
    found: Sequence[Sample]
    found, more = begin(samples(JsonlDataset(path), DatasetOptions()), max_samples)
    if not found:
        raise DatasetError(f"the log {path.name!r} has no prompts: give a file with one request a line")
    pictured = next((sample for sample in found if sample.media), None)
    if pictured is not None:
        raise InputError(f"sample {pictured.id} has pictures: tune reads texts only; measure pictures with dejakv run")
    settings = RunSettings(model=model, chunk_source=chunk_source, raw_prompts=raw_prompts)
    if label_with is not None:
        found = labelled_by(label_with, found, watch, raw_prompts=raw_prompts)
    asked, shares = _asked(found, settings)
    encoder = None
    notes = told(str(path), len(found), more)
    if index_encoder != "model":
        encoder = Remembering(text_encoder(index_encoder))
    elif model_is_missing(settings):
        notes.append(f"similar texts were not compared, for that the model must be here: {RECIPES[model].command}")
    else:
        watch.stage(f"loading {model}")
        with opened(settings) as engine:
            encoder = Remembering(text_encoder("model", embed=engine.embed_text, fingerprint="tune"))
            encoder.encode_many([one.prepared.request.chunk for one in asked])
    watch.stage("asking the levels")
    tries = list(settings_to_try(encoder, min_gain))
    rows: list[dict[str, Any]] = []
    for number, setting in enumerate(tries, 1):
        rows.append(measure(asked, setting, encoder))
        watch.sample(number, len(tries), None)
    advice = recommend(rows, max_false_hits)
    total = shares.total
    return {
        "kind": "tune",
        "log": path.name,
        "samples": len(asked),
        "labelled": sum(one.answer is not None for one in asked),
        "labels": label_with or "the log's answers",
        "model": model,
        "index_encoder": index_encoder,
        "max_false_hits": max_false_hits,
        "min_gain": min_gain,
        "prompt_tokens": total.tokens,
        "tokens_prefix": total.prefix,
        "tokens_anywhere": total.anywhere,
        **share_figures(total, shares.complete),
        "rows": rows,
        "recommended": advice,
        "bound": labels_for(rows, len(asked), max_false_hits),
        "command": command(
            path,
            model,
            index_encoder,
            chunk_source,
            {**advice["settings"], "min_gain": min_gain},
            raw_prompts=raw_prompts,
        ),
        "notes": notes,
        "dejakv_version": __version__,
    }


def _asked(found: Sequence[Sample], settings: RunSettings) -> tuple[list[Asked], Shares]:
    tokenizer: Any = tokenizer_of(settings)
    prompter = Prompter(tokenizer, None, settings.chunk_source, raw=settings.raw_prompts)
    shares = Shares()
    asked: list[Asked] = []
    for sample in found:
        request = prompter.request(sample)
        ids = tuple(tokenizer(request.prompt, add_special_tokens=False)["input_ids"])
        shares.add(ids, request.partition)
        asked.append(Asked(Prepared(request, ids, epoch=_EPOCH), sample.answer))
    return asked, shares


def command(
    path: Path,
    model: str,
    index_encoder: str,
    chunk_source: str,
    settings: dict[str, Any],
    *,
    raw_prompts: bool = False,
) -> str:
    """The live run that proves the recommendation."""
    words = ["dejakv", "run", "--dataset", "jsonl", "--dataset-path", str(path), "--model", model]
    words += ["--reuse", settings["reuse"], "--chunk-source", chunk_source, *(["--raw-prompts"] if raw_prompts else [])]
    if "similarity_threshold" in settings:
        words += ["--index-encoder", index_encoder, "--similarity-threshold", str(settings["similarity_threshold"])]
    else:
        words.append("--disable-semantic-cache")
    if settings.get("lexical_guard") is False:
        words.append("--disable-lexical-guard")
    if settings["reuse"] != "exact" and settings["min_gain"] != SemanticCacheConfig.min_gain:
        words += ["--min-gain", str(settings["min_gain"])]
    return shlex.join(words)
