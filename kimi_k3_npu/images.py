"""Images to patches as a checkpoint's `preprocessor_config.json` says: shrunk to its limits, padded, normalised, cut.

Sizes are (width, height) in pixels, as everywhere in Pillow; grids are (frames, rows, columns) of patches.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import unquote, urlsplit

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from kimi_k3_npu.config import VisionConfig
from kimi_k3_npu.errors import KimiK3Error
from kimi_k3_npu.model.vision import Grid

Pattern = Literal["white", "black", "gray", "chessboard"]

SETTINGS_FILE = "preprocessor_config.json"
_NEEDED = ("patch_size", "merge_kernel_size", "in_patch_limit", "patch_limit_on_one_side", "image_mean", "image_std")
_BACKGROUND_KEYS = {
    "pattern": "pattern",
    "chessboard_square_size": "square",
    "chessboard_white_value": "white",
    "chessboard_gray_value": "gray",
    "chessboard_square_on_top_left": "white_on_top_left",
}
_PLAIN = {"white": 255, "black": 0, "gray": 128}
#: Formats whose further pictures are no animation: MPO has a smaller copy of, or a depth map for, its first.
_FIRST_IS_ALL = ("MPO",)
#: The alphabet of base64 in URLs, as the usual one.
_URL_SAFE = str.maketrans("-_", "+/")
_LONGEST_IN_MESSAGE = 200
#: PhotometricInterpretation of a TIFF whose level 0 is white. Pillow follows it for 8 bits and fewer.
_WHITE_IS_ZERO = 0


class ImageError(KimiK3Error):
    """An image that cannot be read or prepared, or settings for images that are missing or wrong."""


@dataclass(frozen=True)
class Background:
    """What shows through transparent pixels."""

    pattern: Pattern = "black"
    square: int = 16
    white: int = 255
    gray: int = 200
    white_on_top_left: bool = True

    def paint(self, width: int, height: int) -> np.ndarray:
        """uint8 [height, width, 1]."""
        if self.pattern != "chessboard":
            return np.full((height, width, 1), _PLAIN[self.pattern], np.uint8)
        rows, columns = np.arange(height) // self.square, np.arange(width) // self.square
        is_gray = (rows[:, None] + columns) % 2 == int(self.white_on_top_left)
        return np.where(is_gray, self.gray, self.white).astype(np.uint8)[..., None]


@dataclass(frozen=True)
class ImagePlan:
    """What becomes of an image of one size: the size it is shrunk to, and its grid once padded."""

    width: int
    height: int
    grid: Grid
    features: int


@dataclass(frozen=True)
class ImageBatch:
    """Images ready for the vision tower: all patches end to end, fp32 [P, 3, p, p], and what each image takes."""

    pixels: Tensor
    grids: list[Grid]
    #: Rows of the text model's input that each image fills.
    features: list[int]
    #: (width, height) as given, which the prompt tells the model.
    sizes: list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """`media_proc_cfg` of a checkpoint's `preprocessor_config.json`."""

    patch_size: int
    merge: int
    max_patches: int
    max_patches_on_one_side: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    background: Background | None
    fill_before_resize: bool

    @classmethod
    def from_folder(cls, folder: str | Path) -> ImageSettings:
        """Read `folder/preprocessor_config.json`. Raises ImageError when it is missing or wrong."""
        try:
            return cls.from_config(read_media_config(folder))
        except ImageError as error:
            raise ImageError(f"{Path(folder) / SETTINGS_FILE}: {error}") from None

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> ImageSettings:
        """Read a parsed `media_proc_cfg`. What it says of videos is not used. Raises ImageError."""
        if missing := [key for key in _NEEDED if raw.get(key) is None]:
            raise ImageError(f"media_proc_cfg does not say {', '.join(missing)}")
        if raw.get("fixed_output_tokens") is not None:
            raise ImageError(f"fixed_output_tokens = {raw['fixed_output_tokens']} is not supported, only null")
        stage = raw.get("transparent_bg_fill_stage", "before_resize")
        if stage not in ("before_resize", "after_resize"):
            raise ImageError(f"transparent_bg_fill_stage is {stage!r}; choices: before_resize, after_resize")
        return cls(
            patch_size=_positive(raw, "patch_size"),
            merge=_merge(raw["merge_kernel_size"]),
            max_patches=_positive(raw, "in_patch_limit"),
            max_patches_on_one_side=_positive(raw, "patch_limit_on_one_side"),
            mean=_three(raw, "image_mean"),
            std=_three(raw, "image_std"),
            background=_background(raw.get("transparent_bg_config")),
            fill_before_resize=stage == "before_resize",
        )

    def check(self, vision: VisionConfig) -> None:
        """Raise ImageError unless patches are cut as the vision tower takes them."""
        for what, here, there in (
            ("patch_size", self.patch_size, vision.patch_size),
            ("merge_kernel_size", (self.merge, self.merge), vision.merge_kernel_size),
        ):
            if here != there:
                raise ImageError(f"{SETTINGS_FILE} has {what} = {here}, config.json's vision_config has {there}")

    def plan(self, width: int, height: int) -> ImagePlan:
        """What becomes of an image of this size. It is never enlarged."""
        p, side = self.patch_size, self.max_patches_on_one_side * self.patch_size
        patches = max(1, width // p) * max(1, height // p)
        scale = min(1.0, math.sqrt(self.max_patches / patches), side / width, side / height)
        new_width, new_height = (min(max(1, int(edge * scale)), side) for edge in (width, height))
        rows, columns = (self.merge * math.ceil(edge / (self.merge * p)) for edge in (new_height, new_width))
        return ImagePlan(new_width, new_height, (1, rows, columns), rows * columns // self.merge**2)

    def preprocess(self, images: Sequence[Image.Image]) -> ImageBatch:
        """Patches of the images. Raises ImageError for one that has no pixels, is damaged, or is an animation."""
        plans, pixels = [], [torch.empty(0, 3, self.patch_size, self.patch_size)]
        for i, image in enumerate(images):
            try:
                plans.append(self.plan(*_checked_size(image)))
                pixels.append(torch.from_numpy(self._patches(image, plans[-1])))
            except ImageError as error:
                raise ImageError(f"image {i}: {error}" if len(images) > 1 else str(error)) from None
        sizes = [image.size for image in images]
        return ImageBatch(torch.cat(pixels), [plan.grid for plan in plans], [plan.features for plan in plans], sizes)

    def _patches(self, image: Image.Image, plan: ImagePlan) -> np.ndarray:
        """fp32 [rows * columns, 3, p, p]."""
        image = _in_colour(image)
        if self.fill_before_resize:
            image = self._fill(image)
        if image.size != (plan.width, plan.height):
            image = image.resize((plan.width, plan.height), Image.Resampling.BICUBIC)
        levels = np.asarray(self._fill(image))
        p, (_, rows, columns) = self.patch_size, plan.grid
        below, right = rows * p - plan.height, columns * p - plan.width
        levels = np.pad(levels, ((0, below), (0, right), (0, 0)))
        cut = np.ascontiguousarray(levels.reshape(rows, p, columns, p, 3).transpose(0, 2, 4, 1, 3)).reshape(-1, 3, p, p)
        table, patches = self._levels(), np.empty(cut.shape, np.float32)
        for colour in range(3):
            patches[:, colour] = table[:, colour].take(cut[:, colour])
        return patches

    def _levels(self) -> np.ndarray:
        """The normalised value of each of the 256 levels of each colour, fp32 [256, 3]."""
        table = np.repeat((np.arange(256) / 255.0).astype(np.float32)[:, None], 3, axis=1)
        table -= np.array(self.mean)
        table *= 1.0 / np.array(self.std)
        return table

    def _fill(self, image: Image.Image) -> Image.Image:
        """Lay the image over the background; without one, alpha is dropped."""
        if image.mode == "RGB" or self.background is None:
            return image.convert("RGB")
        levels = np.asarray(image)
        alpha = levels[..., 3:].astype(np.float32) / 255.0
        blended = alpha * levels[..., :3] + (1 - alpha) * self.background.paint(*image.size)
        return Image.fromarray(blended.astype(np.uint8))


def read_media_config(folder: str | Path) -> dict[str, Any]:
    """`media_proc_cfg` of `folder/preprocessor_config.json`, as it is. Raises ImageError when there is none."""
    file = Path(folder) / SETTINGS_FILE
    if not file.is_file():
        raise ImageError("missing; without it nothing says how images are prepared for this checkpoint")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ImageError(f"not valid JSON ({error})") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("media_proc_cfg"), dict):
        raise ImageError("has no media_proc_cfg")
    return raw["media_proc_cfg"]


def open_image(source: str | Path | bytes) -> Image.Image:
    """Read an image file, its bytes, or a `file:` or `data:` URL. Raises ImageError.

    The image is turned upright as its EXIF data say, and gray of more than 8 bits is taken to 8.
    """
    if isinstance(source, str):
        source = _source_of_url(source)
    name = "" if isinstance(source, bytes) else f"{_short(source)}: "
    try:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        if not data:
            raise ImageError("is empty")
        image = Image.open(io.BytesIO(data))
        _check_still(image)
        return ImageOps.exif_transpose(_eight_bits(image))
    except ImageError as error:
        raise ImageError(f"{name}{error}") from None
    except UnidentifiedImageError:
        raise ImageError(f"{name}not an image in a format that Pillow reads") from None
    except OSError as error:
        raise ImageError(f"{name}{error.strerror or _short(error)}") from None
    except Exception as error:  # decoders raise whatever damaged data make them run into
        raise ImageError(f"{name}cannot be read: {_short(error)}") from None


def _source_of_url(source: str) -> str | bytes:
    """The path or the bytes that a URL stands for; what is no URL is a path."""
    scheme, colon, rest = source.partition(":")
    if colon and scheme.lower() == "data":
        return _data_of_url(source)
    if colon and scheme.lower() == "file":
        return _path_of_url(source)
    if rest.startswith("//"):
        raise ImageError(f"{_short(source)}: is not fetched; give a file, or a data: URL with the image in it")
    return source


def _path_of_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc.lower() not in ("", "localhost"):
        raise ImageError(
            f"{_short(url)}: is a file of host {_short(parts.netloc)}; only files of this machine are read"
        )
    if parts.query or parts.fragment:
        raise ImageError(f"{_short(url)}: has ? or # in it, which a file: URL writes as %3F and %23")
    return unquote(parts.path)


def _data_of_url(url: str) -> bytes:
    """The bytes of a base64 `data:` URL: of either alphabet, with or without padding, in lines or in one."""
    header, comma, data = url.partition(",")
    if not comma or header.split(";")[-1].strip().lower() != "base64":
        raise ImageError(f"data: URL begins {url[:40]!r}, expected data:image/...;base64,...")
    plain = "".join((unquote(data) if "%" in data else data).split()).rstrip("=")
    try:
        return base64.b64decode(plain.translate(_URL_SAFE) + "=" * (-len(plain) % 4), validate=True)
    except ValueError as error:
        raise ImageError(f"data: URL is not base64: {_short(error)}") from None


def _short(what: object) -> str:
    """What an error says of something of any length."""
    text = str(what)
    return text if len(text) <= _LONGEST_IN_MESSAGE else f"{text[:_LONGEST_IN_MESSAGE]}..."


def _checked_size(image: Image.Image) -> tuple[int, int]:
    if not isinstance(image, Image.Image):
        raise ImageError(f"is of type {type(image).__name__}, expected a PIL image")
    if not image.width or not image.height:
        raise ImageError(f"has no pixels: it is {image.width}x{image.height}")
    return image.size


def _check_still(image: Image.Image) -> None:
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format not in _FIRST_IS_ALL:
        raise ImageError(f"has {frames} frames; give one of them (image.seek(n), then image.copy())")


def _in_colour(image: Image.Image) -> Image.Image:
    """The image as RGB, or as RGBA when it may be transparent, with its pixels read."""
    try:
        _check_still(image)
        image.load()
        if image.mode in ("F", "I"):
            raise ImageError(
                f"has pixels of mode {image.mode}, whose range is not known; convert it to 8 bits a colour"
            )
        image = _eight_bits(image)
        # As published, a colour that is to be transparent in an RGB image is not.
        return image.convert("RGBA" if image.mode != "RGB" and image.has_transparency_data else "RGB")
    except ImageError:
        raise
    except Exception as error:  # decoders raise whatever damaged data make them run into
        raise ImageError(f"cannot be read: {_short(error)}") from None


def _eight_bits(image: Image.Image) -> Image.Image:
    """Gray of 12 or 16 bits as 8 bits, with the alpha of the level that is to be transparent; others as they are."""
    if not image.mode.startswith("I;16"):
        return image
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    bits = tags.get(ExifTags.Base.BitsPerSample, (16,))[0]
    levels = np.asarray(image)
    gray = (levels >> (bits - 8)).astype(np.uint8)
    if tags.get(ExifTags.Base.PhotometricInterpretation) == _WHITE_IS_ZERO:
        gray = 255 - gray
    transparent = image.info.get("transparency")
    if transparent is None:
        converted = Image.fromarray(gray)
    else:
        alpha = np.where(levels == transparent, 0, 255).astype(np.uint8)
        converted = Image.fromarray(np.stack([gray, alpha], -1))
    if (orientation := image.getexif().get(ExifTags.Base.Orientation)) is not None:
        converted.getexif()[ExifTags.Base.Orientation] = orientation
    return converted


def _positive(raw: Mapping[str, Any], key: str) -> int:
    value = raw[key]
    if not isinstance(value, int) or value < 1:
        raise ImageError(f"{key} is {value!r}, expected a positive integer")
    return value


def _merge(value: Any) -> int:
    pair = list(value) if isinstance(value, Sequence) else [value, value]
    if len(pair) != 2 or pair[0] != pair[1] or not isinstance(pair[0], int) or pair[0] < 1:
        raise ImageError(f"merge_kernel_size is {value!r}, expected a positive integer or the same one twice")
    return pair[0]


def _three(raw: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    value = raw[key]
    numbers = [float(x) for x in value if isinstance(x, (int, float))] if isinstance(value, Sequence) else []
    if len(numbers) != 3 or (key == "image_std" and 0.0 in numbers):
        raise ImageError(f"{key} is {value!r}, expected three numbers" + ", none of them 0" * (key == "image_std"))
    return numbers[0], numbers[1], numbers[2]


def _background(raw: Any) -> Background | None:
    if raw is None:
        return None
    unknown = sorted(raw.keys() - _BACKGROUND_KEYS.keys()) if isinstance(raw, Mapping) else [repr(raw)]
    if unknown:
        raise ImageError(f"transparent_bg_config has {', '.join(unknown)}; its keys: {', '.join(_BACKGROUND_KEYS)}")
    background = Background(**{_BACKGROUND_KEYS[key]: value for key, value in raw.items()})
    if background.pattern not in get_args(Pattern) or background.square < 1:
        raise ImageError(f"transparent_bg_config is {raw!r}; patterns: {', '.join(get_args(Pattern))}")
    return background
