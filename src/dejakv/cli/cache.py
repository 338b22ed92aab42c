"""`dejakv cache`: what a cache's folder holds, seen and removed by its owner."""

from pathlib import Path
from typing import Annotated

import typer

cache_app = typer.Typer(help="Look after the folder of a cache.", no_args_is_help=True)


@cache_app.callback()
def cache_command() -> None:
    """Look after the folder of a cache."""


@cache_app.command("purge")
def purge_command(
    cache_dir: Annotated[
        list[str],
        typer.Option(
            help="Folder of a cache; again for folders of encoder outputs and fusion states that belong to it."
        ),
    ],
    partition: Annotated[str | None, typer.Option(help="Entries of this tenant.")] = None,
    epoch: Annotated[str | None, typer.Option(help="Entries of this model's state.")] = None,
    donor: Annotated[
        list[str] | None, typer.Option(help="The prompt of this id, what begins with it, and what was made from it.")
    ] = None,
    older_than: Annotated[float | None, typer.Option(help="Entries stored so many seconds ago or longer.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All entries.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, and tell what would be removed.")] = False,
) -> None:
    """Remove entries for which all that is given holds, and what was made from them, until no byte of them is left in the folder.
    Servers may use it meanwhile."""
    from contextlib import ExitStack, closing

    from dejakv.errors import ConfigError
    from dejakv.store.disk import DiskStore
    from dejakv.store.open import folders_of
    from dejakv.store.purging import purge
    from dejakv.store.selection import Purged, Selection

    selection = Selection(partition, epoch, tuple(donor or ()), older_than)
    if selection == Selection() and not everything:
        raise ConfigError("nothing is selected: give --partition, --epoch, --donor or --older-than, or --all")
    purged = Purged()
    with ExitStack() as stack:
        # All of them are opened before anything is removed: one that is no cache is a mistake in the command.
        folders = [folder for given in cache_dir for folder in folders_of(given)]
        stores = [stack.enter_context(closing(DiskStore(folder))) for folder in folders]
        for number, store in enumerate(stores):
            wanted = selection.of_others(purged) if number else selection
            purged += purge(store, wanted, dry_run=dry_run)
    typer.echo(f"{'would remove' if dry_run else 'removed'} {purged}")


@cache_app.command("partition")
def partition_command(
    api_keys_file: Annotated[Path, typer.Option(help="File with one API key a line.")],
) -> None:
    """List the partitions of API keys, in the order of the file, as quotas and purges name them."""
    import os

    from dejakv.api_keys import SECRET, ApiKeys

    for name in ApiKeys.load(None, api_keys_file, os.environ.get(SECRET)).names:
        typer.echo(name)
