"""Log probabilities of tokens that are parts of characters, and of long answers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dejakv.server.logprobs import logprobs_object, token_logprobs


def byte_level() -> Any:
    """Each token is a byte, and its id."""
    tokens = Tokenizer(models.BPE({character: byte for byte, character in bytes_to_unicode().items()}, []))
    tokens.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens)


def byte_fallback() -> Any:
    """The same with the bytes of Llama's vocabularies."""
    tokens = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, []))
    tokens.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokens)


def answered(ids: bytes, piece: int = 3) -> Any:
    rows = np.full((len(ids), 256), -9.0, np.float32)
    rows[range(len(ids)), list(ids)] = -0.5
    rows[:, [0x90, 0x91]] = -2.0, -3.0
    pieces = [rows[start : start + piece] for start in range(0, len(rows), piece)]
    return SimpleNamespace(token_ids=tuple(ids), completion=SimpleNamespace(continued_in_pieces=lambda _: pieces))


@pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback])
def test_parts_of_characters_have_bytes_and_the_offset_of_their_character(tokenizer: Any) -> None:
    text = "a\N{GRINNING FACE}b\N{LATIN SMALL LETTER E WITH ACUTE}!"
    places = token_logprobs(answered(text.encode()), 3, tokenizer(), lambda: None)
    plain = logprobs_object(places, False, len(text))
    assert plain["text_offset"] == [0, 1, 1, 1, 1, 2, 3, 3, 4]
    assert plain["tokens"][:3] == ["a", "bytes:\\xf0", "bytes:\\x9f"]
    assert plain["token_logprobs"] == [-0.5] * 9
    assert [len(tops) for tops in plain["top_logprobs"]] == [3] * 9
    assert plain["top_logprobs"][0] == {"a": -0.5, "bytes:\\x90": -2.0, "bytes:\\x91": -3.0}
    chat = logprobs_object(places, True, len(text))["content"]
    assert bytes(byte for place in chat for byte in place["bytes"]).decode() == text
    assert logprobs_object(places, False, 2)["text_offset"] == [0, 1, 1, 1, 1]


def test_parts_of_characters_have_the_id_where_the_bytes_are_unknown() -> None:
    tokenizer = SimpleNamespace(
        decode=lambda ids, **_: "\N{REPLACEMENT CHARACTER}" * len(ids), convert_ids_to_tokens=lambda _: "\u2603"
    )
    place = logprobs_object(token_logprobs(answered(b"a"), 2, tokenizer, lambda: None), True, 1)["content"][0]
    assert (place["token"], place["bytes"]) == ("token_id:97", None)
    assert [top["token"] for top in place["top_logprobs"]] == ["token_id:97", "token_id:144"]


def test_without_likeliest_tokens_there_are_none_and_the_work_can_be_stopped() -> None:
    answer, checks = answered(b"abcdefg"), []
    places = token_logprobs(answer, 0, byte_level(), lambda: checks.append(1))
    assert len(checks) == 3
    assert logprobs_object(places, False, 7)["top_logprobs"] == [{}] * 7

    def left() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        token_logprobs(answer, 0, byte_level(), left)
