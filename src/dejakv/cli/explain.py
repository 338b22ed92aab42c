"""`dejakv explain`: why a sample of a run hit or missed, or the donor token behind each token of a target."""

from pathlib import Path
from typing import Annotated

import typer

from dejakv.blend.settings import DEFAULT, MAP
from dejakv.experiments.settings import SHARES_MODEL


def explain_command(
    sample: Annotated[
        str | None,
        typer.Argument(
            help="Id of a sample of the run in --run, or JSON file with the request for --server (-: standard input)."
        ),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of a finished run; with a sample's id.")] = None,
    server: Annotated[str | None, typer.Option(help="Address of a running server; with a request.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="DEJAKV_API_KEY", help="API key for --server.")] = None,
    donor: Annotated[str | None, typer.Option(help="Earlier prompt, or @FILE; with --target.")] = None,
    target: Annotated[str | None, typer.Option(help="New prompt, or @FILE; with --donor.")] = None,
    model: Annotated[
        str, typer.Option(help="Name from `dejakv models`, local folder, .gguf file or hub id.")
    ] = SHARES_MODEL,
    token_map: Annotated[str, typer.Option("--map", help="Token map: context, embedding or lsh.")] = MAP,
    blend_quality: Annotated[
        str, typer.Option(help="Rows to compute: strict (most), default or loose (fewest).")
    ] = DEFAULT,
    selector: Annotated[
        str | None,
        typer.Option(
            help="Ranking of rows: prophet (attention of the question) or similarity (of the token map) (default: set by --blend-quality)."
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
    """Explain why a sample of a run hit or missed; what a running server reuses for a request; or the donor token behind each token of a
    blend of two prompts."""
    from rich.console import Console

    from dejakv.cli.progress import watching
    from dejakv.config import SemanticCacheConfig
    from dejakv.errors import ConfigError
    from dejakv.experiments.output import make_folder, replace_file

    if max_new_tokens < 1:
        raise ConfigError("--max-new-tokens must be at least 1")
    if html is not None:
        make_folder(html.parent, "--html")
        if html.is_dir():
            raise ConfigError(f"--html {str(html)!r} is a folder: give the name of a file in it")
    if server is not None:
        from dejakv.cli.explain_server import explain_request

        if sample is None or run is not None or donor is not None or target is not None or html is not None:
            raise ConfigError("--server takes a request alone: give a JSON file, or - for standard input")
        typer.echo(explain_request(server, sample, api_key))
        return
    of_run, of_two = (sample is not None, run is not None), (donor is not None, target is not None)
    if any(of_run) == any(of_two) or not (all(of_run) or all(of_two)):
        raise ConfigError(
            "Missing option: give --donor and --target, or the id of a sample and --run FOLDER, or a request and --server URL"
        )
    if sample is not None and run is not None:
        from dejakv.experiments.reports import why

        with watching(Console(stderr=True)) as watch:
            found = why.why(run, sample, watch)
        why.to_terminal(found, Console())
        written = why.to_html(found) if html is not None else ""
    else:
        given = {"quality": blend_quality, "map": token_map, "selector": selector, "share": share}
        settings = SemanticCacheConfig.from_dict({f"blend_{name}": value for name, value in given.items()})
        texts = _text(str(donor)), _text(str(target))

        from dejakv.blend.settings import BlendConfig

        # The engine brings torch, so that it comes after all that can be wrong without it.
        from dejakv.engines.transformers.engine import TransformersEngine
        from dejakv.experiments.reports import explain

        quality = settings.blend
        config = BlendConfig(map=settings.blend_map, selector=quality.selector, share=quality.share, by_need=not strict)
        engine = TransformersEngine.from_pretrained(model, dtype, device)
        explained = explain.explain(engine, *texts, config, max_new_tokens=max_new_tokens)
        explain.to_terminal(explained, Console(soft_wrap=True))
        written = explain.to_html(explained, model) if html is not None else ""
    if html is not None:
        replace_file(html, written, "--html")
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
