"""`dejakv cache`: show and purge a store."""

from pathlib import Path
from typing import Annotated

import typer

from dejakv.cli.options import echo
from dejakv.errors import count_noun

cache_command = typer.Typer(help="Look after a store.", no_args_is_help=True, add_completion=False)


@cache_command.callback()
def cache_group() -> None:
    """Look after a store."""


@cache_command.command("show")
def show_command(
    store: Annotated[str, typer.Argument(help="Folder or address of a store.")],
) -> None:
    """Show the content of a store: entries, tokens and bytes by partition, model (epoch) and kind,
    the largest first. Read-only.
    """
    from collections import defaultdict
    from contextlib import closing
    from datetime import UTC, datetime

    from dejakv.store.base import StateInfo
    from dejakv.store.open import find_stores, open_existing

    metas_by_group: defaultdict[tuple[str, str, str], list[StateInfo]] = defaultdict(list)
    entries = size = 0
    for place in find_stores(store):
        with closing(open_existing(place)) as item:
            for meta in item.metas():
                metas_by_group[meta.partition, meta.epoch, meta.kind].append(meta)
            stats = item.stats()
            entries, size = entries + stats.entries, size + stats.bytes

    # Partition, epoch and kind are the names; the largest group is what a reader looks for.
    for names, group_metas in sorted(
        metas_by_group.items(), key=lambda one: -sum(meta.nbytes for meta in one[1])
    ):
        created = [meta.created for meta in group_metas]
        ages = [
            datetime.fromtimestamp(end, UTC).strftime("%Y-%m-%d %H:%M")
            for end in (min(created), max(created))
        ]

        tokens, nbytes = (
            sum(meta.num_tokens for meta in group_metas),
            sum(meta.nbytes for meta in group_metas),
        )

        content = (
            f"{len(group_metas):,} of kind {names[2]}, {count_noun(tokens, 'token')},"
            f" {nbytes / 1e6:.1f} MB"
        )
        echo(f"partition {names[0]}, epoch {names[1]}: {content}, {' to '.join(ages)}")

    echo(f"{count_noun(entries, 'prompt')}, {size / 1e6:.1f} MB")


@cache_command.command("purge")
def purge_command(
    store: Annotated[
        list[str],
        typer.Option(
            "--store",
            "--cache-dir",
            help=(
                "Folder or address of a store; repeat for those of encoder outputs and fusion"
                " states."
            ),
        ),
    ],
    partition: Annotated[
        str | None,
        typer.Option(
            help=(
                "Entries of this tenant, named as by `dejakv cache partitions`; `default` if"
                " unnamed."
            )
        ),
    ] = None,
    epoch: Annotated[
        str | None,
        typer.Option(
            help="Entries of the model with this fingerprint (`epoch` of an entry's description)."
        ),
    ] = None,
    donor: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "The prompt with this id (`donor` in a record or in samples.jsonl), its"
                " continuations, and everything derived from it."
            )
        ),
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(help="Entries of at least this age, in seconds.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All entries.")] = False,
    feed: Annotated[
        str | None,
        typer.Option(help="Feed of a store in a bucket, so that its machines forget at once."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the entries without removing them.")
    ] = False,
) -> None:
    """Remove the entries that meet all given conditions, and everything derived from them, to the
    last byte. Servers may use the store meanwhile.
    """
    from contextlib import ExitStack, closing

    from dejakv.config import check_bucket
    from dejakv.errors import ConfigError
    from dejakv.settings import in_bucket
    from dejakv.store.claim import FORMAT, purge_folder
    from dejakv.store.open import find_stores, open_existing
    from dejakv.store.selection import PurgeResult, Selection

    selection = Selection(partition, epoch, tuple(donor or ()), older_than)

    # An empty selection selects everything, which must be said and not forgotten.
    if selection == Selection() and not everything:
        raise ConfigError(
            "nothing is selected: give --partition, --epoch, --donor or --older-than, or --all"
        )

    check_bucket(next(filter(in_bucket, store), store[0]), feed=feed)
    purged = PurgeResult()
    with ExitStack() as stack:
        # All of them are opened before anything is removed: one that is no cache is a mistake in
        # the command.
        places = {
            place: format for address in store for place, format in find_stores(address).items()
        }

        # Nothing can be selected in an older format: it goes as a whole or not at all.
        if everything and selection == Selection() and not dry_run:
            for place in [place for place, format in places.items() if format != FORMAT]:
                echo(
                    f"removed {count_noun(purge_folder(place), 'file')} of an older format from"
                    f" {place}"
                )
                del places[place]
        # With a feed, other machines forget at once what is purged here.
        stores = [stack.enter_context(closing(open_existing(place, feed))) for place in places]
        # Other stores know no prompts: they follow the ids and media that the first gave up.
        for number, open_handle in enumerate(stores):
            store_selection = selection.for_output_stores(purged) if number else selection
            purged += open_handle.purge(store_selection, dry_run=dry_run)

    echo(f"{'would remove' if dry_run else 'removed'} {purged}")


@cache_command.command("evidence")
def evidence_command(
    store: Annotated[
        str,
        typer.Option(
            "--store", "--cache-dir", help="Folder of a cache; of one in a bucket its disk_dir."
        ),
    ],
    epoch: Annotated[
        str | None,
        typer.Option(help="Only the model with this fingerprint: the first word of a line."),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the evidence; it is collected again.")
    ] = False,
) -> None:
    """Show or remove the evidence of the error bound: a line for each model, method, setting and
    group, the latest first.
    """
    from contextlib import closing

    from dejakv.errors import ConfigError
    from dejakv.settings import in_bucket
    from dejakv.trust.ledger import FILE, EvidenceLedger

    # The ledger is a file of SQLite: opening another path would make an empty one there.
    if in_bucket(store) or not (Path(store) / FILE).is_file():
        raise ConfigError(
            f"{store} has no evidence: give the folder of a cache that was used with --error-bound"
        )
    with closing(EvidenceLedger(store)) as ledger:
        if remove:
            echo(
                f"removed the evidence of {count_noun(ledger.remove(epoch=epoch), 'kind')} of hits"
            )
            return
        for cls, state, terms in ledger.classes(any_terms=True):
            if epoch in (None, cls.epoch):
                counts = state.counts
                echo(
                    f"{cls.epoch} {cls.method} ({cls.setting}) group {cls.group[:8]} terms"
                    f" {terms[:8]}: {state.opened} rules open, {counts.explored + counts.audited}"
                    f" labels, {counts.explored_wrong + counts.wrong} wrong, {counts.served} served"
                )


# The former name stays, for scripts that use it.
@cache_command.command("partition", hidden=True)
@cache_command.command("partitions")
def partition_command(
    api_keys_file: Annotated[Path, typer.Option(help="File with one API key a line.")],
) -> None:
    """List the partitions of API keys, in the order of the file, for quotas and purges."""
    import os

    from dejakv.http.keys import SECRET, ApiKeys

    for partition_name in ApiKeys.load(None, api_keys_file, os.environ.get(SECRET)).names:
        echo(partition_name)
