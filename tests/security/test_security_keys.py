"""Keys collide for nothing that differs: neither by moved boundaries, nor by Unicode forms, nor by the order of media."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import rounds
from tests.security.probes import PARTITIONS

from dejakv.decide.finder import space_of
from dejakv.encoder_cache.outputs import stored_id
from dejakv.engines.base import Prepared
from dejakv.errors import InputError
from dejakv.identity import MediumSpan, digest_of, exact_key
from dejakv.request import Media, Request
from dejakv.store.prefix_keys import PrefixKeys

ATOMS = (
    "", "a", "b", "ab", "ba", "aab", "a\0", "\0a", "exact", "prefix", "space", "1", "16",
    "\u00e9", "e\u0301", "\ufb01", "fi", "\u00c5", "\u212b", "A\u030a",
)  # fmt: skip
TOKENS = ((), (0,), (0, 0), (1,), (256,), (1, 0), (0, 1), (97,), (25185,), (1, 2, 3))
MEDIA = ((), ("a",), ("b",), ("a", "b"), ("b", "a"), ("ab",), ("a", "a"), ("",), ("", ""))


def distinct(made: Iterable[tuple[Any, str]]) -> int:
    """How many keys were compared. Fails for two different things of one key."""
    seen: dict[str, Any] = {}
    for what, key in made:
        assert seen.setdefault(key, what) == what, f"{seen[key]!r} and {what!r} have one key"
    return len(seen)


def test_every_combination_of_fields_has_a_key_of_its_own() -> None:
    every = itertools.product(ATOMS, ATOMS, TOKENS, MEDIA)
    assert distinct((what, exact_key(*what)) for what in every) == len(ATOMS) ** 2 * len(TOKENS) * len(MEDIA)


def test_parts_have_boundaries() -> None:
    parts = [parts for count in range(4) for parts in itertools.product(ATOMS, repeat=count)]
    assert distinct((what, digest_of(*what)) for what in parts) == len(parts)


def test_the_state_and_the_encoder_output_of_one_name_are_two_entries() -> None:
    content = "0" * 64
    made = [((p, e), stored_id((p, e, "image", content))) for p in PARTITIONS for e in ATOMS]
    made += [((p, e, 0), exact_key(p, e, (), (content,))) for p in PARTITIONS for e in ATOMS]
    assert distinct(made) == 2 * len(PARTITIONS) * len(ATOMS)


def test_chained_hashes_of_blocks_differ_by_partition_epoch_and_media() -> None:
    tokens = tuple(range(32))
    spans = [
        (),
        (MediumSpan(0, 4, "a"),),
        (MediumSpan(0, 4, "b"),),
        (MediumSpan(1, 3, "a"),),
        (MediumSpan(0, 2, "a"), MediumSpan(2, 2, "b")),
    ]
    spans += [(MediumSpan(0, 2, "b"), MediumSpan(2, 2, "a")), (MediumSpan(20, 4, "a"),)]
    made = [
        ((p, e, s if s and s[0].start < 16 else ()), PrefixKeys(p, e, tokens, s).block_keys[1].hex())
        for p in ATOMS
        for e in ATOMS
        for s in spans
    ]
    assert distinct(made) == len(ATOMS) ** 2 * 6


def test_spaces_of_the_levels() -> None:
    media = [(), *[tuple(Media(bytes([n])) for n in order) for order in ((1,), (2,), (1, 2), (2, 1), (1, 1))]]
    made = [
        (
            (p, e, tuple(m.digest for m in items)),
            space_of(Prepared(Request("r", "p", "c", items, p), (), epoch=e), "exact"),
        )
        for p in PARTITIONS
        for e in ATOMS
        for items in media
    ]
    assert distinct(made) == len(PARTITIONS) * len(ATOMS) * len(media)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
PROMPTS = st.tuples(TEXT, TEXT, st.lists(st.integers(0, 2**32 - 1), max_size=4), st.lists(TEXT, max_size=3))


@rounds(300)
@given(PROMPTS, PROMPTS)
def test_equal_keys_mean_equal_prompts(one: Any, other: Any) -> None:
    assert (exact_key(*one) == exact_key(*other)) == (one == other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: exact_key("\ud800", "e", (), ()),
        lambda: exact_key("p", "\udfff", (), ()),
        lambda: exact_key("p", "e", (-1,), ()),
        lambda: exact_key("p", "e", (2**32,), ()),
        lambda: exact_key("p", "e", (1.0,), ()),  # type: ignore[arg-type]
        lambda: exact_key("p", "e", (), ("\ud800",)),
        lambda: exact_key(None, "e", (), ()),  # type: ignore[arg-type]
        lambda: PrefixKeys("\ud800", "e", range(16)),
        lambda: digest_of(5),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_key_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InputError):
        make()
