"""Pictures that harm: small files that are large once they are decoded, files that end early, formats nobody asked for."""

import base64
import struct
import zlib
from io import BytesIO
from typing import Any

from PIL import Image


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: bytes | None = None, extra: bytes = b"") -> bytes:
    """A grey PNG of one bit a pixel with `rows` as its pixels (black unless given), whatever that makes of it."""
    data = b"\0" * ((width + 7) // 8 + 1) * height if rows is None else rows
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    body = _chunk(b"IHDR", header) + extra + _chunk(b"IDAT", zlib.compress(data)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def saved(kind: str, size: tuple[int, int] = (8, 8), frames: int = 1, **options: Any) -> bytes:
    """A picture as Pillow writes it."""
    images = [Image.new("RGB", size, (40 * number, 0, 0)) for number in range(frames)]
    if frames > 1:
        options |= {"save_all": True, "append_images": images[1:]}
    file = BytesIO()
    images[0].save(file, kind, **options)
    return file.getvalue()


def text_bomb(kind: bytes) -> bytes:
    """A small picture with a chunk that is 30 MB once it is unpacked."""
    return png(8, 8, extra=_chunk(kind, b"k\0\0" + zlib.compress(b"a" * 30_000_000)))


def many_scans(size: int, scans: int) -> bytes:
    """A grey progressive JPEG, the last scan of which comes again and again; few bytes, and each passes over all pixels."""
    whole = saved("JPEG", (size, size), progressive=True)
    last = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + last * (scans - whole.count(b"\xff\xda")) + whole[-2:]


def arithmetic(size: int) -> bytes:
    """A JPEG whose frame header asks for arithmetic coding."""
    return saved("JPEG", (size, size)).replace(b"\xff\xc0", b"\xff\xc9", 1)


def oriented(kind: str, orientation: int) -> bytes:
    """A picture of 48 x 32 pixels with an orientation in its EXIF data; each quarter has a color of its own."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.new("RGB", (48, 32))
    for place, color in enumerate(("red", "lime", "blue", "white")):
        left, top = place % 2 * 24, place // 2 * 16
        image.paste(color, (left, top, left + 24, top + 16))
    file = BytesIO()
    image.save(file, kind, exif=exif)
    return file.getvalue()


def turned(data: bytes, orientation: int, *, named: bool = True) -> bytes:
    """A PNG that viewers show as `data`, with pixels that lie otherwise and the orientation in its EXIF data (not if `named` is false)."""
    ways = Image.Transpose
    back = {3: ways.ROTATE_180, 5: ways.TRANSPOSE, 6: ways.ROTATE_90, 8: ways.ROTATE_270}[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = BytesIO()
    Image.open(BytesIO(data)).convert("RGB").transpose(back).save(file, "PNG", **({"exif": exif} if named else {}))
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


GOOD = png(8, 8)
HARMFUL = {
    "a strip on end": (png(1, 1_000_000), "make the longer side shorter than 32,768"),
    "a strip lying": (png(1_000_000, 1), "make the longer side shorter than 32,768"),
    "a narrow one": (png(10, 2_000), "at most 100 times"),
    "many pixels": (png(7_100, 7_100), "make it smaller than 50,000,000 pixels"),
    "a header that lies": (png(60_000, 60_000, b"\0" * 1000), "not a readable image"),
    "no pixels": (png(0, 0, b""), "not a readable image"),
    "compressed text": (text_bomb(b"zTXt"), "not a readable image"),
    "a compressed profile": (text_bomb(b"iCCP"), "not a readable image"),
    "an animated PNG": (saved("PNG", frames=3), "animated"),
    "an animated WebP": (saved("WEBP", frames=3), "animated"),
    "half a PNG": (saved("PNG", (64, 64))[:-30], "not a readable image"),
    "GIF": (saved("GIF"), "not a readable image"),
    "TIFF": (saved("TIFF"), "not a readable image"),
    "BMP": (saved("BMP"), "not a readable image"),
    "a JPEG of 800 scans": (many_scans(64, 800), "has 800 scans, the limit is 100"),
    "a large JPEG of 40 scans": (many_scans(5_000, 40), "takes as long to decode as 112,"),
    "fill bytes before markers": (many_scans(64, 800).replace(b"\xff\xda", b"\xff\xff\xda"), "has 800 scans"),
    "a JPEG of many segments": (
        saved("JPEG")[:2] + b"\xff\xfe\0\2" * 10_000 + saved("JPEG")[2:],
        "more than 10,000 segments",
    ),
    "arithmetic coding": (arithmetic(64), "has arithmetic coding"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not a readable image"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not a readable image"),
    "a pickle": (b"\x80\x04cos\nsystem\n.", "not a readable image"),
    "nothing": (b"", "not a readable image"),
}
"""Files by what they are, and what the refusal says."""
