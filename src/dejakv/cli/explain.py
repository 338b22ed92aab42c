"""`dejakv explain`: why a sample of a run hit or missed, or the donor token behind each token of a target."""

from pathlib import Path
from typing import Annotated

import typer

from dejakv.blend.settings import DEFAULT, MAP


def explain_command(
    sample: Annotated[str | None, typer.Argument(help="Id of a sample of the run in --run.")] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of a finished run; with a sample's id.")] = None,
    donor: Annotated[str | None, typer.Option(help="Earlier prompt, or @FILE; with --target.")] = None,
    target: Annotated[str | None, typer.Option(help="New prompt, or @FILE; with --donor.")] = None,
    model: Annotated[
        str, typer.Option(help="Name from `dejakv models`, local folder, .gguf file or hub id.")
    ] = "docs-lm",
    token_map: Annotated[str, typer.Option("--map", help="Token map: context, embedding or lsh.")] = MAP,
    blend_quality: Annotated[
        str, typer.Option(help="Rows to compute: strict (most), default or loose (fewest).")
    ] = DEFAULT,
    selector: Annotated[
        str | None,
        typer.Option(
            help="How rows are ranked: prophet (attention of the question) or similarity (of the token map) (default: set by --blend-quality)."
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(help="Share of tokens to recompute (default: set by --blend-quality)."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Compute no more than the share, even if more rows have changed.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 16,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page to this file as well.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Explain why a sample of a run hit or missed; or, of two prompts, which donor token stands behind each token of a blend."""
    from dejakv.config import SemanticCacheConfig
    from dejakv.errors import ConfigError
    from dejakv.experiments.output import make_folder

    if max_new_tokens < 1:
        raise ConfigError("--max-new-tokens must be at least 1")
    if html is not None:
        make_folder(html.parent, "--html")
        if html.is_dir():
            raise ConfigError(f"--html {str(html)!r} is a folder: give the name of a file in it")
    if sample is not None or run is not None:
        if sample is None or run is None or donor is not None or target is not None:
            raise ConfigError("give either the id of a sample and --run FOLDER, or --donor and --target")
        _sample(run, sample, html)
        return
    if donor is None or target is None:
        missing = "--donor" if donor is None else "--target"
        raise ConfigError(
            f"Missing option {missing}: give --donor and --target, or the id of a sample and --run FOLDER"
        )
    given = {"blend_quality": blend_quality, "blend_map": token_map, "blend_selector": selector, "blend_share": share}
    settings = SemanticCacheConfig.from_dict(given)
    quality = settings.blend
    texts = _text(donor), _text(target)

    from rich.console import Console

    from dejakv.blend.settings import BlendConfig

    # The engine brings torch, so that it comes after all that can be wrong without it.
    from dejakv.engines.transformers.engine import TransformersEngine
    from dejakv.experiments.explain import explain, to_html, to_terminal
    from dejakv.experiments.output import replace_file

    config = BlendConfig(map=settings.blend_map, selector=quality.selector, share=quality.share, by_need=not strict)
    engine = TransformersEngine.from_pretrained(model, dtype, device)
    explained = explain(engine, *texts, config, max_new_tokens=max_new_tokens)
    to_terminal(explained, Console(soft_wrap=True))
    if html is not None:
        replace_file(html, to_html(explained, model), "--html")
        typer.echo(f"written to {html}")


def _sample(run: Path, sample: str, html: Path | None) -> None:
    from rich.console import Console

    from dejakv.cli.progress import watching
    from dejakv.experiments.output import replace_file
    from dejakv.experiments.why import to_html, to_terminal, why

    with watching(Console(stderr=True)) as watch:
        found = why(run, sample, watch)
    to_terminal(found, Console())
    if html is not None:
        replace_file(html, to_html(found), "--html")
        typer.echo(f"written to {html}")


def _text(given: str) -> str:
    """The text itself, or the content of the file named after `@`."""
    from dejakv.errors import InputError

    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {given[1:]!r}: {error}; give a text file after @, or the text itself") from error
