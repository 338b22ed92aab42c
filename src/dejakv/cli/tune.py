"""`dejakv tune`: settings from a log of prompts."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dejakv.config import SemanticCacheConfig
from dejakv.presets import SHARES_MODEL


def tune_command(
    prompts: Annotated[
        Path,
        typer.Option(
            help="JSON lines with prompt, question or messages and, if known, answer; in the order of the log."
        ),
    ],
    max_false_hits: Annotated[
        float, typer.Option(help="Largest share of approximate hits that may be wrong, above 0 and up to 1.")
    ] = 0.01,
    label_with: Annotated[
        str | None, typer.Option(help="Model whose answers count as right (default: the answers in the log).")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model whose tokenizer reads the prompts and whose embeddings compare them.")
    ] = SHARES_MODEL,
    index_encoder: Annotated[
        str,
        typer.Option(
            help="What compares texts: sentence-transformers name or folder, or model: the model's own embeddings."
        ),
    ] = "model",
    chunk_source: Annotated[
        str, typer.Option(help="Text that is compared: question, prompt or a field of the lines.")
    ] = "question",
    raw_prompts: Annotated[
        bool, typer.Option("--raw-prompts", help="Read the field 'prompt' as it stands, without a chat template.")
    ] = False,
    min_gain: Annotated[
        int, typer.Option(min=0, help="Fewest tokens that a hit must save beyond the exact prefix.")
    ] = SemanticCacheConfig.min_gain,
    max_samples: Annotated[int, typer.Option(min=1, help="Prompts to read.")] = 2000,
    output: Annotated[Path | None, typer.Option(help="New folder for tune.json, which `dejakv report` reads.")] = None,
) -> None:
    """Recommend settings for a log of prompts: what reuse would save, and how often it would be wrong; nothing is answered."""
    from rich.console import Console

    from dejakv.cli.progress import watching
    from dejakv.experiments.output import make_folder, replace_file
    from dejakv.experiments.overwrite import refuse_existing
    from dejakv.experiments.tune.run import tune
    from dejakv.experiments.tune.table import show

    if output is not None:
        refuse_existing(output / "tune.json", "the tuning")
        make_folder(output)
    with watching(Console(stderr=True)) as watch:
        result = tune(
            prompts, model, max_false_hits=max_false_hits, label_with=label_with, index_encoder=index_encoder,
            chunk_source=chunk_source, raw_prompts=raw_prompts, max_samples=max_samples, min_gain=min_gain, watch=watch,
        )  # fmt: skip
    show(result, Console())
    if output is not None:
        replace_file(output / "tune.json", json.dumps(result, indent=2) + "\n", "--output")
        typer.echo(f"written to {output}: tune.json")
