"""Generated text and whole conversations back to what they say: round trips, streaming, and anything malformed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kimi_k3_npu.chat.calls import with_results_in_order
from kimi_k3_npu.chat.conversation import parse_conversation
from kimi_k3_npu.chat.parse import Answer, AnswerParser, Delta, ToolCall, parse_answer, pieces_of_text
from kimi_k3_npu.chat.render import Segment, encode, image_prompt, render
from kimi_k3_npu.tokenizer import PieceStream, Tokenizer

#: A busy machine is no fault of an example.
MARKUP = [
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    "think",
    "response",
    "message",
    "call",
    "argument",
    '"',
    "&",
]
TEXT = st.one_of(
    st.just(""),
    st.text(st.characters(codec="utf-8")),
    st.lists(st.one_of(st.sampled_from(MARKUP), st.text(st.characters(codec="utf-8"), max_size=3)), max_size=6).map(
        "".join
    ),
)
NAME = TEXT.filter(bool)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXT, JSON, max_size=4)
SIZE = st.tuples(st.integers(1, 20_000), st.integers(1, 20_000))
CONTENT = st.one_of(
    TEXT,
    st.lists(
        st.one_of(
            TEXT.map(lambda text: {"type": "text", "text": text}),
            SIZE.map(lambda size: {"type": "image", "size": size}),
        ),
        max_size=4,
    ),
)
SPEAKER = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system"]), "content": CONTENT}, optional={"name": NAME}
)


@st.composite
def turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    """An assistant message, and the results of its calls in any order."""
    message: dict[str, Any] = {"role": "assistant", "content": draw(CONTENT), "reasoning_content": draw(TEXT)}
    calls = draw(st.lists(st.tuples(NAME, st.one_of(ARGUMENTS, ARGUMENTS.map(json.dumps))), max_size=3))
    if not calls:
        return [message]
    message["tool_calls"] = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    order = draw(st.permutations(range(len(calls))))
    answered = order[: draw(st.integers(0, len(calls)))]
    return [message, *({"role": "tool", "tool_call_id": f"c{i}", "content": draw(CONTENT)} for i in answered)]


CONVERSATIONS = st.lists(
    st.one_of(
        SPEAKER.map(lambda message: [message]),
        turns(),
        st.lists(st.dictionaries(NAME, JSON, min_size=1, max_size=2), min_size=1, max_size=2).map(
            lambda tools: [{"role": "system", "tools": tools}]
        ),
    ),
    max_size=4,
).map(lambda parts: [message for part in parts for message in part])


def sizes(messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Of the images, in the order in which the prompt has them."""
    ordered = (message for message, _ in with_results_in_order(messages))
    parts = [part for message in ordered for part in message.get("content", []) if isinstance(part, dict)]
    return [part["size"] for part in parts if part["type"] == "image"]


