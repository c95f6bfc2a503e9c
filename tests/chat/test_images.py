"""Images to patches: sizes, pixels against a plain loop over them, transparency, and images that are no good."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.images import ImageError, ImageSettings, open_image
from kimi_k3_npu.tiny import tiny_config

#: A busy machine is no fault of an example.
BOARD = {
    "pattern": "chessboard",
    "chessboard_square_size": 8,
    "chessboard_square_on_top_left": True,
    "chessboard_white_value": 255,
    "chessboard_gray_value": 180,
}
CONFIG: dict[str, Any] = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "in_patch_limit": 16384,
    "patch_limit_on_one_side": 512,
    "fixed_output_tokens": None,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.25, 0.2],
    "transparent_bg_config": BOARD,
    "transparent_bg_fill_stage": "after_resize",
}
SETTINGS = ImageSettings.from_config(CONFIG)


def image(width: int, height: int, mode: str = "RGB") -> Image.Image:
    levels = np.random.default_rng(width * height).integers(0, 256, (height, width, 4), np.uint8)
    return Image.fromarray(levels).convert(mode)


def changed(**values: Any) -> ImageSettings:
    return ImageSettings.from_config(CONFIG | values)


@pytest.mark.parametrize(
    ("size", "resized", "grid"),
    [
        ((640, 480), (640, 480), (36, 46)),
        ((1, 1), (1, 1), (2, 2)),
        ((28, 28), (28, 28), (2, 2)),
        ((29, 28), (29, 28), (2, 4)),
        ((20_000, 100), (7168, 35), (4, 512)),
        ((20_000, 1), (7168, 1), (2, 512)),
        ((1, 20_000), (1, 7168), (512, 2)),
        ((7168, 7168), (1792, 1792), (128, 128)),
        ((3000, 2000), (2202, 1468), (106, 158)),  # 214 * 142 patches of at most 16384
    ],
)
def test_sizes(size: tuple[int, int], resized: tuple[int, int], grid: tuple[int, int]) -> None:
    plan = SETTINGS.plan(*size)
    assert ((plan.width, plan.height), plan.grid) == (resized, (1, *grid))
    assert plan.features == grid[0] * grid[1] // 4


@given(width=st.integers(1, 100_000), height=st.integers(1, 100_000))
def test_limits(width: int, height: int) -> None:
    """By the rule's own words: never enlarged, one scale for both sides, within the limits on patches and sides."""
    plan = SETTINGS.plan(width, height)
    side = 512 * 14
    patches = max(1, width // 14) * max(1, height // 14)
    scale = min(1.0, math.sqrt(16384 / patches), side / width, side / height)
    assert plan.width == min(max(1, int(width * scale)), side) <= width
    assert plan.height == min(max(1, int(height * scale)), side) <= height
    _, rows, columns = plan.grid
    assert rows % 2 == columns % 2 == 0
    assert 0 <= rows * 14 - plan.height < 28
    assert 0 <= columns * 14 - plan.width < 28
    assert max(rows, columns) <= 512


def test_pixels() -> None:
    """Every pixel of every patch is where a loop over rows and columns of patches finds it."""
    source = image(50, 33)
    batch = SETTINGS.preprocess([source])
    assert (batch.grids, batch.features, batch.sizes) == ([(1, 4, 4)], [4], [(50, 33)])
    levels = np.zeros((56, 56, 3))  # padding has raw value 0
    levels[:33, :50] = np.asarray(source)
    normal = (levels / 255 - np.array([0.5, 0.4, 0.3])) / np.array([0.5, 0.25, 0.2])
    patches = [
        normal[14 * row : 14 * row + 14, 14 * column : 14 * column + 14] for row in range(4) for column in range(4)
    ]
    expected = torch.tensor(np.stack(patches)).permute(0, 3, 1, 2).float()
    torch.testing.assert_close(batch.pixels, expected, rtol=0, atol=1e-6)


def test_shrinking_is_bicubic() -> None:
    source = image(90, 60)
    settings = changed(in_patch_limit=4)
    plan = settings.plan(90, 60)
    assert (plan.width, plan.height) == (36, 24)
    by_hand = source.resize((36, 24), Image.Resampling.BICUBIC)
    small = changed(in_patch_limit=10**6).preprocess([by_hand])
    assert torch.equal(settings.preprocess([source]).pixels, small.pixels)


def test_several_are_as_one_by_one() -> None:
    sources = [image(50, 33), image(30, 80), image(28, 28, "L")]
    batch = SETTINGS.preprocess(sources)
    alone = [SETTINGS.preprocess([source]) for source in sources]
    assert torch.equal(batch.pixels, torch.cat([one.pixels for one in alone]))
    assert batch.grids == [one.grids[0] for one in alone]
    assert SETTINGS.preprocess([]).pixels.shape == (0, 3, 14, 14)


class TestTransparency:
    def levels(self, source: Image.Image, **values: Any) -> np.ndarray:
        """The raw levels, [height, width, 3], of an image of 28x28."""
        settings = changed(image_mean=[0, 0, 0], image_std=[1, 1, 1], **values)
        pixels = settings.preprocess([source]).pixels.view(2, 2, 3, 14, 14).permute(0, 3, 1, 4, 2).reshape(28, 28, 3)
        return (pixels * 255).round().numpy()

    def test_chessboard(self) -> None:
        levels = self.levels(Image.new("RGBA", (28, 28)))
        expected = [[255 if (row // 8 + column // 8) % 2 == 0 else 180 for column in range(28)] for row in range(28)]
        assert (levels == np.array(expected)[..., None]).all()
        swapped = self.levels(
            Image.new("RGBA", (28, 28)), transparent_bg_config=BOARD | {"chessboard_square_on_top_left": False}
        )
        assert (levels + swapped == 435).all()

    @pytest.mark.parametrize(("pattern", "level"), [("white", 255), ("black", 0), ("gray", 128)])
    def test_plain(self, pattern: str, level: int) -> None:
        source = Image.new("RGBA", (28, 28), (100, 50, 0, 51))
        levels = self.levels(source, transparent_bg_config={"pattern": pattern})
        expected = [int(0.2 * colour + 0.8 * level + 1e-4) for colour in (100, 50, 0)]
        assert (levels == expected).all()

    def test_default_squares(self) -> None:
        levels = self.levels(Image.new("RGBA", (28, 28)), transparent_bg_config={"pattern": "chessboard"})
        assert levels[0, 15, 0] == 255
        assert levels[0, 16, 0] == 200

    def test_without_a_background_alpha_is_dropped(self) -> None:
        levels = self.levels(Image.new("RGBA", (28, 28), (100, 50, 0, 51)), transparent_bg_config=None)
        assert (levels == [100, 50, 0]).all()

    def test_stage(self) -> None:
        """Squares are of the shrunk image after the resize, and shrink with it before."""
        source, limit = Image.new("RGBA", (56, 56)), {"in_patch_limit": 4}
        after = self.levels(source, **limit)
        before = self.levels(source, **limit, transparent_bg_fill_stage="before_resize")
        assert list(after[0, :12, 0]) == [255] * 8 + [180] * 4
        assert before[0, 0, 0] == 255
        assert before[0, 6, 0] < 200

    @pytest.mark.parametrize("mode", ["LA", "P", "L"])
    def test_other_modes_with_transparency(self, mode: str) -> None:
        source = Image.new("RGBA", (28, 28), (90, 90, 90, 0)).convert(mode)
        if mode in ("P", "L"):
            source.info["transparency"] = source.getpixel((0, 0))
        assert self.levels(source)[0, 0, 0] == 255


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "I;16", "RGBA"])
def test_modes(mode: str) -> None:
    """A picture of one colour comes out in that colour, however it is stored."""
    gray = Image.new("L", (28, 28), 255)
    source = (
        Image.fromarray(np.full((28, 28), 65535, np.uint16)) if mode == "I;16" else gray.convert("RGB").convert(mode)
    )
    assert source.mode == mode
    levels = changed(image_mean=[0, 0, 0], image_std=[1, 1, 1]).preprocess([source]).pixels
    assert (levels > 0.99).all()


def test_cmyk_file(tmp_path: Path) -> None:
    Image.new("RGB", (28, 28), (200, 30, 60)).convert("CMYK").save(tmp_path / "print.jpg", quality=100)
    levels = changed(image_mean=[0, 0, 0], image_std=[1, 1, 1]).preprocess([open_image(tmp_path / "print.jpg")]).pixels
    torch.testing.assert_close(levels.mean((0, 2, 3)) * 255, torch.tensor([200.0, 30, 60]), rtol=0, atol=4)


class TestOpening:
    @pytest.fixture
    def png(self) -> bytes:
        out = io.BytesIO()
        image(40, 30).save(out, "PNG")
        return out.getvalue()

    def message(self, source: Any) -> str:
        with pytest.raises(ImageError) as error:
            SETTINGS.preprocess([open_image(source)])
        return str(error.value)

    def test_ways(self, png: bytes, tmp_path: Path) -> None:
        file = tmp_path / "a b.png"
        file.write_bytes(png)
        url = "data:image/png;base64," + base64.b64encode(png).decode()
        for source in (file, str(file), f"file://{file}", png, url):
            assert open_image(source).tobytes() == image(40, 30).tobytes()

    def test_upright(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6  # to be turned by 90 degrees
        image(40, 30).save(tmp_path / "phone.jpg", exif=exif)
        assert open_image(tmp_path / "phone.jpg").size == (30, 40)

    def test_files(self, png: bytes, tmp_path: Path) -> None:
        def named(data: bytes, name: str = "x.png") -> Path:
            (tmp_path / name).write_bytes(data)
            return tmp_path / name

        assert self.message(named(b"")) == f"{tmp_path}/x.png: is empty"
        assert "not an image in a format that Pillow reads" in self.message(named(b"not an image"))
        assert "x.png: No such file" in self.message(tmp_path / "nowhere" / "x.png")
        for length in range(20, len(png) - 20, 97):
            assert "x.png: " in self.message(named(png[:length]))
        assert "is not fetched; give a file, or a data: URL" in self.message("https://example.com/cat.png")
        assert "data: URL is not base64" in self.message("data:image/png;base64,%%%")
        assert "data: URL begins 'data:image/png,abc'" in self.message("data:image/png,abc")

    def test_truncated_jpeg(self, tmp_path: Path) -> None:
        out = io.BytesIO()
        image(400, 300).save(out, "JPEG")
        assert "truncated" in self.message(out.getvalue()[:-2000])
        lazy = Image.open(io.BytesIO(out.getvalue()[:-2000]))
        with pytest.raises(ImageError, match="cannot be read: image file is truncated"):
            SETTINGS.preprocess([lazy])

    @pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
    def test_animated(self, kind: str) -> None:
        out = io.BytesIO()
        image(40, 30).save(out, kind, save_all=True, append_images=[image(40, 31).resize((40, 30))])
        assert "has 2 frames; give one of them" in self.message(out.getvalue())
        with pytest.raises(ImageError, match="has 2 frames"):
            SETTINGS.preprocess([Image.open(out)])
        still = Image.open(out)
        still.seek(1)
        assert SETTINGS.preprocess([still.copy()]).features == [4]

    def test_phone_pictures_with_a_second_one(self) -> None:
        out = io.BytesIO()
        image(40, 30).save(out, "MPO", save_all=True, append_images=[image(20, 15)])
        assert open_image(out.getvalue()).size == (40, 30)

    def test_wide(self, tmp_path: Path) -> None:
        image(20_000, 20).save(tmp_path / "wide.png")
        batch = SETTINGS.preprocess([open_image(tmp_path / "wide.png")])
        assert (batch.grids, batch.features, batch.sizes) == ([(1, 2, 512)], [256], [(20_000, 20)])

    def test_too_many_pixels(self) -> None:
        out = io.BytesIO()
        Image.new("1", (20_000, 20_000)).save(out, "PNG")
        assert "exceeds limit" in self.message(out.getvalue())

    def test_no_image(self) -> None:
        for source, wanted in (
            (Image.new("RGB", (0, 5)), "has no pixels: it is 0x5"),
            (np.zeros((2, 2, 3)), "is of type ndarray, expected a PIL image"),
            (Image.new("F", (5, 5)), "mode F, whose range is not known"),
        ):
            with pytest.raises(ImageError, match=wanted):
                SETTINGS.preprocess([source])
        with pytest.raises(ImageError, match="image 1: has no pixels"):
            SETTINGS.preprocess([image(5, 5), Image.new("RGB", (0, 5))])


class TestSettings:
    @pytest.mark.parametrize(
        ("values", "wanted"),
        [
            ({"patch_size": None, "image_std": None}, "does not say patch_size, image_std"),
            ({"patch_size": 0}, "patch_size is 0, expected a positive integer"),
            ({"in_patch_limit": "many"}, "in_patch_limit is 'many', expected a positive integer"),
            ({"merge_kernel_size": [2, 3]}, r"merge_kernel_size is \[2, 3\]"),
            ({"image_mean": [0.5]}, r"image_mean is \[0.5\], expected three numbers"),
            ({"image_std": [0.5, 0, 0.5]}, r"image_std is .*, expected three numbers, none of them 0"),
            ({"fixed_output_tokens": 64}, "fixed_output_tokens = 64 is not supported"),
            ({"transparent_bg_fill_stage": "never"}, "choices: before_resize, after_resize"),
            ({"transparent_bg_config": {"pattern": "pink"}}, "patterns: white, black, gray, chessboard"),
            ({"transparent_bg_config": {"colour": 3}}, "transparent_bg_config has colour; its keys: pattern"),
            ({"transparent_bg_config": "white"}, "transparent_bg_config has 'white'; its keys"),
        ],
    )
    def test_mistakes(self, values: dict[str, Any], wanted: str) -> None:
        with pytest.raises(ImageError, match=wanted):
            changed(**values)

    def test_other_forms(self) -> None:
        assert changed(merge_kernel_size=[2, 2], sample_fps=2.0) == SETTINGS
        plain = ImageSettings.from_config({key: value for key, value in CONFIG.items() if "transparent" not in key})
        assert (plain.background, plain.fill_before_resize) == (None, True)

    def test_folder(self, tmp_path: Path) -> None:
        def write(text: str) -> None:
            (tmp_path / "preprocessor_config.json").write_text(text)

        def message() -> str:
            with pytest.raises(ImageError) as error:
                ImageSettings.from_folder(tmp_path)
            return str(error.value)

        assert message().startswith(f"{tmp_path}/preprocessor_config.json: missing; without it nothing says how")
        write("{")
        assert "preprocessor_config.json: not valid JSON" in message()
        write("{}")
        assert "preprocessor_config.json: has no media_proc_cfg" in message()
        write(json.dumps({"media_proc_cfg": {}}))
        assert "preprocessor_config.json: media_proc_cfg does not say patch_size" in message()
        write(json.dumps({"media_proc_cfg": CONFIG}))
        assert ImageSettings.from_folder(tmp_path) == SETTINGS

    def test_against_the_tower(self, changed_vision: Callable[..., Any]) -> None:
        SETTINGS.check(changed_vision())
        with pytest.raises(ImageError, match=r"has patch_size = 14, config\.json's vision_config has 16"):
            SETTINGS.check(changed_vision(patch_size=16))

    @pytest.fixture
    def changed_vision(self) -> Callable[..., Any]:
        from dataclasses import replace

        vision = KimiK3Config.from_hf(tiny_config()).vision
        return lambda **values: replace(vision, **values)
