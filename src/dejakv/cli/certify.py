"""`dejakv certify`: which blends may be served for traffic like a log's."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dejakv.cli.options import SETTINGS_HELP, HelpAll, command
from dejakv.config import SemanticCacheConfig
from dejakv.experiments.settings import SINGULARS, SWITCHES, RunSettings

GROUPS = {
    "Model": ("model", "engine", "device"),
    "Log": ("max_samples",),
    "Bound": ("error_bound", "confidence", "differs"),
    "Reuse": ("blend_quality",),
}
SKIPPED = ("cache", "implied", "output", "dataset", "dataset_path", "certificate", "reuse")


def _certify(
    log: Annotated[
        str,
        typer.Argument(
            help="JSON lines with prompt, question or messages, in the order of the log; the name of a data set; or a certificate, whose "
            "evidence is used again for another bound."
        ),
    ],
    output: Annotated[Path | None, typer.Option(help="New file for the certificate.", rich_help_panel="Output")] = None,
    audit: Annotated[
        Path | None,
        typer.Option(help="Certificate to hold against the log, which is a later one.", rich_help_panel="Output"),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=SETTINGS_HELP, rich_help_panel="More")
    ] = None,
    help_all: HelpAll = False,
    *,
    given: dict[str, Any],
) -> None:
    """Certify from a log which blends are wrong rarely enough: its would-be hits run with reuse and in full, and one file has the evidence
    and the rules that it opens. vLLM's connector keeps to it (key certificate)."""
    from rich.console import Console

    from dejakv.cli.progress import watching
    from dejakv.cli.run import settings_given
    from dejakv.errors import ConfigError
    from dejakv.experiments import certify
    from dejakv.experiments.output import refuse_existing, replace_file
    from dejakv.trust.certificate import Certificate

    if (output is None) == (audit is None):
        raise ConfigError("give --output FILE for a new certificate, or --audit FILE for one to hold against the log")
    data = certify.data_of(log)
    if audit is not None:
        held = Certificate.read(audit)
        given.pop("model", None)
        settings = settings_given(None, {**given, **data, "model": held.model, "reuse": "blend"}, set_ or (), None)
        changed = {name: value for name, value in settings.named().items() if name in {*data, "max_samples"}}
        with watching(Console(stderr=True)) as watch:
            done = certify.audit(held, changed, watch)
        typer.echo(f"The certificate {held.holds}.")
        typer.echo(
            f"{done.verdict}: of {done.hits} hits its rules keep {done.kept}, {done.wrong} of them wrong, from {done.low:.1%} to "
            f"{done.high:.1%}; the bound is {held.error_bound:g}"
        )
        raise typer.Exit(int(done.verdict == "does not hold"))
    assert output is not None
    refuse_existing(output, "--output")
    settings = settings_given(None, {**given, **data, "reuse": "blend"}, set_ or (), None)
    if Path(log).suffix == ".json" and Path(log).is_file():
        if settings.cache.error_bound is None:
            raise ConfigError("a certificate is of a bound: give --error-bound, such as .05")
        made = Certificate.read(log).again(settings.cache)
    else:
        with watching(Console(stderr=True)) as watch:
            made = certify.certify(settings, watch)
    replace_file(output, made.text(), "--output")
    counts = made.counts
    typer.echo(f"This certificate {made.holds}.")
    typer.echo(
        f"{counts['hits']} of {counts['requests']} requests were hits, {counts['wrong']} of them wrong (differs: {made.differs})."
    )
    if made.cutoff is None:
        typer.echo(f"No rule opens at {made.error_bound:g}: with this file nothing approximate is served.")
    else:
        typer.echo(
            f"Its rules keep {counts['kept']} hits, {counts['kept_wrong']} of them wrong: at most {made.upper or 0:.1%} with confidence "
            f"{made.confidence:g}, and the bound is {made.error_bound:g}."
        )
    typer.echo(f"written to {output}")


certify_command = command(_certify, (RunSettings, SemanticCacheConfig), GROUPS, {**SWITCHES, **SINGULARS}, skip=SKIPPED)
