"""Pictures from strangers: judged by their header, refused before they are decoded, decoded in one way."""

from contextlib import suppress
from io import BytesIO
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.picture_files import GOOD, many_scans, oriented, png, saved

from dejakv.errors import InputError
from dejakv.pictures import check_picture, decode_picture
from dejakv.request import Media


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_what_ends_early_is_refused_when_it_is_decoded_at_the_latest(kind: str) -> None:
    whole = saved(kind, (256, 256))
    assert decode_picture(Media(whole)).size == (256, 256)
    for length in (0, 1, 10, len(whole) // 2, len(whole) - 30):
        with pytest.raises(InputError, match=r"cut\.png is not a readable image"):
            decode_picture(Media(whole[:length], name="cut.png"))


@given(st.integers(1, 300), st.integers(1, 300))
def test_every_limit_holds_exactly(width: int, height: int) -> None:
    long, short = max(width, height), min(width, height)
    with patch.multiple("dejakv.pictures", MAX_PIXELS=20_000, MAX_SIDE=250, MAX_RATIO=10):
        if width * height <= 20_000 and long <= 250 and long <= 10 * short:
            media, work = check_picture(png(width, height), "x")
            assert width * height <= work <= width * height + len(media.data)
            assert decode_picture(media).size == (width, height)
        else:
            with pytest.raises(InputError, match=f"x has {width} x {height} pixels: make "):
                check_picture(png(width, height), "x")


@given(st.data())
def test_damage_is_an_input_error_or_no_matter(data: st.DataObject) -> None:
    whole = bytearray(data.draw(st.sampled_from([saved("PNG"), saved("JPEG"), saved("WEBP"), GOOD])))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with suppress(InputError):
        assert decode_picture(check_picture(bytes(whole), "x")[0]).mode == "RGB"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(9))
def test_pictures_are_turned_as_transformers_turns_them(kind: str, orientation: int) -> None:
    from transformers.image_utils import load_image

    data = oriented(kind, orientation)
    with Image.open(BytesIO(data)) as image:
        expected = load_image(image)
    picture = decode_picture(Media(data))
    assert (picture.size, picture.tobytes()) == (expected.size, expected.tobytes())
    assert (picture.size == (32, 48)) is (orientation > 4)


def test_ordinary_pictures_are_within_the_limit_of_work() -> None:
    """A phone's picture with a film behind its end, in which bytes look like scans; a progressive one of 12 megapixels."""
    film = b"\xff\xda\0\2" * 5_000
    for data in (
        saved("JPEG", (4_000, 3_000)) + film,
        saved("JPEG", (4_000, 3_000), progressive=True),
        many_scans(64, 99),
    ):
        media, work = check_picture(data, "x")
        assert work <= 50_000_000
        assert decode_picture(media).mode == "RGB"


def test_sounds_are_no_pictures() -> None:
    with pytest.raises(InputError, match="audio is not supported"):
        decode_picture(Media(GOOD, "audio"))
