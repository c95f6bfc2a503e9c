"""A conversation with images to what the model takes: token ids with a place for every image feature, and patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from kimi_k3_npu.chat.calls import ChatError, Message, with_results_in_order
from kimi_k3_npu.chat.render import IMAGE_PARTS, encode, image_prompt, render
from kimi_k3_npu.images import ImageBatch, ImageError, ImageSettings, open_image
from kimi_k3_npu.tokenizer import Tokenizer

MEDIA_PAD = "<|media_pad|>"
#: In text that is to be continued as it is, where an image goes. It is no control token.
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"


@dataclass(frozen=True)
class Prompt:
    """What the model reads; each image feature takes the place of one `<|media_pad|>` token."""

    token_ids: list[int]
    images: ImageBatch | None = None


def chat_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], settings: ImageSettings | None = None, **options: Any
) -> Prompt:
    """The prompt of a conversation; `options` as for `render`.

    Raises ChatError for a conversation that the format cannot express, ImageError for an image that cannot be used, or
    any image without `settings`.
    """
    images = images_of(messages)
    batch = _prepared(images, settings)
    prompts = [image_prompt(*size) for size in batch.sizes] if batch else []
    ids = encode(tokenizer, render(messages, images=prompts, **options))
    return _expanded(tokenizer, ids, batch)


def text_prompt(
    tokenizer: Tokenizer, text: str, images: Sequence[Image.Image] = (), settings: ImageSettings | None = None
) -> Prompt:
    """The prompt of text to be continued as it is, control tokens included.

    Images go where the text has `<|kimi_image_placeholder|>`, or in front of a text that has none.
    """
    batch = _prepared(images, settings)
    prompts = [image_prompt(*size) for size in batch.sizes] if batch else []
    before, *after = text.split(IMAGE_PLACEHOLDER) if images else [text]
    if images and not after:
        text = "".join(prompts) + text
    elif len(after) != len(prompts):
        raise ChatError(f"the text has {len(after)} times {IMAGE_PLACEHOLDER}, for {len(prompts)} images")
    else:
        text = before + "".join(prompt + part for prompt, part in zip(prompts, after, strict=True))
    return _expanded(tokenizer, tokenizer.encode_segment(text, special=True), batch)


def images_of(messages: Sequence[Message]) -> list[Image.Image]:
    """The images of all messages in the order in which the prompt has them, those that are named read from where they
    are.

    A part holds a PIL image, a path, bytes or a `data:` URL as `image`, `image_url` (OpenAI's form), `path` or `url`.
    """
    parts: list[Any] = []
    for message, _ in with_results_in_order(messages):
        content = message.get("content") if isinstance(message, dict) else None
        parts += content if isinstance(content, (list, tuple)) else []
    return [_image(part) for part in parts if isinstance(part, dict) and part.get("type") in IMAGE_PARTS]


def expand_placeholders(ids: Sequence[int], placeholder: int, counts: Sequence[int]) -> list[int]:
    """`ids` with the n-th `placeholder` repeated counts[n] times. Raises ChatError when there are more or fewer."""
    if (found := sum(token == placeholder for token in ids)) != len(counts):
        raise ChatError(f"the prompt has places for {found} images, but {len(counts)} were given")
    repeats = iter(counts)
    return [token for token in ids for _ in range(next(repeats) if token == placeholder else 1)]


def _prepared(images: Sequence[Image.Image], settings: ImageSettings | None) -> ImageBatch | None:
    if not images:
        return None
    if settings is None:
        raise ImageError("there is an image, but this model runs without its vision weights, or has none")
    return settings.preprocess(images)


def _expanded(tokenizer: Tokenizer, ids: list[int], batch: ImageBatch | None) -> Prompt:
    if batch is None:
        return Prompt(ids)
    return Prompt(expand_placeholders(ids, tokenizer.control(MEDIA_PAD), batch.features), batch)


def _image(part: dict[str, Any]) -> Image.Image:
    source = next((part[key] for key in ("image", "image_url", "path", "url") if part.get(key) is not None), None)
    if isinstance(source, dict):
        source = source.get("url")
    if isinstance(source, Image.Image):
        return source
    if source is None:
        raise ChatError(f"an image part has none of image, image_url, path and url: its keys are {sorted(part)}")
    return open_image(source)
