"""Donors that hold text of a prompt word for word: copied text over one store, indexed once somebody asks for it."""

import threading
from collections.abc import Callable

from dejakv.config import SemanticCacheConfig
from dejakv.decide.copied.spaces import CopiedText, tokens_from
from dejakv.decide.filling import Filling
from dejakv.decide.levels.base import Match
from dejakv.decide.plan import COPIED, Ask, Found, serves_blends
from dejakv.engines.base import Prepared
from dejakv.store.base import ChunkMeta
from dejakv.store.store import Store
from dejakv.tokens import Ids, with_media

LEAST_COPIED = 0.25
"""Share of a prompt that donors must hold. With less a blend saves hardly more than it costs, and the prompt's exact state is of
more use. From .1 to .4 the tokens computed change by 5% at most (docs/results/generations.md)."""


class Copies:
    """What of a prompt stands in stored ones. Thread-safe.

    index  None until a piecewise method is first asked for, unless it is the settings' own: nobody else has to pay for it
    """

    def __init__(self, store: Store, config: SemanticCacheConfig) -> None:
        self._store = store
        self._config = config
        self._filling = Filling(store)
        self._beginning = threading.Lock()
        at_once = config.copied_text and Ask(config.reuse).piecewise
        self.index = CopiedText(tokens_from(store)) if at_once else None

    def add(self, meta: ChunkMeta) -> None:
        if self.index is not None and serves_blends(meta, self._config.max_generation):
            self.index.add(meta)

    def remove(self, id: str) -> None:
        self._filling.left(id)
        if self.index is not None:
            self.index.remove(id)

    def tokens(self, meta: ChunkMeta) -> Ids:
        """A donor's tokens as they are compared: as they are held, where it was found by copied text."""
        return self.index.tokens(meta) if self.index is not None else with_media(meta.token_ids, meta.spans)

    def search(
        self, prepared: Prepared, known: Callable[[str], ChunkMeta | None], most: int, threshold: float | None
    ) -> Found | None:
        """The donors that cover the prompt, those with most of it first; none if they cover too little of it. None if the
        settings have no copied text.

        known      descriptions of the donors that the prompt may use, by their ids
        most       how many donors are of use
        threshold  share of the prompt that they must hold, if it is more than `LEAST_COPIED`
        """
        index = self._begun()
        if index is None:
            return None
        cover = index.search(prepared, prepared.epoch)
        metas = map(known, cover.donors[:most])
        donors = tuple(meta for meta in metas if meta is not None and serves_blends(meta, self._config.max_generation))
        used = {meta.id for meta in donors}
        runs = tuple((run.start, run.length) for run in cover.runs if run.donor in used)
        copied = sum(length for _, length in runs)
        if not donors or copied < max(LEAST_COPIED, threshold or 0.0) * cover.tokens:
            return Found()
        return Found(Match(donors[0].id, COPIED, copied / cover.tokens), donors, copied=copied, runs=runs)

    def _begun(self) -> CopiedText | None:
        if self.index is None and self._config.copied_text:
            with self._beginning:
                if self.index is None:
                    # At once, so that what is stored meanwhile is added.
                    index = self.index = CopiedText(tokens_from(self._store))
                    with self._filling.listed(index.remove) as metas:
                        for meta in metas:
                            self.add(meta)
        return self.index
