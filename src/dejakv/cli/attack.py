"""`dejakv attack`: attacks on the cache and on a server, and what held."""

import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dejakv.errors import ConfigError

if TYPE_CHECKING:
    from dejakv.attack.target import Target


def attack_command(
    output: Annotated[Path, typer.Option(help="New JSON file for everything that was found.")],
    quick: Annotated[bool, typer.Option("--quick", help="Try less: about a minute instead of ten.")] = False,
    server: Annotated[
        str | None,
        typer.Option(help="Address of your own server, http://HOST:PORT (default: one is started in this process)."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="DEJAKV_ATTACK_KEY", help="An API key of --server, made for this test.")
    ] = None,
    other_key: Annotated[
        str | None,
        typer.Option(envvar="DEJAKV_ATTACK_OTHER_KEY", help="A second one, for attacks across partitions."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Attack a server that is not on this machine; it must be your own.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="Name from `dejakv models`, local folder, .gguf file or hub id; without --server.")
    ] = "docs-lm",
    index_encoder: Annotated[
        list[str] | None,
        typer.Option(
            help="Encoder whose keys are attacked: model or a sentence-transformers name or folder; repeatable (default: those that are here)."
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Attack to make, by its name in the table; repeatable (default: all).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything that is tried.")] = 0,
) -> None:
    """Attack the cache and a server: collisions, poisoning, leakage, probing, timing, hostile folders and inputs; exit code 1 if anything is broken."""
    from rich.console import Console

    from dejakv.attack.effort import FULL, QUICK
    from dejakv.attack.scene import Scene
    from dejakv.attack.show import report, show
    from dejakv.attack.suite import attack, chosen
    from dejakv.experiments.output import make_folder, replace_file
    from dejakv.experiments.overwrite import refuse_existing

    attacks = chosen(only or ())
    refuse_existing(output, "the report")
    make_folder(output.parent)
    effort, encoders = QUICK if quick else FULL, tuple(index_encoder or ())
    with ExitStack() as opened:
        target = _target(server, api_key, other_key, yes)
        if target is not None:
            opened.enter_context(closing(target))
        name = model if target is None else target.model
        scene = opened.enter_context(Scene(effort, seed=seed, model=name, server=target, encoders=encoders))
        done = list(attack(scene, attacks, lambda one: typer.echo(f"{one} ...", err=True)))
        show(done, Console())
        found = report(done, scene)
    replace_file(output, json.dumps(found, indent=2) + "\n", "--output")
    typer.echo(f"written to {output}")
    if found["broken"]:
        raise typer.Exit(1)


def _target(server: str | None, api_key: str | None, other_key: str | None, yes: bool) -> "Target | None":
    """The server to attack, after saying what it will be sent; None without one."""
    from dejakv.attack.client import Pace
    from dejakv.attack.target import LARGEST_REMOTE, PER_SECOND, TOTAL, address_of, is_loopback, open_target

    if other_key is not None and api_key is None:
        raise ConfigError("--other-key is a second key: give --api-key too")
    if server is None:
        if api_key is not None:
            raise ConfigError(
                "--api-key is of a server: give --server URL too, or leave it out (and unset DEJAKV_ATTACK_KEY)"
            )
        if yes:
            raise ConfigError("--yes is about --server URL: give it too, or leave --yes out")
        return None
    url = address_of(server)
    if not is_loopback(url) and not yes:
        raise ConfigError(
            f"--server {server[:200]} is not on this machine: add --yes if it is your own and may be attacked"
        )
    keys = "without a key" if api_key is None else "with one key" if other_key is None else "with two keys"
    typer.echo(
        f"sending to {url.geturl()}, {keys}: at most {TOTAL} requests, {PER_SECOND:g} a second, one at a time, of up to "
        f"{LARGEST_REMOTE >> 20} MiB each. Some are malformed. Prompts stay in the partitions of these keys until they "
        "are evicted or cleared; nothing is cleared"
    )
    return open_target(url, api_key, other_key, Pace(PER_SECOND, TOTAL))
