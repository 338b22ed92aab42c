"""`dejakv certify`: which blends may be served for traffic like a log's."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dejakv.cli.options import SETTINGS_HELP, HelpAll, echo, settings_command
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
            help=(
                "JSON lines with prompt, question or messages, in the order of the log; the name of"
                " a data set; or a certificate, whose "
                "evidence is used again for another bound."
            )
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="New file for the certificate.", rich_help_panel="Output")
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(
            help="Certificate to hold against the log, which is a later one.",
            rich_help_panel="Output",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help=SETTINGS_HELP, rich_help_panel="More"),
    ] = None,
    help_all: HelpAll = False,
    *,
    given: dict[str, Any],
) -> None:
    """Certify from a log which blends are wrong rarely enough: its would-be hits run with reuse and
    in full, and one file has the evidence and the rules that it opens. vLLM's connector keeps to
    it (key certificate).
    """
    from rich.console import Console

    from dejakv.cli.progress import watching
    from dejakv.cli.run import resolve_settings
    from dejakv.errors import ConfigError
    from dejakv.experiments import certify
    from dejakv.experiments.output import refuse_existing, replace_file
    from dejakv.trust.certificate import Certificate
    from dejakv.trust.settings import TrustSettings

    if (output is None) == (audit is None):
        raise ConfigError(
            "give --output FILE for a new certificate, or --audit FILE for one to hold against"
            " the log"
        )
    data = certify.data_of(log)

    if audit is not None:
        _refuse_others(
            given, set_, ("max_samples", "seed"), "--audit runs with the certificate's settings"
        )
        certificate = Certificate.read(audit)
        # A later log may be larger or drawn otherwise; every other setting is the certificate's.
        settings = resolve_settings(None, {**given, **data, "model": certificate.model}, (), None)
        changed = {name: getattr(settings, name) for name in (*data, "max_samples", "seed")}
        with watching(Console(stderr=True)) as watch:
            done = certify.audit(certificate, changed, watch)
        echo(f"The certificate {certificate.holds}.")
        echo(
            f"{done.verdict}: of {done.hits} hits its rules keep {done.served}, {done.wrong} of"
            f" them wrong, from {done.low:.1%} to {done.high:.1%}; the bound is"
            f" {certificate.error_bound:g}"
        )
        # A status of its own, so that a script can act on the verdict.
        raise typer.Exit(int(done.verdict == "does not hold"))

    assert output is not None

    # Before the run, which may take hours: a certificate is never overwritten.
    refuse_existing(output, "--output")

    # A file of one JSON object is a certificate: a log has one in each line.
    if Path(log).suffix == ".json" and Path(log).is_file():
        _refuse_others(
            given,
            set_,
            ("error_bound", "confidence"),
            "a certificate's evidence is of its own settings",
        )
        new_certificate = Certificate.read(log).recertify(TrustSettings(**given))
    else:
        settings = resolve_settings(None, {**given, **data, "reuse": "blend"}, set_ or (), None)
        with watching(Console(stderr=True)) as watch:
            new_certificate = certify.certify(settings, watch)

    replace_file(output, new_certificate.text(), "--output")
    counts = new_certificate.counts
    echo(f"This certificate {new_certificate.holds}.")
    echo(
        f"{counts['hits']} of {counts['requests']} requests were hits, {counts['wrong']} of them"
        f" wrong (differs: {new_certificate.differs})."
    )
    if new_certificate.cutoff is None:
        echo(
            f"No rule opens at {new_certificate.error_bound:g}: with this file nothing approximate"
            " is served."
        )
    else:
        echo(
            f"Its rules keep {counts['kept']} hits, {counts['kept_wrong']} of them wrong: at most"
            f" {new_certificate.upper or 0:.1%} with confidence {new_certificate.confidence:g}, and"
            f" the bound is {new_certificate.error_bound:g}."
        )
    echo(f"written to {output}")


def _refuse_others(
    option_values: dict[str, Any],
    assigned: list[str] | None,
    allowed_names: tuple[str, ...],
    why: str,
) -> None:
    """Raise a ConfigError that names the options without an effect, if there are any."""
    from dejakv.errors import ConfigError

    if refused_names := [name for name in option_values if name not in allowed_names] + [
        "set"
    ] * bool(assigned):
        raise ConfigError(
            f"{why}: leave out {', '.join('--' + name.replace('_', '-') for name in refused_names)}"
        )


certify_command = settings_command(
    _certify, (RunSettings, SemanticCacheConfig), GROUPS, {**SWITCHES, **SINGULARS}, skip=SKIPPED
)
