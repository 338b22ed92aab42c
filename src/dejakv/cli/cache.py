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
    partition: Annotated[
        str | None,
        typer.Option(help="Entries of this tenant, as `dejakv cache partition` names it; `default` if none was named."),
    ] = None,
    epoch: Annotated[
        str | None, typer.Option(help="Entries of the model with this fingerprint (`epoch` of an entry's description).")
    ] = None,
    donor: Annotated[
        list[str] | None,
        typer.Option(
            help="The prompt with this id (`donor` in a record or in samples.jsonl), what begins with it, and what was made from it."
        ),
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


@cache_app.command("evidence")
def evidence_command(
    cache_dir: Annotated[str, typer.Option(help="Folder of a cache.")],
    epoch: Annotated[
        str | None, typer.Option(help="Of the model with this fingerprint alone: the first word of a line.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove it: it is collected anew.")] = False,
) -> None:
    """Show what is known of the error bound, or remove it: a line for each model, method, setting and group, the latest first."""
    from contextlib import closing

    from dejakv.errors import ConfigError
    from dejakv.settings import refuse_redis
    from dejakv.store import names
    from dejakv.trust.disk import DiskLedger

    refuse_redis(cache_dir)
    if not (Path(cache_dir) / names.evidence(0)).is_file():
        raise ConfigError(f"{cache_dir} has no evidence: give the folder of a cache that was used with --error-bound")
    with closing(DiskLedger(cache_dir, "")) as ledger:
        if remove:
            typer.echo(f"removed {ledger.remove(epoch)} classes")
            return
        for cls, terms, state in ledger.every():
            if epoch in (None, cls.epoch):
                counts = state.counts
                typer.echo(
                    f"{cls.epoch} {cls.method} ({cls.setting}) group {cls.group[:8]} terms {terms[:8]}: {state.opened} rules open, "
                    f"{counts.explored + counts.audited} labels, {counts.explored_wrong + counts.wrong} wrong, {counts.served} served"
                )


@cache_app.command("partition")
def partition_command(
    api_keys_file: Annotated[Path, typer.Option(help="File with one API key a line.")],
) -> None:
    """List the partitions of API keys, in the order of the file, as quotas and purges name them."""
    import os

    from dejakv.api_keys import SECRET, ApiKeys

    for found in ApiKeys.load(None, api_keys_file, os.environ.get(SECRET)).names:
        typer.echo(found)
