"""`dejakv verify`: whether the caches of a running server change answers."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dejakv.cli.options import echo
from dejakv.errors import ConfigError


def verify_command(
    url: Annotated[
        str, typer.Argument(help="Address of an OpenAI-compatible server, of any engine.")
    ],
    url2: Annotated[
        str | None,
        typer.Option(
            help="Server with the same model and without a cache, whose answers are the right ones."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model (default: the first that is listed).")
    ] = None,
    other_model: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Other name that the server takes, such as a LoRA adapter; repeatable (default: the"
                " listed adapters of the model)."
            )
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Page in Markdown to write, for a bug report.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for all numbers and requests, in JSON.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Time that the run should take.", min=1, max=86400)
    ] = 240.0,
    workers: Annotated[int, typer.Option(help="Requests at once.", min=1, max=64)] = 8,
    seed: Annotated[
        int | None,
        typer.Option(
            help=(
                "Seed of an earlier run: its prompts are sent again, after a restart or new weights"
                " (default: prompts that nobody ever sent)."
            ),
            min=0,
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="DEJAKV_API_KEY", help="API key of the servers.")
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(help="PEM file of the authority that signed the servers' certificates."),
    ] = None,
) -> int:
    """Prove or refute that the caches of a running server change no answer, by HTTP alone: probes
    that a cache may confuse are sent fresh and cached, and compared with the server's own noise.
    The exit status is 0 if no answer is wrong, 1 if one is, and 2 if nothing could be compared.
    """
    from dejakv.experiments.output import make_folder, replace_file
    from dejakv.verify import ClientSettings, VerifySettings, verify_server
    from dejakv.verify.page import to_json, to_markdown, verdict_line

    for file, flag in ((output, "--output"), (json_file, "--json")):
        if file is not None:
            make_folder(file.parent, flag)
            if file.is_dir():
                raise ConfigError(
                    f"{flag} {str(file)!r} is a folder: give the name of a file in it"
                )

    authority = None if ca_file is None else str(ca_file)
    server = ClientSettings(url, model, api_key, authority)
    reference = None if url2 is None else ClientSettings(url2, model, api_key, authority)
    settings = VerifySettings(seconds, workers, seed=seed, models=tuple(other_model or ()))
    result = verify_server(
        server, settings, reference=reference, report=lambda stage: typer.echo(stage, err=True)
    )

    if output is not None:
        replace_file(output, to_markdown(result), "--output")
    if json_file is not None:
        replace_file(json_file, json.dumps(to_json(result), indent=1) + "\n", "--json")
    echo(to_markdown(result) if output is None else verdict_line(result))
    return 1 if result.wrong else 0
