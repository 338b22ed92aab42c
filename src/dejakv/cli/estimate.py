"""`dejakv estimate`: does reuse pay for a log of prompts?"""

import json
from pathlib import Path
from typing import Annotated

import typer

from dejakv.config import SemanticCacheConfig
from dejakv.experiments.settings import SHARES_MODEL


def estimate_command(
    log: Annotated[
        str,
        typer.Argument(
            help="JSON lines with prompt, question or messages and, if known, answer, in the order of the log; or the name of a data set."
        ),
    ],
    max_false_hits: Annotated[
        float, typer.Option(help="Largest share of wrong answers among approximate hits, above 0 and up to 1.")
    ] = 0.01,
    label_with: Annotated[
        str | None, typer.Option(help="Model that gives the right answers (default: the answers in the log).")
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model of the tokenizer, and of embeddings for --index-encoder model.")
    ] = SHARES_MODEL,
    index_encoder: Annotated[
        str,
        typer.Option(help="Text encoder: sentence-transformers name or folder, or model: the model's own embeddings."),
    ] = "model",
    chunk_source: Annotated[
        str, typer.Option(help="Text to compare: question, prompt or a field of the lines.")
    ] = "question",
    raw_prompts: Annotated[
        bool, typer.Option("--raw-prompts", help="Read the field 'prompt' as it stands, without a chat template.")
    ] = False,
    min_gain: Annotated[
        int, typer.Option(min=0, help="Least tokens for a hit to save beyond the exact prefix.")
    ] = SemanticCacheConfig.min_gain,
    max_samples: Annotated[int, typer.Option(min=1, help="Prompts to read.")] = 2000,
    output: Annotated[
        Path | None, typer.Option(help="New folder for estimate.json, which `dejakv report` reads.")
    ] = None,
) -> None:
    """Estimate from a log of prompts whether reuse pays: repeated text, hits and wrong hits of each setting, recommended settings, and
    the command to prove them. Nothing is answered."""
    from rich.console import Console

    from dejakv.cli.progress import watching
    from dejakv.experiments.advice import show
    from dejakv.experiments.estimate import estimate
    from dejakv.experiments.output import make_folder, refuse_existing, replace_file

    if output is not None:
        refuse_existing(output / "estimate.json", "the estimate")
        make_folder(output)
    with watching(Console(stderr=True)) as watch:
        result = estimate(
            log, model, max_false_hits=max_false_hits, label_with=label_with, index_encoder=index_encoder,
            chunk_source=chunk_source, raw_prompts=raw_prompts, max_samples=max_samples, min_gain=min_gain,
            watch=watch,
        )  # fmt: skip
    show(result, Console())
    if output is not None:
        replace_file(output / "estimate.json", json.dumps(result, indent=2) + "\n", "--output")
        typer.echo(f"written to {output}: estimate.json")