def plain(content: Any) -> Any:
    """Content as it comes back: neighbouring texts are one, and without images it is a string."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "text" and parts and parts[-1]["type"] == "text":
            parts[-1] = {"type": "text", "text": parts[-1]["text"] + part["text"]}
        elif part != {"type": "text", "text": ""}:
            parts.append(part)
    return parts if any(part["type"] == "image" for part in parts) else "".join(part["text"] for part in parts)


def expected(messages: list[dict[str, Any]], thinking: bool) -> list[dict[str, Any]]:
    """The messages as they come back: results in the order of the calls and named after them, ids gone."""
    out: list[dict[str, Any]] = []
    position = 0
    while position < len(messages):
        message = dict(messages[position])
        position += 1
        if "content" in message:
            message["content"] = plain(message["content"])
        calls = message.pop("tool_calls", [])
        reasoning = message.pop("reasoning_content", "")
        if reasoning.strip() and thinking:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
                }
                for call in calls
            ]
        out.append(message)
        results = []
        while position < len(messages) and messages[position]["role"] == "tool":
            results.append(messages[position])
            position += 1
        for result in sorted(results, key=lambda result: result["tool_call_id"]):
            name = calls[int(result["tool_call_id"][1:])]["function"]["name"]
            out.append({"role": "tool", "name": name, "content": plain(result["content"])})
    return out


def with_arguments_read(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = json.loads(json.dumps(messages))  # sizes as lists
    for message in messages:
        for call in message.get("tool_calls", []):
            call.pop("id", None)  # made when a message is read; see test_calls_have_ids
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


def answered_in_reverse() -> list[dict[str, Any]]:
    """Two results with an image each, in another order than the calls: the images are reordered with them."""
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": {}}} for i in range(2)]
    results = [
        {"role": "tool", "tool_call_id": f"c{i}", "content": [{"type": "image", "size": (1, 2 + i)}]} for i in (1, 0)
    ]
    return [{"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": calls}, *results]


@settings(max_examples=200)
@given(messages=CONVERSATIONS, thinking=st.booleans())
@example(messages=answered_in_reverse(), thinking=False)
def test_round_trip(tokenizers: dict[str, Tokenizer], messages: list[dict[str, Any]], thinking: bool) -> None:
    images = [image_prompt(*size) for size in sizes(messages)]
    segments = render(messages, thinking=thinking, images=images)
    tokenizer = tokenizers["tiny"]
    back = parse_conversation(tokenizer.pieces(encode(tokenizer, segments)))
    assert with_arguments_read(back) == with_arguments_read(expected(messages, thinking))
    assert parse_conversation(segments) == back


@settings(max_examples=200)
@given(turn=turns(), thinking=st.booleans())
def test_answer_round_trip(tokenizers: dict[str, Tokenizer], turn: list[dict[str, Any]], thinking: bool) -> None:
    """What a model generates, from after the prompt, piece by piece: all at once and in a stream."""
    tokenizer, message = tokenizers["tiny"], dict(turn[0], content=plain(turn[0]["content"]))
    if not isinstance(message["content"], str):
        message["content"] = ""
    prompt = encode(tokenizer, render([], thinking=thinking))
    ids = encode(tokenizer, render([message], thinking=thinking, add_generation_prompt=False))
    assert ids[: len(prompt)] == prompt
    ids = ids[len(prompt) :]
    answer = parse_answer(tokenizer.pieces(ids), thinking=thinking)
    assert answer.finished
    assert with_arguments_read([answer.as_message()]) == with_arguments_read(expected([message], thinking))

    stream, parser = PieceStream(tokenizer), AnswerParser(thinking)
    deltas = [delta for token in ids for piece in stream.feed(token) for delta in parser.feed(piece)]
    assert parser.end() == answer
    assert "".join(delta.text for delta in deltas if delta.kind == "reasoning") == answer.reasoning
    assert "".join(delta.text for delta in deltas if delta.kind == "content") == answer.content
    assert [delta.call for delta in deltas if delta.kind == "tool_call"] == answer.tool_calls


@settings(max_examples=100)
@given(turn=turns(), thinking=st.booleans(), data=st.data())
def test_cut_anywhere(
    tokenizers: dict[str, Tokenizer], turn: list[dict[str, Any]], thinking: bool, data: st.DataObject
) -> None:
    """A prefix of an answer is a prefix of everything that it says, and no call that was cut off passes for whole."""
    tokenizer, message = tokenizers["tiny"], dict(turn[0], content="an answer")
    ids = encode(tokenizer, render([message], thinking=thinking, add_generation_prompt=False))
    ids = ids[len(encode(tokenizer, render([], thinking=thinking))) :]
    whole = parse_answer(tokenizer.pieces(ids), thinking=thinking)
    cut = parse_answer(tokenizer.pieces(ids[: data.draw(st.integers(0, len(ids) - 1))]), thinking=thinking)
    assert not cut.finished
    assert whole.reasoning.startswith(cut.reasoning.rstrip("\ufffd"))
    assert whole.content.startswith(cut.content)
    calls = [call for call in cut.tool_calls if call.complete]
    assert calls == whole.tool_calls[: len(calls)]
    assert len(cut.as_message().get("tool_calls", [])) == len(calls) <= len(cut.tool_calls) <= len(calls) + 1


PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *(
                    Segment(text, True)
                    for text in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|media_begin|>")
                ),
                *(Segment(text, True) for text in ("<|media_pad|>", "<|media_end|>", "[BOS]", "[EOT]")),
                *(
                    Segment(text, False)
                    for text in ("think", "response", "tools", 'call tool="f" index="1"', "call", "json")
                ),
                *(Segment(f'argument key="k" type="{kind}"', False) for kind in ("string", "number", "object", "odd")),
                *(
                    Segment(text, False)
                    for text in ("message", 'message role="assistant"', 'message role="user"', "argument")
                ),
                *(
                    Segment(text, False)
                    for text in ('message role="system" type="tool-declare"', "image 3x4", "[" * 2000)
                ),
            ]
        ),
        st.text(max_size=5).map(lambda text: Segment(text, False)),
    ),
    max_size=30,
)


@settings(max_examples=500)
@given(pieces=PIECES, thinking=st.booleans())
def test_nothing_raises(pieces: list[Segment], thinking: bool) -> None:
    answer = parse_answer(pieces, thinking=thinking)
    json.dumps(answer.as_message())
    assert all(call.arguments is not None for call in answer.tool_calls)
    json.dumps(parse_conversation(pieces))


def parsed(text: str, thinking: bool = True) -> Answer:
    return parse_answer(pieces_of_text(text), thinking=thinking)


THOUGHT = "hm<|close|>think<|sep|><|open|>response<|sep|>yes"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Answer()),
        ("hm", Answer("hm")),
        ("hm<|close|>", Answer("hm")),
        ("hm<|close|>think", Answer("hm")),
        (THOUGHT, Answer("hm", "yes")),
        (THOUGHT + "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>", Answer("hm", "yes", finished=True)),
        (THOUGHT + "<|end_of_msg|>more", Answer("hm", "yes", finished=True)),
        # Blocks that were not closed, or closed twice, or in the wrong order.
        ("hm<|open|>response<|sep|>yes", Answer("hm", "yes")),
        ("hm<|close|>think<|sep|><|close|>think<|sep|> what", Answer("hm")),
        (THOUGHT + "<|close|>message<|sep|>", Answer("hm", "yes")),
        # The model skips thinking: it writes the answer and closes a response that it never opened.
        ("yes<|close|>response<|sep|><|end_of_msg|>", Answer("", "yes", finished=True)),
        (THOUGHT + "<|open|>x<|sep|>inner<|close|>x<|sep|> and no", Answer("hm", "yesinner and no")),
        # Tags that the format has not, or that never end, cost no text.
        ("a<|open|>x<|sep|>b<|close|>think<|sep|><|open|>response<|sep|>c", Answer("ab", "c")),
        (THOUGHT + "<|open|> is how a tag begins, and so on", Answer("hm", "yes is how a tag begins, and so on")),
        (THOUGHT + "<|close|>no tag", Answer("hm", "yesno tag")),
        (THOUGHT + "<|open|>so<|end_of_msg|>", Answer("hm", "yesso", finished=True)),
        (THOUGHT + "<|open|>a<|open|>b<|sep|>c", Answer("hm", "yesac")),
        (THOUGHT + "<|open|>message<|sep|>a<|open|>json<|sep|>b", Answer("hm", "yesab")),
        (THOUGHT + '<|open|>a b="' + "x" * 10_000, Answer("hm", 'yesa b="' + "x" * 10_000)),
        # Control tokens of other kinds, and a separator of no tag.
        ("hm<|sep|>!", Answer("hm!")),
    ],
)
def test_malformed(text: str, expected: Answer) -> None:
    assert parsed(text) == expected


def test_calls() -> None:
    def calls(text: str, end: str = "<|end_of_msg|>") -> list[ToolCall]:
        return parsed("<|open|>tools<|sep|>" + text + end, thinking=False).tool_calls

    def argument(value: str, kind: str = "string", key: str = "k") -> str:
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'

    opened, closed = '<|open|>call tool="f" index="1"<|sep|>', "<|close|>call<|sep|>"
    assert calls(opened + closed) == [ToolCall("f", "{}", True)]
    assert calls(opened + argument("1.50", "number") + closed) == [ToolCall("f", '{"k": 1.50}', True)]
    assert calls(opened + argument("1.50") + closed) == [ToolCall("f", '{"k": "1.50"}', True)]
    for broken in ("{a", "NaN", "", "1 2", "[" * 100_000):
        assert calls(opened + argument(broken, "object") + closed) == [ToolCall("f", json.dumps({"k": broken}), True)]
    assert calls(opened + argument("a") + argument("b") + closed) == [ToolCall("f", '{"k": "b"}', True)]
    assert calls(opened + argument("v", key="a&amp;&quot;") + closed) == [ToolCall("f", '{"a&\\"": "v"}', True)]
    json_block = '<|open|>json type="object"<|sep|>{"a": Rome<|close|>json<|sep|>'
    assert calls(opened + json_block + closed) == [ToolCall("f", '{"a": Rome', True)]
    # Text outside of arguments is none, a call without a name stays one, and the next call ends one left open.
    assert calls(opened + "x" + argument("a") + "y" + closed) == [ToolCall("f", '{"k": "a"}', True)]
    assert calls("<|open|>call<|sep|>" + closed) == [ToolCall("", "{}", True)]
    assert calls(opened + argument("a") + opened + closed) == [
        ToolCall("f", '{"k": "a"}', True),
        ToolCall("f", "{}", True),
    ]
    half = opened + '<|open|>argument key="k" type="string"<|sep|>Ro'
    assert calls(half, end="") == [ToolCall("f", '{"k": "Ro"}', False)]
    assert parsed("<|open|>tools<|sep|>" + half).as_message() == {"role": "assistant", "content": ""}


def test_skipped_thinking_in_a_stream() -> None:
    parser = AnswerParser()
    deltas = [delta for piece in pieces_of_text("yes<|close|>response<|sep|>") for delta in parser.feed(piece)]
    assert [(delta.kind, delta.text) for delta in deltas] == [("reasoning", "yes"), ("reasoning_was_content", "")]


def added_up(deltas: Iterable[Delta]) -> dict[str, Any]:
    """What someone who only sees the deltas ends with."""
    text = {"reasoning": "", "content": ""}
    calls = []
    for delta in deltas:
        if delta.kind == "reasoning_was_content":
            text = {"reasoning": "", "content": text["reasoning"] + text["content"]}
        elif delta.call:
            calls.append(delta.call)
        else:
            text[delta.kind] += delta.text
    return Answer(**text, tool_calls=calls).as_message()


def tag(kind: str, header: str) -> list[Segment]:
    return [Segment(kind, True), Segment(header, False), Segment("<|sep|>", True)]


#: Whole tags in any order, with stray pieces between them: random pieces alone hardly ever make a tag.
TAGS = st.lists(
    st.one_of(
        st.builds(
            tag,
            st.sampled_from(["<|open|>", "<|close|>"]),
            st.sampled_from(["think", "response", "tools", 'call tool="f" index="1"', "call", "json", "x", "message"]),
        ),
        st.sampled_from(["a", "b c", ""]).map(lambda text: [Segment(text, False)]),
        PIECES.map(lambda pieces: pieces[:2]),
    ),
    max_size=12,
).map(lambda parts: [piece for part in parts for piece in part])


@settings(max_examples=300)
@given(pieces=TAGS, thinking=st.booleans(), data=st.data())
@example([Segment("yes", False), *tag("<|close|>", "response")], True, None)
def test_deltas_add_up(pieces: list[Segment], thinking: bool, data: st.DataObject | None) -> None:
    """Of any stream, after every piece; and it does not matter where its text is cut into pieces."""
    parser, deltas = AnswerParser(thinking), []
    for count, piece in enumerate(pieces, 1):
        deltas += parser.feed(piece)
        message = parse_answer(pieces[:count], thinking=thinking).as_message()
        assert added_up(deltas) == message
        identities = [call["id"] for call in message.get("tool_calls", [])]
        assert len(set(identities)) == len(identities)
    cut: list[Segment] = []
    for piece in pieces:
        place = data.draw(st.integers(0, len(piece.text))) if data and not piece.special else 0
        parts = (piece.text[:place], piece.text[place:])
        cut += [Segment(part, piece.special) for part in parts if part]
    whole = parse_answer(pieces, thinking=thinking)
    assert parse_answer(cut, thinking=thinking).as_message() == whole.as_message()


def test_calls_have_ids() -> None:
    """The same at every parse, their own each, and results that name them find their calls in the next turn."""
    call = '<|open|>call tool="{}" index="1"<|sep|><|close|>call<|sep|>'
    text = "<|close|>think<|sep|><|open|>tools<|sep|>" + "".join(map(call.format, "ffg")) + "<|end_of_msg|>"
    message = parsed(text).as_message()
    identities = [call["id"] for call in message["tool_calls"]]
    assert len(set(identities)) == 3
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", identity) for identity in identities)
    assert [call["id"] for call in parsed(text).as_message()["tool_calls"]] == identities
    assert not set(identities) & {call["id"] for call in parsed("hm" + text).as_message()["tool_calls"]}
    results = [{"role": "tool", "tool_call_id": identity, "content": identity} for identity in identities[::-1]]
    back = parse_conversation(render([message, *results]))
    assert [(one["name"], one["content"]) for one in back[1:]] == list(zip("ffg", identities, strict=True))


def test_what_the_format_says_itself() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    options = {"tools": tools, "effort": "low", "tool_choice": "none", "response_format": {"type": "json_object"}}
    back = parse_conversation(render([{"role": "user", "content": "hi"}], **options))
    assert back[0] == {"role": "system", "tools": tools}
    assert [message.get("type") for message in back] == [
        None,
        "thinking-effort",
        None,
        "tool-choice",
        "response-format",
    ]
    assert back[2] == {"role": "user", "content": "hi"}
