"""Generated text back to reasoning, answer and tool calls, while it streams too. Nothing that a model can write raises.

The parser takes pieces as a tokenizer makes them of token ids: control tokens, which alone can be markup, and text.
What is cut off or nested wrongly is kept as far as it makes sense: an unclosed block ends where the text ends, stray
markup is dropped but no text with it, and a tool call that was cut off is not `complete`. The deltas of a stream add up
to the answer, wherever the stream is cut.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from kimi_k3_npu.chat.render import CLOSE, END, OPEN, SEP, Segment


@dataclass
class ToolCall:
    """One call: `arguments` is a JSON object as text, or the model's own text where that is not one.

    `id` follows from what the answer says up to the end of the call: it is the same at every parse, and no other call
    of the answer has it.
    """

    name: str
    arguments: str = "{}"
    complete: bool = False
    id: str = field(default="", compare=False)


@dataclass
class Answer:
    """An assistant message. `finished`: the model closed it itself."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finished: bool = False

    def as_message(self) -> dict[str, Any]:
        """The message in OpenAI's form, without what is empty and without calls that were cut off."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if calls := [call for call in self.tool_calls if call.complete]:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return message


@dataclass(frozen=True)
class Delta:
    """What one step added: text of the reasoning or of the answer, or a call that is now complete.

    `reasoning_was_content` adds no text: the reasoning so far turned out to be the content, and there is no reasoning.
    """

    kind: Literal["reasoning", "content", "tool_call", "reasoning_was_content"]
    text: str = ""
    call: ToolCall | None = None


@dataclass(frozen=True)
class Tag:
    """A tag that was read: `<|open|>name key="value"<|sep|>`, `<|close|>name<|sep|>`, or the end of a message."""

    kind: Literal["open", "close", "end"]
    name: str = ""
    attributes: dict[str, str] = field(default_factory=dict)


class TagReader:
    """Pieces to tags and text. A tag that the end cuts off is dropped; what only begins like one is text.

    Control tokens of no tag are left as they are.
    """

    def __init__(self) -> None:
        self._opened_by: str | None = None
        self._header = ""

    def feed(self, piece: Segment) -> list[Tag | Segment]:
        """The tags and text that the next piece completes."""
        if not piece.special:
            if self._opened_by is None:
                return [piece]
            self._header += piece.text
            begins = _NAME if self._opened_by == CLOSE else _HEADER_BEGINS
            may_be_tag = len(self._header) <= _LONGEST_HEADER and begins.fullmatch(self._header)
            return [] if may_be_tag else self._no_tag()
        if piece.text == SEP and self._opened_by and _HEADER.fullmatch(self._header):
            tag = _read_tag(self._opened_by, self._header)
            self._opened_by = None
            return [tag]
        found = self._no_tag()
        if piece.text in (OPEN, CLOSE):
            self._opened_by = piece.text
        elif piece.text == END:
            found.append(Tag("end"))
        else:
            found.append(piece)
        return found

    def _no_tag(self) -> list[Tag | Segment]:
        """What was taken for a tag's header, as the text that it is."""
        text, self._header, self._opened_by = self._header if self._opened_by else "", "", None
        return [Segment(text, False)] if text else []


