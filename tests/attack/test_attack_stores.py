"""Hostile folders: they hold, and stores with a hole are found out."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from dejakv.attack import child, folder_tricks
from dejakv.attack.forging import MISTYPED, forged
from dejakv.attack.hostile_folder import HostileFolder
from dejakv.attack.scene import Scene
from dejakv.store.codec import CorruptChunk
from dejakv.store.metacodec import decode_meta, encode_meta
from dejakv.testing.chunks import make_chunk

Scenes = Callable[..., Scene]
WEAK = "tests.attack.weak_stores"


def some(*names: str) -> dict[str, Any]:
    return {name: folder_tricks.TRICKS[name] for name in names}


def test_hostile_folders_are_misses(scene: Scenes) -> None:
    result = HostileFolder().run(scene())
    assert result.verdict == "held", result.reason
    assert result.notes["planted"] == "6 of 6 chunks read, the others missed"
    assert result.notes["exchanged"] == "0 of 6 chunks read, the others missed"


@pytest.mark.parametrize(
    ("hole", "trick", "says"),
    [
        ("unchecked", "exchanged", "not the one that was stored"),
        ("unpickles", "pickles", "a pickle was loaded"),
        ("crashes", "noise", "it ended with -6"),
        ("hangs", "noise", "it hung"),
        ("writes", "links", "outside of the folder were changed"),
        ("greedy", "noise", "MiB of memory"),
    ],
)
def test_a_weak_store_is_found(
    scene: Scenes, monkeypatch: pytest.MonkeyPatch, hole: str, trick: str, says: str
) -> None:
    monkeypatch.setenv("DEJAKV_WEAK", hole)
    monkeypatch.setattr(child, "SECONDS", 10.0)
    result = HostileFolder(WEAK, some(trick)).run(scene())
    assert result.verdict == "broken"
    assert f"{trick}: " in result.reason
    assert says in result.reason


@pytest.mark.parametrize("changes", MISTYPED, ids=str)
def test_a_description_with_a_wrong_field_is_damaged(changes: Mapping[str, Any]) -> None:
    blob = encode_meta(make_chunk(1).meta)
    assert decode_meta(forged(blob, {})).id == make_chunk(1).meta.id
    with pytest.raises(CorruptChunk):
        decode_meta(forged(blob, changes))
