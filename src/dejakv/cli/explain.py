"""`dejakv explain`: which token of a target took whose state."""

from pathlib import Path
from typing import Annotated

import typer

from dejakv.reuse.quality import DEFAULT, MAP


def explain_command(
    donor: Annotated[str, typer.Option(help="The earlier prompt, or @FILE.")],
    target: Annotated[str, typer.Option(help="The new prompt, or @FILE.")],
    model: Annotated[str, typer.Option(help="Bundled name, folder or hub id.")] = "docs-lm",
    token_map: Annotated[str, typer.Option("--map", help="context, embedding, lsh or align.")] = MAP,
    blend_quality: Annotated[str, typer.Option(help="strict, default or loose.")] = DEFAULT,
    selector: Annotated[
        str | None, typer.Option(help="value, kv, similarity, query or random, if not the quality's.")
    ] = None,
    share: Annotated[
        float | None, typer.Option(help="Share of rows computed behind complete layers, if not the quality's.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Not more than the share, even where more has changed.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of the answer.")] = 16,
    html: Annotated[Path | None, typer.Option(help="Write the page to this file as well.")] = None,
    dtype: Annotated[str, typer.Option()] = "auto",
    device: Annotated[str, typer.Option()] = "auto",
) -> None:
    """Show which token takes whose KV and which rows are recomputed."""
    from rich.console import Console

    from dejakv.config import SemanticCacheConfig
    from dejakv.engines.transformers.engine import TransformersEngine
    from dejakv.errors import ConfigError
    from dejakv.experiments.output import make_folder, replace_file
    from dejakv.reuse.blend import BlendConfig
    from dejakv.reuse.explain import explain, to_html, to_terminal

    if max_new_tokens < 1:
        raise ConfigError("--max-new-tokens must be at least 1")
    if html is not None:
        make_folder(html.parent, "--html")
        if html.is_dir():
            raise ConfigError(f"--html {str(html)!r} is a folder: give the name of a file in it")
    given = {"blend_quality": blend_quality, "blend_map": token_map, "blend_selector": selector, "blend_share": share}
    quality = SemanticCacheConfig.from_dict(given).blend
    config = BlendConfig(map=token_map, selector=quality.selector, share=quality.share, by_need=not strict)
    engine = TransformersEngine.from_pretrained(model, dtype, device)
    explained = explain(engine, _text(donor), _text(target), config, max_new_tokens=max_new_tokens)
    to_terminal(explained, Console(soft_wrap=True))
    if html is not None:
        replace_file(html, to_html(explained), "--html")
        typer.echo(f"written to {html}")


def _text(given: str) -> str:
    """The text itself, or the file's after `@`."""
    from dejakv.errors import InputError

    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {given[1:]!r}: {error}; give a text file after @, or the text itself") from error
