"""`dejakv estimate`: whether reuse pays for a log of prompts."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dejakv.cli.options import echo, ray_option
from dejakv.config import SemanticCacheConfig
from dejakv.experiments.settings import SHARES_MODEL


def estimate_command(
    log: Annotated[
        str,
        typer.Argument(
            help=(
                "Log of requests: JSON lines of prompts or messages, vLLM's log of requests, an"
                " OpenAI batch file, an export of Langfuse, a log of LiteLLM, a trace of Mooncake"
                " or Azure; sample: a log that comes with DejaKV; or the name of a data set."
            )
        ),
    ],
    max_false_hits: Annotated[
        float,
        typer.Option(
            help="Largest share of wrong answers among approximate hits, above 0 and up to 1."
        ),
    ] = 0.01,
    label_with: Annotated[
        str | None,
        typer.Option(help="Model that gives the right answers (default: the answers in the log)."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=(
                "Model of the tokenizer, and of embeddings for --index-encoder model; given,"
                " seconds and bytes are estimated too "
                f"(default: {SHARES_MODEL}'s tokenizer)."
            )
        ),
    ] = None,
    index_encoder: Annotated[
        str,
        typer.Option(
            help=(
                "Text encoder: sentence-transformers name or folder, or model: the model's own"
                " embeddings."
            )
        ),
    ] = "model",
    chunk_source: Annotated[
        str, typer.Option(help="Text to compare: question, prompt or a field of the lines.")
    ] = "question",
    raw_prompts: Annotated[
        bool,
        typer.Option(
            "--raw-prompts", help="Read the field 'prompt' as it stands, without a chat template."
        ),
    ] = False,
    min_gain: Annotated[
        int, typer.Option(min=0, help="Least tokens for a hit to save beyond the exact prefix.")
    ] = SemanticCacheConfig.min_gain,
    max_samples: Annotated[int, typer.Option(min=1, help="Prompts to read.")] = 2000,
    output: Annotated[
        Path | None, typer.Option(help="New folder for estimate.json, which `dejakv report` reads.")
    ] = None,
    ray: Annotated[str | None, ray_option()] = None,
) -> None:
    """Estimate from a log of requests whether reuse pays: text that came again, where, when and
    whose, what exact reuse and blends would save, hits and wrong hits of similar prompts, and the
    command to prove it. Nothing is answered.
    """
    from rich.console import Console

    from dejakv.cli.progress import watching
    from dejakv.experiments.estimate import estimate
    from dejakv.experiments.output import make_folder, refuse_existing, replace_file
    from dejakv.experiments.reports.advice import estimate_blocks
    from dejakv.experiments.table import print_blocks

    # A cluster counts the requests in another place, and all else stays here.
    reading = None
    if ray is not None:
        from functools import partial

        from dejakv.experiments.on_ray import RayCluster, RequestsOn

        reading = partial(RequestsOn, RayCluster.connect(ray))

    # Before the work: nobody waits for an estimate that cannot be written.
    if output is not None:
        refuse_existing(output / "estimate.json", "the estimate")
        make_folder(output)

    with watching(Console(stderr=True), counts="requests") as watch:
        result = estimate(
            log, model or SHARES_MODEL, timed=model is not None, max_false_hits=max_false_hits,
            label_with=label_with, index_encoder=index_encoder, chunk_source=chunk_source,
            raw_prompts=raw_prompts, max_samples=max_samples, min_gain=min_gain,
            watch=watch, reading=reading,
        )  # fmt: skip

    print_blocks(estimate_blocks(result), box=None)
    if output is not None:
        replace_file(output / "estimate.json", json.dumps(result, indent=2) + "\n", "--output")
        echo(f"written to {output}: estimate.json")
