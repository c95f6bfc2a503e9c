"""Conversations as segments: pieces of text, each marked whether it may become control tokens.

Segments are encoded one by one, so that what a user writes is never read as markup. A tag opens as
`<|open|>name attributes<|sep|>` and closes as `<|close|>name<|sep|>`; a message then gets `<|end_of_msg|>`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kimi_k3_npu.chat.calls import Call, ChatError, Message, Result, calls_of, check_text, with_results_in_order

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
EFFORTS = ("low", "high", "max")
IMAGE_PARTS = ("image", "image_url")
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema."
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools."
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
_CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_RAW_JSON = (
    "The system is invoked with `response_format={format}`.\nYour response must be raw JSON data without markdown code "
    "blocks (```json) or any additional formatting."
)


class Segment(NamedTuple):
    """A piece of text; `special`: it may become control tokens."""

    text: str
    special: bool


class AttributeSegment(Segment):
    """An attribute of a tag, ` key="value"`. The published encoder encodes the key, `="`, the value and `"` apart."""

    @property
    def parts(self) -> tuple[str, str, str, str]:
        key, _, value = self.text.partition('="')
        return key, '="', value[:-1], '"'


class SegmentTokenizer(Protocol):
    """What `encode` needs of a tokenizer."""

    def encode_segment(self, text: str, special: bool) -> list[int]: ...


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    thinking: bool = True,
    effort: str | None = None,
    tool_choice: Any = None,
    response_format: Mapping[str, Any] | None = None,
    images: Sequence[str] = (),
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """The segments of a conversation in OpenAI's message form.

    Args:
        thinking: Whether the model thinks; without, no think block appears, those of the history neither.
        effort: low, high or max; only when thinking.
        tool_choice: required or none; other values say nothing to the model.
        images: The prompt text of each image (`image_prompt`), in order of appearance.
        add_generation_prompt: End with the opened answer.

    Raises ChatError for an unknown role or effort, a tool result that answers nothing, arguments that are JSON but no
    object, and more or fewer images than the messages refer to.
    """
    prompts = iter(images)
    out: list[Segment] = []
    if tools:
        out += _system("tool-declare", f"{_TOOLS}\n\n```json\n{_sorted_json(tools)}\n```")
    if effort is not None and thinking:
        if effort not in EFFORTS:
            raise ChatError(f"thinking effort is {effort!r}; choices: {', '.join(EFFORTS)}")
        out += _system("thinking-effort", _EFFORT.format(effort=effort))
    for message, result in with_results_in_order(messages):
        out += _message(message, result, thinking, prompts)
    if next(prompts, None) is not None:
        raise ChatError(f"{len(images)} images were given, more than the messages refer to")
    if isinstance(tool_choice, str) and tool_choice in _CHOICES:
        out += _system("tool-choice", _CHOICES[tool_choice])
    out += _response_format(response_format)
    if add_generation_prompt:
        out += [*_tag("message", role="assistant"), *_tag("think" if thinking else "response")]
    return out


def image_prompt(width: int, height: int) -> str:
    """What stands for an image of the original size `width` x `height` in pixels."""
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"


def encode(tokenizer: SegmentTokenizer, segments: Iterable[Segment]) -> list[int]:
    """Token ids of the segments, each encoded alone."""
    ids: list[int] = []
    for segment in segments:
        for part in segment.parts if isinstance(segment, AttributeSegment) else (segment.text,):
            ids += tokenizer.encode_segment(part, segment.special)
    return ids


def _tag(name: str, /, **attributes: str) -> list[Segment]:
    escaped = {key: value.replace("&", "&amp;").replace('"', "&quot;") for key, value in attributes.items()}
    rest = [AttributeSegment(f' {key}="{value}"', False) for key, value in escaped.items()]
    return [Segment(OPEN, True), Segment(name, False), *rest, Segment(SEP, True)]


def _end(name: str) -> list[Segment]:
    return [Segment(CLOSE, True), Segment(name, False), Segment(SEP, True)]


def _text(text: str) -> list[Segment]:
    return [Segment(text, False)] if text else []


def _block(name: str, text: str, /, **attributes: str) -> list[Segment]:
    return [*_tag(name, **attributes), *_text(text), *_end(name)]


def _closed(content: list[Segment], /, **attributes: str) -> list[Segment]:
    return [*_tag("message", **attributes), *content, *_end("message"), Segment(END, True)]


def _system(kind: str, text: str) -> list[Segment]:
    return _closed(_text(text), role="system", type=kind)


def _message(message: Message, result: Result | None, thinking: bool, prompts: Iterator[str]) -> list[Segment]:
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role == "assistant":
        return _closed(_answer(message, thinking, prompts), role="assistant")
    if role == "tool" and result is not None:
        return _closed(_content(message, prompts), role="tool", tool=result.name, index=str(result.index))
    if role == "system" and message.get("tools"):
        return _system("tool-declare", f"{_MORE_TOOLS}\n\n```json\n{_sorted_json(message['tools'])}\n```")
    if role in ("user", "system"):
        if "content" not in message:
            raise ChatError(f"{role} message has no content; give text, or a list of parts")
        name = {"name": check_text(message["name"], f"name of a {role} message")} if message.get("name") else {}
        return _closed(_content(message, prompts), role=role, **name)
    raise ChatError(f"message role is {role!r}; roles: user, system, assistant, tool")


def _content(message: Message, prompts: Iterator[str]) -> list[Segment]:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return _text(content or "")
    if not isinstance(content, Sequence):
        raise ChatError(f"message content is of type {type(content).__name__}, expected text or a list of parts")
    out: list[Segment] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            out += _text(check_text(part.get("text"), "text of a content part"))
        elif kind in IMAGE_PARTS:
            prompt = next(prompts, None)
            if prompt is None:
                raise ChatError("the messages refer to more images than were given")
            out.append(Segment(prompt, True))
        else:
            raise ChatError(f"content part has type {kind!r}; types: text, {', '.join(IMAGE_PARTS)}")
    return out


def _answer(message: Message, thinking: bool, prompts: Iterator[str]) -> list[Segment]:
    out: list[Segment] = []
    if thinking:
        reasoning = check_text(message.get("reasoning_content") or message.get("reasoning") or "", "reasoning_content")
        out += _block("think", reasoning if reasoning.strip() else "")
    out += [*_tag("response"), *_content(message, prompts), *_end("response")]
    if calls := calls_of(message):
        out += _tag("tools")
        for index, call in enumerate(calls, 1):
            out += _call(call, index)
        out += _end("tools")
    return out


def _call(call: Call, index: int) -> list[Segment]:
    out = _tag("call", tool=call.name, index=str(index))
    arguments = call.arguments
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return [*out, *_block("json", call.arguments, type="object"), *_end("call")]
    elif arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(arguments, Mapping):
        found = _json_type(arguments)
        raise ChatError(f"arguments of tool call {call.name!r} are a JSON {found}, not an object")
    for key, value in arguments.items():
        text = value if isinstance(value, str) else _json(value)
        out += _block("argument", text, key=check_text(key, "argument's key"), type=_json_type(value))
    return [*out, *_end("call")]


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((str, "string"), (bool, "boolean"), ((int, float), "number"), (Mapping, "object")):
        if isinstance(value, kind):
            return name
    return "array"


def _response_format(wanted: Mapping[str, Any] | None) -> list[Segment]:
    kind = (wanted or {}).get("type")
    if wanted is None or kind not in ("json_object", "json_schema"):
        return []
    text = _RAW_JSON.format(format=kind)
    if kind == "json_schema":
        holder = wanted.get("json_schema")
        if not isinstance(holder, Mapping):
            raise ChatError("response_format has type json_schema but no json_schema with the schema in it")
        schema = _sorted_json(holder.get("schema", holder.get("json_schema", holder)))
        text += f"\nThe JSON data must match the following schema:\n```json\n{schema}\n```"
    return _system("response-format", text)


def _sorted_json(value: Any) -> str:
    return _json(value, sort_keys=True, separators=(",", ":"))


def _json(value: Any, **options: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, **options)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"a tool, schema or argument is no JSON: {error}") from None
