from hypothesis import given
from hypothesis import strategies as st

from dejakv.identity import BLOCK_TOKENS, MediumSpan, common_prefix, epoch_of, media_key
from dejakv.request import Media
from dejakv.store.prefix_keys import PrefixKeys

TOKENS = st.lists(st.integers(0, 100_000), max_size=80)


def test_epoch_ignores_the_order_of_names_and_sees_every_value() -> None:
    assert epoch_of({"a": 1, "b": 2}) == epoch_of({"b": 2, "a": 1})
    assert epoch_of({"a": 1, "b": 2}) != epoch_of({"a": 1, "b": 3})


def test_media_key_keeps_the_order_and_is_empty_without_media() -> None:
    one, other = Media(b"1").digest, Media(b"2").digest
    assert media_key([]) == ""
    assert media_key([one, other]) != media_key([other, one])


@given(TOKENS, TOKENS)
def test_equal_block_hashes_mean_equal_prefixes(left: list[int], right: list[int]) -> None:
    pairs = zip(PrefixKeys("p", "e", left).block_keys[1:], PrefixKeys("p", "e", right).block_keys[1:], strict=False)
    equal = sum(one == other for one, other in pairs)
    assert equal == min(common_prefix(left, right), len(left), len(right)) // BLOCK_TOKENS


@given(TOKENS, st.integers(0, 80), st.integers(1, 20))
def test_common_prefix_ends_where_the_media_differ(tokens: list[int], start: int, length: int) -> None:
    span = MediumSpan(start, length, "red")
    assert common_prefix(tokens, tokens, [span], [span]) == len(tokens)
    for others in ([MediumSpan(start, length, "blue")], []):
        assert common_prefix(tokens, tokens, [span], others) == min(len(tokens), start)


def test_swapped_pictures_share_only_what_stands_before_the_first() -> None:
    tokens = list(range(40))
    first = [MediumSpan(4, 8, "a"), MediumSpan(20, 8, "b")]
    swapped = [MediumSpan(4, 8, "b"), MediumSpan(20, 8, "a")]
    assert common_prefix(tokens, tokens, first, swapped) == 4