class AnswerParser:
    """Reads a generated answer piece by piece.

    It begins inside the block that the prompt opened: think, or response without `thinking`; None: before any block.
    """

    def __init__(self, thinking: bool | None = True) -> None:
        self.answer = Answer()
        self._tags = TagReader()
        self._blocks = ["message"] if thinking is None else ["message", "think" if thinking else "response"]
        self._call: _CallReader | None = None

    def feed(self, piece: Segment) -> list[Delta]:
        """Read the next piece; what it added."""
        return [delta for found in self._tags.feed(piece) for delta in self.read(found)]

    def read(self, found: Tag | Segment) -> list[Delta]:
        """Read the next tag or text; what it added. After the end of the message, nothing."""
        if self.answer.finished:
            return []
        if isinstance(found, Segment):
            return [] if found.special else self._text(found.text)
        if found.kind == "open":
            return self._open(found)
        if found.kind == "close":
            return self._close(found.name)
        self.answer.finished = True
        return self._finish_call(complete=True)

    def end(self) -> Answer:
        """The answer, as far as it came."""
        self._finish_call(complete=False)
        return self.answer

    def _text(self, text: str) -> list[Delta]:
        block = self._blocks[-1] if self._blocks else ""
        if block == "think":
            self.answer.reasoning += text
            return [Delta("reasoning", text)]
        if block == "response":
            self.answer.content += text
            return [Delta("content", text)]
        if self._call:
            self._call.text(text)
        return []

    def _open(self, tag: Tag) -> list[Delta]:
        deltas = self._finish_call(complete=True) if tag.name == "call" else []
        if tag.name == "call":
            self.answer.tool_calls.append(ToolCall(tag.attributes.get("tool", "")))
            self._call = _CallReader(self.answer.tool_calls[-1])
        elif self._call:
            self._call.open(tag)
        if tag.name in (_BLOCKS_OF_CALLS if self._call else _BLOCKS):  # text in any other tag is that around it
            self._blocks.append(tag.name)
        return deltas

    def _close(self, name: str) -> list[Delta]:
        if name not in self._blocks:
            return self._skipped_thinking() if name == "response" else []
        deltas: list[Delta] = []
        while self._blocks:
            closed = self._blocks.pop()
            if self._call:
                self._call.close(closed)
            if closed in ("call", "tools"):
                deltas += self._finish_call(complete=True)
            if closed == name:
                break
        return deltas

    def _skipped_thinking(self) -> list[Delta]:
        """The model closed a response that it never opened: what it wrote into the think block was the response."""
        if self._blocks[-1:] != ["think"] or self.answer.content:
            return []
        self._blocks.pop()
        self.answer.content, self.answer.reasoning = self.answer.reasoning, ""
        return [Delta("reasoning_was_content")]

    def _finish_call(self, *, complete: bool) -> list[Delta]:
        if self._call is None:
            return []
        call, self._call = self._call.finish(), None
        call.complete = complete
        said = [self.answer.reasoning, self.answer.content, len(self.answer.tool_calls), call.name, call.arguments]
        call.id = f"call_{hashlib.sha256(json.dumps(said).encode()).hexdigest()[:24]}"
        return [Delta("tool_call", call=call)] if complete else []


class _CallReader:
    """Collects the arguments of one call: typed values by key, or one piece of JSON."""

    def __init__(self, call: ToolCall) -> None:
        self._call = call
        self._arguments: dict[str, str] = {}
        self._json: str | None = None
        self._current: Tag | None = None
        self._value = ""

    def open(self, tag: Tag) -> None:
        if tag.name in ("argument", "json"):
            self._store()
            self._current, self._value = tag, ""

    def text(self, text: str) -> None:
        if self._current:
            self._value += text

    def close(self, block: str) -> None:
        if self._current and block == self._current.name:
            self._store()

    def finish(self) -> ToolCall:
        self._store()
        pairs = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in self._arguments.items())
        self._call.arguments = "{" + ", ".join(pairs) + "}" if self._json is None else self._json
        return self._call

    def _store(self) -> None:
        tag, self._current = self._current, None
        if tag and tag.name == "json":
            self._json = self._value
        elif tag:
            is_json = tag.attributes.get("type", "string") != "string" and _is_json(self._value)
            value = self._value if is_json else json.dumps(self._value, ensure_ascii=False)
            self._arguments[tag.attributes.get("key", "")] = value


def parse_answer(pieces: Iterable[Segment], *, thinking: bool = True) -> Answer:
    """A whole generated answer, begun inside the think block (or the response, without thinking)."""
    parser = AnswerParser(thinking)
    for piece in pieces:
        parser.feed(piece)
    return parser.end()


def pieces_of_text(text: str) -> list[Segment]:
    """Pieces of decoded text in which control tokens are visible: for engines that hand on text and not token ids.

    Text that merely looks like a control token cannot be told apart here; from token ids it can.
    """
    parts = re.split("(" + "|".join(map(re.escape, (OPEN, CLOSE, SEP, END))) + ")", text)
    return [Segment(part, i % 2 == 1) for i, part in enumerate(parts) if part]


def as_tags(pieces: Iterable[Segment]) -> Iterator[Tag | Segment]:
    """The tags and the text between them."""
    reader = TagReader()
    return (found for piece in pieces for found in reader.feed(piece))


_LONGEST_HEADER = 8192
_BLOCKS = ("think", "response", "tools", "call")
_BLOCKS_OF_CALLS = (*_BLOCKS, "argument", "json")
_ATTRIBUTE = re.compile(r'\s([\w-]+)="([^"]*)"')
_GIVEN = r'(?:\s+[\w-]+=(?:"[^"]*"|[^\s"]*))*'
_NAME = re.compile(r"\s*[\w-]*\s*")
#: What stands between the control tokens of a tag that opens, and all that it can begin with.
_HEADER = re.compile(rf"\s*[\w-]*{_GIVEN}\s*")
_HEADER_BEGINS = re.compile(rf'\s*[\w-]*{_GIVEN}(?:\s*|\s+[\w-]+=?|\s+[\w-]+="[^"]*)')


def _read_tag(kind: str, header: str) -> Tag:
    name, space, rest = header.partition(" ")
    if kind == CLOSE:
        return Tag("close", header.strip())
    found = {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(space + rest)}
    return Tag("open", name.strip(), found)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
