"""Whole conversations back from their pieces: what a rendered prompt says, message by message."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from kimi_k3_npu.chat.parse import AnswerParser, Tag, as_tags
from kimi_k3_npu.chat.render import Segment

_CONTROL = re.compile(r"(<\|[a-z_]+\|>)")
_IMAGE_SIZE = re.compile(r"image ([0-9]{1,9})x([0-9]{1,9})")


def parse_conversation(pieces: Iterable[Segment]) -> list[dict[str, Any]]:
    """The messages of a rendered conversation in OpenAI's form, without one that is merely opened to be generated.

    An image comes back as a part `{"type": "image", "size": (width, height)}`, and tools as a system message with
    `tools`. A system message that the format itself makes (tool choice, thinking effort, response format) has a `type`.
    """
    messages: list[dict[str, Any]] = []
    reader: _MessageReader | None = None
    for found in as_tags(_single_controls(pieces)):
        if reader is None:
            if isinstance(found, Tag) and found.kind == "open" and found.name == "message":
                reader = _MessageReader(found.attributes)
        elif reader.read(found):
            messages.append(reader.message())
            reader = None
    if reader is not None and not reader.is_empty:
        messages.append(reader.message())
    return messages


def _single_controls(pieces: Iterable[Segment]) -> Iterator[Segment]:
    """Pieces in which each control token stands by itself, also those of a rendered image."""
    for piece in pieces:
        parts = _CONTROL.split(piece.text) if piece.special else [piece.text]
        yield from (Segment(part, i % 2 == 1 and piece.special) for i, part in enumerate(parts) if part)


class _MessageReader:
    """One message, from after its opening tag."""

    def __init__(self, attributes: dict[str, str]) -> None:
        self._attributes = attributes
        self._answer = AnswerParser(thinking=None) if attributes.get("role") == "assistant" else None
        self._text = ""
        self._images: list[tuple[int, tuple[int, ...] | None]] = []  # each with the length of the text before it
        self._media: str | None = None  # what was said of an image so far

    @property
    def is_empty(self) -> bool:
        said = self._answer.answer if self._answer else None
        return not (self._text or self._images or (said and (said.content or said.reasoning or said.tool_calls)))

    def read(self, found: Tag | Segment) -> bool:
        """Read the next tag or text; whether the message has ended."""
        if isinstance(found, Segment) and found.special:
            self._read_media(found.text)
        elif isinstance(found, Segment) and self._media is not None:
            self._media += found.text
        elif self._answer:
            self._answer.read(found)
        elif isinstance(found, Segment):
            self._text += found.text
        return isinstance(found, Tag) and found.kind == "end"

    def _read_media(self, control: str) -> None:
        if control == "<|media_begin|>":
            self._media = ""
        elif control == "<|media_end|>" and self._media is not None:
            size = _IMAGE_SIZE.fullmatch(self._media)
            before = len(self._answer.answer.content if self._answer else self._text)
            self._images.append((before, tuple(map(int, size.groups())) if size else None))
            self._media = None

    def message(self) -> dict[str, Any]:
        role = self._attributes.get("role", "")
        if self._answer:
            message = self._answer.end().as_message()
            return message | {"content": self._content(message["content"])}
        content = self._content(self._text)
        if role == "tool":
            return {"role": role, "name": self._attributes.get("tool", ""), "content": content}
        if self._attributes.get("type") == "tool-declare" and (tools := _declared_tools(self._text)) is not None:
            return {"role": role, "tools": tools}
        message = {"role": role, "content": content}
        return message | {key: self._attributes[key] for key in ("name", "type") if key in self._attributes}

    def _content(self, text: str) -> str | list[dict[str, Any]]:
        if not self._images:
            return text
        parts: list[dict[str, Any]] = []
        done = 0
        for place, size in self._images:
            if place > done:
                parts.append({"type": "text", "text": text[done:place]})
            parts.append({"type": "image", "size": size})
            done = place
        return [*parts, {"type": "text", "text": text[done:]}] if done < len(text) else parts


def _declared_tools(text: str) -> Any:
    """The JSON between the fences of a tool declaration; None when there is none."""
    _, _, rest = text.partition("```json\n")
    try:
        return json.loads(rest.removesuffix("\n```"))
    except (ValueError, RecursionError):
        return None
