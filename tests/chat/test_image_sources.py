"""Images as users name and store them: URLs of files and of data, gray of many bits, and messages about bad ones."""

from __future__ import annotations

import base64
import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kimi_k3_npu.images import Background, ImageError, ImageSettings, open_image

SIDE = 8


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    file = tmp_path / "a b#?%.png"
    Image.new("RGB", (SIDE, SIDE), (9, 9, 9)).save(file)
    return file


def level(source: str | Path | bytes) -> float:
    return float(np.asarray(open_image(source).convert("L")).mean())


def message(source: str | bytes) -> str:
    with pytest.raises(ImageError) as error:
        open_image(source)
    return str(error.value)


def test_file_urls(picture: Path) -> None:
    url = picture.as_uri()
    assert "a%20b%23%3F%25.png" in url
    path = url.removeprefix("file://")
    for source in (url, f"file://localhost{path}", f"FILE://LocalHost{path}", f"file:{path}"):
        assert level(source) == 9
    assert "is a file of host example.com; only files of this machine are read" in message(f"file://example.com{path}")
    assert "has ? or # in it" in message("file:///a?b.png")
    assert (
        message(f"file://{picture.parent}/no%20where.png")
        == f"{picture.parent}/no where.png: No such file or directory"
    )


def test_data_urls(picture: Path) -> None:
    data = base64.b64encode(picture.read_bytes()).decode()
    wrapped = base64.encodebytes(picture.read_bytes()).decode()
    for text in (
        data,
        wrapped,
        wrapped.replace("\n", "\r\n"),
        data.rstrip("="),
        data.replace("+", "-").replace("/", "_"),
    ):
        assert level(f"data:image/png;base64,{text}") == 9
    escaped = data.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
    assert level(f"data:image/png;base64,{escaped}") == 9
    for header in (
        "data:;base64",
        "DATA:image/png;BASE64",
        "data:image/png;charset=utf-8;base64",
        "data:image/png; base64",
    ):
        assert level(f"{header},{data}") == 9
    assert "data: URL is not base64" in message("data:image/png;base64,a")
    assert "data: URL is not base64" in message("data:image/png;base64,ab!d")
    assert message("data:image/png;base64,") == "is empty"


def tiff(bits: int, photometric: int, data: bytes, orientation: int = 1) -> bytes:
    """A gray TIFF of one strip."""
    short, long = 3, 4
    entries = [(256, short, SIDE), (257, short, SIDE), (258, short, bits), (259, short, 1), (262, short, photometric)]
    entries += [(273, long, 8), (274, short, orientation), (277, short, 1), (278, short, SIDE), (279, long, len(data))]
    table = b"".join(
        struct.pack("<HHI", tag, kind, 1)
        + (struct.pack("<HH", value, 0) if kind == short else struct.pack("<I", value))
        for tag, kind, value in entries
    )
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(entries)) + table + bytes(4)


@pytest.mark.parametrize(
    ("bits", "photometric", "pair", "expected"),
    [
        (12, 1, b"\xff\xff\xff", 255),
        (12, 1, b"\x80\x08\x00", 128),
        (16, 1, b"\xff\xff\xff\xff", 255),
        (16, 1, b"\x00\x80\x00\x80", 128),
        (16, 0, b"\x00\x00\x00\x00", 255),
        (16, 0, b"\xff\xff\xff\xff", 0),
        (8, 0, b"\x00\x00", 255),
    ],
)
def test_gray_of_many_bits(bits: int, photometric: int, pair: bytes, expected: int) -> None:
    data = tiff(bits, photometric, pair * (SIDE * SIDE // 2))
    assert level(data) == expected
    unread = np.asarray(settings().preprocess([Image.open(io.BytesIO(data))]).pixels)
    assert np.abs(unread * 255 - expected).max() < 1e-3


def test_gray_is_turned_upright() -> None:
    rows = np.zeros((SIDE, SIDE), "<u2")
    rows[0] = 65535
    turned = np.asarray(open_image(tiff(16, 1, rows.tobytes(), orientation=3)).convert("L"))
    assert turned[-1].tolist() == [255] * SIDE
    assert turned[:-1].max() == 0


def settings() -> ImageSettings:
    return ImageSettings(
        patch_size=SIDE,
        merge=1,
        max_patches=4,
        max_patches_on_one_side=4,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        background=Background("white"),
        fill_before_resize=True,
    )


def test_transparent_gray_of_16_bits() -> None:
    """One level of 65,536 is transparent, and not its neighbours that look the same at 8 bits."""
    levels = np.full((SIDE, SIDE), 0x1200, np.uint16)
    levels[0] = 0x1234
    file = io.BytesIO()
    Image.fromarray(levels).save(file, "PNG", transparency=0x1234)
    image = open_image(file.getvalue())
    alpha = np.asarray(image.convert("RGBA"))[..., 3]
    assert (alpha[0].tolist(), alpha[1:].min()) == ([0] * SIDE, 255)
    for given in (image, Image.open(io.BytesIO(file.getvalue()))):
        pixels = np.asarray(settings().preprocess([given]).pixels)[0]
        assert np.abs(pixels[:, 0] - 1).max() < 1e-6
        assert np.abs(pixels[:, 1:] - 0x12 / 255).max() < 1e-6


@pytest.mark.parametrize("source", ["x" * 100_000, "https://" + "x" * 100_000, "data:image/png," + "x" * 100_000])
def test_messages_are_short(source: str) -> None:
    assert len(message(source)) < 400
