"""Tool calls of a conversation, and which call each tool result answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from kimi_k3_npu.errors import KimiK3Error

Message = Mapping[str, Any]


class ChatError(KimiK3Error):
    """A conversation that the format cannot express."""


@dataclass(frozen=True)
class Call:
    """A tool call of an assistant message."""

    id: str | None
    name: str
    arguments: Any


def calls_of(message: Message) -> list[Call]:
    """The calls of an assistant message. Raises ChatError when they are not in OpenAI's form."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise ChatError("tool_calls is not a list of calls")
    out = []
    for call in calls:
        function = call.get("function", call)
        name = function.get("name") if isinstance(function, Mapping) else None
        identity = call.get("id")
        found = check_text(name, "name of a tool call's function")
        out.append(Call(None if identity is None else str(identity), found, function.get("arguments")))
    return out


@dataclass(frozen=True)
class Result:
    """What a tool result answers: its place among the results since the last assistant message, and the tool."""

    index: int
    name: str


def with_results_in_order(messages: Sequence[Message]) -> Iterator[tuple[Message, Result | None]]:
    """The messages, runs of tool results put in the order of the calls they answer when every one names its call."""
    calls: list[Call] = []
    answered = position = 0
    while position < len(messages):
        message = messages[position]
        if not isinstance(message, Mapping):
            raise ChatError(f"message {position} is of type {type(message).__name__}, expected a mapping with a role")
        if message.get("role") != "tool":
            if message.get("role") == "assistant":
                calls, answered = calls_of(message), 0
            yield message, None
            position += 1
            continue
        run = list(takewhile(_is_result, messages[position:]))
        position += len(run)
        for result, name in _named_results(run, calls, answered):
            answered += 1
            yield result, Result(answered, name)


def _is_result(message: Message) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "tool"


def _named_results(run: list[Message], calls: Sequence[Call], answered: int) -> Iterator[tuple[Message, str]]:
    places: dict[str, int] = {}
    for place, call in enumerate(calls):
        if call.id is not None:
            places.setdefault(call.id, place)
    identities = [result.get("tool_call_id", result.get("id")) for result in run]
    found = [None if identity is None else places.get(str(identity)) for identity in identities]
    matched = [(place, result) for place, result in zip(found, run, strict=True) if place is not None]
    if len(matched) == len(run):
        for place, result in sorted(matched, key=lambda pair: pair[0]):
            yield result, calls[place].name
        return
    for i, (own, result) in enumerate(zip(found, run, strict=True), answered):
        name = result.get("tool") or result.get("name") if own is None else calls[own].name
        if name is None and i < len(calls):
            name = calls[i].name
        if name is None:
            raise ChatError("a tool message answers no call and has no name: give tool_call_id or name")
        yield result, check_text(name, "name of a tool message")


def check_text(value: Any, what: str) -> str:
    """`value` if it is text, else a ChatError that says what is not."""
    if not isinstance(value, str):
        raise ChatError(f"{what} is {value!r}, expected text")
    return value
