"""Purges of encoder outputs and fusion states, in memory and on disk."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejakv.encoder_cache import VisualKVCache
from dejakv.engines.base import Prepared
from dejakv.prototypes.fusion import FusionState, FusionStates
from dejakv.request import Request
from dejakv.store.open import open_store
from dejakv.store.selection import Selection

OUTPUT = np.ones((2, 3), np.float32)
ONE, OTHER = "a" * 64, "b" * 64


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize(
    ("selection", "left"),
    [
        (Selection("p"), [("q", ONE)]),
        (Selection(epoch="another"), [("p", ONE), ("p", OTHER), ("q", ONE)]),
        (Selection(older_than=3600), [("p", ONE), ("p", OTHER), ("q", ONE)]),
        (Selection(older_than=0), []),
        (Selection(donors=("prompt",), media=frozenset({("p", ONE)})), [("p", OTHER), ("q", ONE)]),
        (Selection(donors=("prompt",)), [("p", ONE), ("p", OTHER), ("q", ONE)]),
    ],
)
def test_outputs(disk: bool, selection: Selection, left: list[tuple[str, str]], tmp_path: Path) -> None:
    cache = VisualKVCache(disk=tmp_path if disk else None)
    every = [("p", ONE), ("p", OTHER), ("q", ONE)]
    for partition, content in every:
        cache.view("e", partition).store(content, "image", OUTPUT)
    cache.flush()
    held = cache.disk.stats().bytes if cache.disk is not None else 3 * OUTPUT.nbytes
    would = cache.purge(selection, dry_run=True)
    did = cache.purge(selection)
    assert would == did
    rest = cache.disk.stats().bytes if cache.disk is not None else len(left) * OUTPUT.nbytes
    assert (did.encoder_outputs, did.bytes) == (3 - len(left), held - rest)
    assert [key for key in every if cache.view("e", key[0]).lookup(key[1]) is not None] == left
    if disk:
        cache.flush()
        assert len(list(tmp_path.glob("segments/*/*"))) == len(left)
    cache.close()


@pytest.mark.parametrize(
    ("selection", "dry_run", "kept"),
    [
        (Selection("p"), False, False),
        (Selection("p"), True, True),
        (Selection("q"), False, True),
        (Selection(older_than=0), False, False),
        (Selection(older_than=60), False, True),
        (Selection(media=frozenset({("p", ONE)})), False, False),
        (Selection(media=frozenset({("p", OTHER)})), False, True),
    ],
)
def test_an_output_that_is_being_computed_is_delivered_and_not_kept_if_it_is_selected(
    selection: Selection, dry_run: bool, kept: bool, tmp_path: Path
) -> None:
    cache = VisualKVCache(disk=tmp_path)
    view = cache.view("e", "p")

    def compute() -> Any:
        cache.purge(selection, dry_run=dry_run)
        return OUTPUT

    np.testing.assert_array_equal(view.get_or_compute(ONE, "image", compute), OUTPUT)
    assert view.stats().entries == kept
    cache.flush()
    assert len(list(tmp_path.glob("segments/*/*"))) == kept
    cache.close()


@pytest.mark.parametrize("clear", [lambda cache: cache.clear("p"), lambda cache: cache.purge(Selection("p"))])
def test_a_caller_after_a_purge_has_the_encoder_run_anew(clear: Any) -> None:
    """What runs already was begun before the purge: its output is not for those who come later."""
    cache = VisualKVCache()
    view = cache.view("e", "p")
    later: list[Any] = []

    def again() -> None:
        later.append(view.get_or_compute(ONE, "image", lambda: 2 * OUTPUT))

    def compute() -> Any:
        clear(cache)
        thread = threading.Thread(target=again, daemon=True)
        thread.start()
        thread.join(20)
        return OUTPUT

    np.testing.assert_array_equal(view.get_or_compute(ONE, "image", compute), OUTPUT)
    np.testing.assert_array_equal(later[0], 2 * OUTPUT)
    block = view.lookup(ONE)
    assert block is not None
    np.testing.assert_array_equal(block.embedding, 2 * OUTPUT)


class Modules:
    """A model's fusion modules, which put out the same for every stored state."""

    def capture(self, *, llm: Any, request_id: str, chunk_id: str) -> FusionState:
        return FusionState(chunk_id, {"rows": OUTPUT})

    def inject(self, *, llm: Any, request_id: str, state: FusionState) -> bool:
        return True


@pytest.mark.parametrize(("selection", "left"), [(Selection(donors=("one",)), ["other"]), (Selection("p"), [])])
def test_fusion_states(selection: Selection, left: list[str], tmp_path: Path) -> None:
    fusing = FusionStates(Modules(), None, open_store(tmp_path))
    prepared = Prepared(Request("r", "x", "x", partition="p"), (1, 2), epoch="e")
    for key in ("one", "other"):
        assert fusing._of(prepared).capture(llm=None, request_id="r", chunk_id=key)
    purged = fusing.store.purge(selection)
    assert purged.encoder_outputs == 2 - len(left)
    cache = fusing._of(prepared)
    assert [key for key in ("one", "other") if cache.load(key) is not None] == left
    assert len(list(tmp_path.glob("segments/*/*"))) == len(left)
    fusing.store.close()
