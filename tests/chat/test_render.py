"""Conversations against the oracle's segments, their token ids, and every mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_k3_npu.chat.calls import ChatError
from kimi_k3_npu.chat.render import AttributeSegment, Segment, encode, image_prompt, render
from kimi_k3_npu.tokenizer import Tokenizer

CASES = json.loads((Path(__file__).parents[1] / "oracle" / "chat.json").read_text(encoding="utf-8"))
USER = {"role": "user", "content": "hi"}


def rendered(case: dict[str, Any]) -> list[Segment]:
    given = dict(case["input"])
    given["add_generation_prompt"] = given.pop("gen", True)
    return render(given.pop("messages"), **given)


def text(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
class TestOracle:
    def test_every_conversation_renders_to_exactly_its_segments(self, case: dict) -> None:
        assert [list(segment) for segment in rendered(case)] == case["segments"]

    def test_token_ids_are_those_of_each_segment_alone(self, case: dict, tokenizer: Tokenizer) -> None:
        alone = [tokenizer.encode_segment(part, special) for part, special in case["segments"]]
        assert encode(tokenizer, rendered(case)) == [token for ids in alone for token in ids]

    def test_control_tokens_are_those_of_the_format(self, case: dict, tokenizer: Tokenizer) -> None:
        found = [tokenizer.name(token) for token in encode(tokenizer, rendered(case)) if tokenizer.name(token)]
        expected = [
            piece.text
            for part, special in case["segments"]
            if special
            for piece in tokenizer.pieces(tokenizer.encode_segment(part, True))
            if piece.special
        ]
        assert found == expected


def test_attributes_are_encoded_in_four_parts(tokenizers: dict[str, Tokenizer]) -> None:
    """As the published encoder does, which matters where a value begins or ends with a sign: `="_` is one token."""
    segment = AttributeSegment(' key="_id"', False)
    assert segment.parts == (" key", '="', "_id", '"')
    assert segment == Segment(' key="_id"', False)
    assert AttributeSegment(' key="a="b"', False).parts == (" key", '="', 'a="b', '"')
    published = tokenizers["published"]
    whole = [published.vocabulary[token] for token in published.encode_segment(segment.text, False)]
    parts = [published.vocabulary[token] for token in encode(published, [segment])]
    assert b'="_' in whole
    assert b'="' in parts
    assert b'="_' not in parts
    assert b"".join(whole) == b"".join(parts)
    assert encode(published, [Segment(segment.text, False)]) == published.encode_segment(segment.text, False)


class TestToolResults:
    CALLS = [  # noqa: RUF012
        {"id": "a", "function": {"name": "first", "arguments": {}}},
        {"id": "b", "function": {"name": "second", "arguments": {}}},
        {"function": {"name": "third", "arguments": {}}},
    ]

    def results(self, *messages: dict[str, Any]) -> list[tuple[str, str, str]]:
        """Tool, index and content of each result after the calls."""
        history = [USER, {"role": "assistant", "content": "", "tool_calls": self.CALLS}, *messages]
        parts = text(render(history, add_generation_prompt=False)).split('message role="tool" tool="')[1:]
        found = []
        for part in parts:
            tool, _, rest = part.partition('" index="')
            index, _, rest = rest.partition('"<|sep|>')
            found.append((tool, index, rest.partition("<|close|>")[0]))
        return found

    def test_in_the_order_of_the_calls(self) -> None:
        second = {"role": "tool", "tool_call_id": "b", "content": "2", "name": "stale"}
        first = {"role": "tool", "tool_call_id": "a", "content": "1"}
        assert self.results(second, first) == [("first", "1", "1"), ("second", "2", "2")]

    def test_counted_as_they_come(self) -> None:
        assert self.results({"role": "tool", "tool_call_id": "b", "content": "2"}) == [("second", "1", "2")]

    def test_one_that_answers_no_call_keeps_all_in_place(self) -> None:
        second = {"role": "tool", "tool_call_id": "b", "content": "2"}
        assert self.results(second, {"role": "tool", "content": "x", "name": "given"}) == [
            ("second", "1", "2"),
            ("given", "2", "x"),
        ]
        assert self.results({"role": "tool", "tool_call_id": "lost", "content": "x"}, second) == [
            ("first", "1", "x"),
            ("second", "2", "2"),
        ]

    def test_counting_goes_on_until_the_next_answer(self) -> None:
        lost = {"role": "tool", "content": "x"}
        assert self.results(lost, USER, lost) == [("first", "1", "x"), ("second", "2", "x")]
        with pytest.raises(ChatError, match="answers no call and has no name"):
            self.results(lost, lost, lost, lost)

    def test_calls_without_a_function_around_them(self) -> None:
        call = {"name": "f", "arguments": '{"x": 1}'}
        assert 'call tool="f" index="1"' in text(render([{"role": "assistant", "tool_calls": [call]}]))


def test_arguments() -> None:
    def arguments(given: Any) -> str:
        call = {"function": {"name": "f", "arguments": given}}
        whole = text(render([{"role": "assistant", "tool_calls": [call]}]))
        return whole.partition('index="1"<|sep|>')[2].partition("<|close|>call")[0]

    assert arguments(None) == arguments("") == arguments(" \n") == arguments({}) == arguments("{}") == ""
    assert arguments('{"k&\\"": 1.50}') == (
        '<|open|>argument key="k&amp;&quot;" type="number"<|sep|>1.5<|close|>argument<|sep|>'
    )
    assert arguments({"a": (1, "ü")}) == '<|open|>argument key="a" type="array"<|sep|>[1, "ü"]<|close|>argument<|sep|>'
    assert arguments("{'a': 1}") == "<|open|>json type=\"object\"<|sep|>{'a': 1}<|close|>json<|sep|>"
    assert arguments("1" * 5000).startswith('<|open|>json type="object"<|sep|>111')  # more digits than Python reads


def test_other_names() -> None:
    assert render([{"role": "developer", "content": "x"}]) == render([{"role": "system", "content": "x"}])
    with_reasoning = {"role": "assistant", "content": "x"}
    assert render([with_reasoning | {"reasoning": "r"}]) == render([with_reasoning | {"reasoning_content": "r"}])
    schema = {"type": "object"}
    for holder in ({"schema": schema}, {"json_schema": schema}, schema):
        shown = text(render([USER], response_format={"type": "json_schema", "json_schema": holder}))
        assert '```json\n{"type":"object"}\n```' in shown
    assert render([USER], tool_choice={"type": "function", "function": {"name": "f"}}) == render([USER])
    assert render([USER], effort="high", thinking=False) == render([USER], thinking=False)


@pytest.mark.parametrize(
    ("messages", "options", "wanted"),
    [
        ([{"role": "robot", "content": ""}], {}, "role is 'robot'; roles: user, system, assistant, tool"),
        ([{"content": ""}], {}, "role is None"),
        (["hi"], {}, "message 0 is of type str, expected a mapping"),
        ([{"role": "user", "content": 3}], {}, "content is of type int, expected text or a list of parts"),
        ([{"role": "user", "content": ["hi"]}], {}, "part has type None; types: text, image, image_url"),
        ([{"role": "user", "content": [{"type": "audio"}]}], {}, "part has type 'audio'"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "text of a content part is None, expected text"),
        ([{"role": "user", "content": "", "name": 3}], {}, "name of a user message is 3, expected text"),
        ([{"role": "assistant", "reasoning_content": 3}], {}, "reasoning_content is 3, expected text"),
        ([{"role": "assistant", "tool_calls": "f"}], {}, "tool_calls is not a list of calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], {}, "name of a tool call's function is None"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}],
            {},
            "are a JSON array, not an obj",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": 3}]}],
            {},
            "are a JSON number, not an object",
        ),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": {1}}}]}], {}, "is no JSON: Object of"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {1: 1}}]}], {}, "key is 1, expected text"),
        ([{"role": "tool", "content": "x"}], {}, "answers no call and has no name: give tool_call_id or name"),
        ([{"role": "tool", "content": "x", "name": 3}], {}, "name of a tool message is 3, expected text"),
        ([USER], {"effort": "medium"}, "thinking effort is 'medium'; choices: low, high, max"),
        ([USER], {"tools": [object()]}, "a tool, schema or argument is no JSON"),
        ([USER], {"images": ["x"]}, "1 images were given, more than the messages refer to"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "refer to more images than were given"),
        ([USER], {"response_format": {"type": "json_schema"}}, "but no json_schema with the schema in it"),
    ],
)
def test_mistakes(messages: list, options: dict, wanted: str) -> None:
    with pytest.raises(ChatError) as error:
        render(messages, **options)
    assert wanted in str(error.value)


def test_image_prompt(tokenizer: Tokenizer) -> None:
    pieces = tokenizer.pieces(tokenizer.encode_segment(image_prompt(640, 480), True))
    assert [piece.text for piece in pieces] == [
        "<|media_begin|>",
        "image 640x480",
        "<|media_content|>",
        "<|media_pad|>",
        "<|media_end|>",
    ]
