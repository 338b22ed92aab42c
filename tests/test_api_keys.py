"""API keys: what may be one, where they come from, and whose partition they are."""

import hashlib
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dejakv.errors import ConfigError
from dejakv.http.keys import ApiKeys
from dejakv.request import DEFAULT_PARTITION

GOOD = st.text(sorted(set(string.printable) - set(string.whitespace) - {",", "#"}), min_size=1, max_size=40)


def partition(keys: ApiKeys, key: str | None) -> str | None:
    caller = keys.caller(key)
    return caller.partition if caller is not None else None


@given(st.lists(GOOD, min_size=1, max_size=8), st.text(max_size=40))
@example(["key"], "key ")
@example(["key"], "KEY")
@example(["key"], "\ud800")
def test_each_known_key_is_a_partition_of_its_own(known, other):
    keys = ApiKeys.load(",".join(known), None)
    assert keys.required
    partitions = {key: partition(keys, key) for key in known}
    assert None not in partitions.values()
    assert DEFAULT_PARTITION not in partitions.values()
    assert len(set(partitions.values())) == len(set(known))
    assert not any(key in partition for key, partition in partitions.items() if len(key) > 8)
    assert partition(keys, None) is None
    assert (partition(keys, other) is not None) == (other in known)


@given(st.text(max_size=40))
@example("one")
def test_what_no_header_carries_is_no_key(text):
    if text and text.isascii() and text.isprintable() and not set(text) & {" ", ","}:
        assert partition(ApiKeys([text]), text) is not None
        return
    with pytest.raises(ConfigError, match="API key number 2 cannot be sent in a header: use printable ASCII"):
        ApiKeys(["one", text])


def test_without_keys_everybody_is_the_default_partition():
    keys = ApiKeys.load(None, None)
    assert not keys.required
    assert partition(keys, None) == partition(keys, "any") == DEFAULT_PARTITION


@pytest.mark.parametrize("text", ["", ",", " , ,", "\ufeff"])
def test_an_empty_list_is_an_error(text):
    with pytest.raises(ConfigError, match="DEJAKV_API_KEYS is set but holds no key"):
        ApiKeys.load(text, None)


@pytest.mark.parametrize("content", [b"", b"\n\r\n", b"# no key\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_an_error(tmp_path, content):
    file = tmp_path / "keys"
    file.write_bytes(content)
    for text in (None, "another"):
        with pytest.raises(ConfigError, match="holds no key: write one a line"):
            ApiKeys.load(text, file)


@pytest.mark.parametrize(
    "content", [b"one\ntwo\n", b"\xef\xbb\xbfone\r\ntwo", b"# ours\r\n  one \r\n\r\n two\r\none\r\n", b"two\rone"]
)
def test_a_file_of_any_line_ends(tmp_path, content):
    file = tmp_path / "keys"
    file.write_bytes(content)
    keys, same = ApiKeys.load(None, file), ApiKeys.load("two,one,one", None)
    assert partition(keys, "one") == partition(same, "one") is not None
    assert partition(keys, "two") == partition(same, "two") is not None
    assert partition(keys, "# ours") is None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("one\ntwo".encode("utf-16"), "is not UTF-8"),
        ("schlüssel".encode("latin-1"), "is not UTF-8"),
        ("ключ".encode(), "API key number 1 cannot be sent"),
        (b"one\na b\n", "API key number 2 cannot be sent"),
        (b"one,two\n", "API key number 1 cannot be sent"),
    ],
)
def test_a_file_that_no_client_could_use(tmp_path, content, why):
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        ApiKeys.load(None, file)


def test_a_file_that_cannot_be_read(tmp_path):
    for file in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the API keys file"):
            ApiKeys.load(None, file)


def test_with_a_secret_names_cannot_be_made_from_keys_alone() -> None:
    plain, one, same, other = (
        ApiKeys(["alpha", "beta"], secret).names for secret in (None, "a" * 16, "a" * 16, "b" * 16)
    )
    assert one == same
    assert len({*plain, *one, *other}) == 6
    assert partition(ApiKeys(["alpha"], "a" * 16), "alpha") == one[0]
    assert plain[0] == f"key-{hashlib.sha256(b'alpha').hexdigest()[:16]}"  # as docs/reference/settings.md says


@pytest.mark.parametrize("secret", ["", "short", "x" * 15])
def test_a_secret_that_can_be_guessed(secret: str) -> None:
    with pytest.raises(ConfigError, match="DEJAKV_PARTITION_SECRET"):
        ApiKeys(["alpha"], secret)
