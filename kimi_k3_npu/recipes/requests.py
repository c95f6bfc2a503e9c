"""Prompts of a batch from the lines of a file: text, our own JSON, or requests of OpenAI's batches.

A field of a request is used, has a value that says nothing, or is refused by name: none that would change the answer is
dropped.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3_npu.errors import KimiK3Error
from kimi_k3_npu.lines import BadLine, read_file, read_object

if TYPE_CHECKING:
    from kimi_k3_npu.tokenizer import Tokenizer

KINDS = ("prompt", "token_ids", "messages")
#: Temperatures below this are 0, as in serving engines: logits divided by less would overflow.
NO_SAMPLING = 1e-5

#: Where OpenAI's batches send a request, and what its body then has.
_ENDPOINTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
#: How a chat is told to the model.
_CHAT = ("tools", "tool_choice", "response_format", "reasoning_effort", "chat_template_kwargs")
_SAMPLING = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "seed")
#: Fields that would change the answer and are not supported, with the values that would not.
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "stream": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": (),
    "echo": (False,),
    "suffix": ("",),
}
#: Fields of a body that say nothing of the answer; the model is that of the command line.
_ASIDE = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


class BatchError(KimiK3Error):
    """The input, the results file, or what was asked of a batch is wrong."""


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """What an answer depends on beside its prompt."""

    model: str
    engine: str
    max_new_tokens: int
    temperature: float
    top_p: float | None
    seed: int | None
    thinking: bool
    #: Arguments of the engine, such as the dtype of the weights.
    engine_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One prompt. `line` is its line in the input, from 1; `chat` says that the answer is to be read as a message.

    `id_key` is what the input calls the id, and `changes` are settings that hold for this prompt alone.
    """

    line: int
    id: str | int
    token_ids: tuple[int, ...]
    chat: bool
    id_key: str = "id"
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def digest(self) -> str:
        """Tells this prompt, and what is asked of it, from any other."""
        whole = [self.id, *self.token_ids, *self.changes]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]

    def settings(self, settings: BatchSettings) -> BatchSettings:
        """The batch's settings as they are for this prompt."""
        return replace(settings, **dict(self.changes))


def read_requests(
    path: Path, tokenizer: Tokenizer | None, vocab_size: int, *, as_json: bool, thinking: bool
) -> tuple[list[Request], list[BadLine]]:
    """The prompts of a file: a line of text each, or a JSON object each with one of prompt, token_ids and messages.

    Empty lines are skipped. An object may have an `id`, which is its line's number otherwise; keys that no engine knows
    are the user's own. An object with a `body` is a request of OpenAI's batches. Lines that cannot be used are returned
    beside the requests.

    Raises:
        LineError: The file cannot be read.
    """
    found: list[Request] = []
    bad: list[BadLine] = []
    lines_of: dict[str | int, int] = {}  # of ids that were given
    for line in read_file(path):
        if isinstance(line, BadLine):
            bad.append(line)
            continue
        if not line.text.strip():
            continue
        try:
            reader = _LineReader(line.line, tokenizer, thinking)
            request, has_id = reader.read_json(line.text) if as_json else (reader.read_text(line.text), False)
            _check_ids(request.token_ids, vocab_size)
            if has_id and lines_of.setdefault(request.id, line.line) != line.line:
                raise BatchError(f"id {request.id!r} is already that of line {lines_of[request.id]}")
        except RecursionError:
            bad.append(BadLine(line.line, "is nested too deeply"))
        except KimiK3Error as error:
            bad.append(BadLine(line.line, str(error)))
        else:
            found.append(request)
    return found, bad


@dataclass(frozen=True)
class _LineReader:
    """Reads the request of one line."""

    line: int
    tokenizer: Tokenizer | None
    thinking: bool

    def read_text(self, text: str) -> Request:
        return Request(self.line, self.line, tuple(self._encoder().encode_segment(text, special=True)), chat=False)

    def read_json(self, text: str) -> tuple[Request, bool]:
        """The request, and whether it has an id of its own."""
        raw = read_object(text)
        in_envelope = "body" in raw and not any(kind in raw for kind in KINDS)
        body = _body(raw) if in_envelope else raw
        given = [kind for kind in KINDS if kind in body]
        if len(given) != 1:
            raise BatchError(f"has {' and '.join(given) or 'no prompt'}, expected one of {', '.join(KINDS)}")
        id_key = "custom_id" if in_envelope else "id"
        identity = raw.get(id_key, self.line)
        if isinstance(identity, bool) or not isinstance(identity, str | int):
            raise BatchError(f"{id_key} is {identity!r:.40}, expected text or a whole number")
        _check_fields(body, given[0], refuse_unknown=in_envelope)
        changes = _changes(body)
        ids = self._ids(given[0], body[given[0]]) if given[0] != "messages" else self._chat(body, changes)
        request = Request(
            self.line, identity, tuple(ids), given[0] == "messages", id_key, tuple(sorted(changes.items()))
        )
        return request, id_key in raw

    def _ids(self, kind: str, value: Any) -> list[int]:
        if kind == "token_ids":
            if not isinstance(value, list) or not all(type(token) is int for token in value):
                raise BatchError("token_ids is not a list of whole numbers")
            return value
        if not isinstance(value, str):
            raise BatchError(f"prompt is {value!r:.40}, expected text")
        return self._encoder().encode_segment(value, special=True)

    def _chat(self, body: Mapping[str, Any], changes: dict[str, Any]) -> list[int]:
        from kimi_k3_npu.chat.prompt import chat_prompt

        if not isinstance(body["messages"], list) or not body["messages"]:
            raise BatchError("messages is not a list of messages")
        options = _chat_options(body, self.thinking)
        if options["thinking"] != self.thinking:
            changes["thinking"] = options["thinking"]
        return chat_prompt(self._encoder(), body["messages"], **options).token_ids

    def _encoder(self) -> Tokenizer:
        if self.tokenizer is None:
            raise BatchError("is text, and the folder has no tokenizer; give token_ids")
        return self.tokenizer


def _body(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What OpenAI's envelope holds."""
    if unknown := sorted(raw.keys() - {"custom_id", "method", "url", "body"}):
        raise BatchError(f"has {', '.join(unknown)} beside a body; expected custom_id, method and url")
    if raw.get("method", "POST") != "POST":
        raise BatchError(f"method is {raw['method']!r:.40}, expected POST")
    body, url = raw["body"], raw.get("url")
    if not isinstance(body, dict):
        raise BatchError(f"body is a JSON {type(body).__name__}, expected an object")
    if url is not None and (not isinstance(url, str) or url not in _ENDPOINTS):
        raise BatchError(f"url is {url!r:.60}; choices: {', '.join(_ENDPOINTS)}")
    if url is not None and _ENDPOINTS[url] not in body:
        raise BatchError(f"has no {_ENDPOINTS[url]}, which {url} takes")
    return body


def _check_fields(body: Mapping[str, Any], kind: str, *, refuse_unknown: bool) -> None:
    """Raise BatchError for fields that would change the answer and cannot be followed."""
    for name, value in body.items():
        if value is None:
            continue
        if name in _ONLY and value not in _ONLY[name]:
            raise BatchError(f"{name} is {value!r:.40}, which is not supported here")
        if name in _CHAT and kind != "messages":
            raise BatchError(f"{name} has no effect without messages")
        known = name in (kind, *_ONLY, *_CHAT, *_SAMPLING, *_ASIDE)
        if refuse_unknown and not known:
            raise BatchError(f"{name} is not a field that is known here")


def _changes(body: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that the fields of a request change."""
    found: dict[str, Any] = {}
    limits = {name: _whole(body, name, 1) for name in _SAMPLING[:2] if body.get(name) is not None}
    if len(set(limits.values())) > 1:
        raise BatchError(" and ".join(f"{name} is {value}" for name, value in limits.items()) + "; give one of them")
    for value in limits.values():
        found["max_new_tokens"] = value
    if body.get("temperature") is not None:
        temperature = _number(body, "temperature")
        found["temperature"] = temperature if temperature >= NO_SAMPLING else 0.0
    if body.get("top_p") is not None:
        found["top_p"] = _number(body, "top_p", above=0.0, most=1.0)
    if body.get("seed") is not None:
        found["seed"] = _whole(body, "seed", 0, 2**31 - 1)
    return found


def _chat_options(body: Mapping[str, Any], thinking: bool) -> dict[str, Any]:
    """What a request says of the chat, as options of `render`."""
    template = body.get("chat_template_kwargs") or {}
    if not isinstance(template, dict) or template.keys() - {"thinking", "enable_thinking", "thinking_effort"}:
        raise BatchError(f"chat_template_kwargs is {template!r:.60}; it may have thinking and thinking_effort")
    switches = [template[name] for name in ("thinking", "enable_thinking") if template.get(name) is not None]
    if any(not isinstance(switch, bool) for switch in switches) or len(set(switches)) > 1:
        raise BatchError(f"chat_template_kwargs is {template!r:.60}: thinking is not one of true and false")
    thinks = switches[0] if switches else thinking
    efforts = [e for e in (body.get("reasoning_effort"), template.get("thinking_effort")) if e is not None]
    if efforts and not thinks:
        raise BatchError(f"an effort of {efforts[0]!r:.40} has no effect without thinking")
    choice, form, tools = body.get("tool_choice"), body.get("response_format") or {}, body.get("tools") or None
    if choice not in (None, "auto", "none", "required"):
        raise BatchError(f"tool_choice is {choice!r:.60}; choices: auto, none, required")
    if not isinstance(form, dict) or form.get("type", "text") not in ("text", "json_object", "json_schema"):
        raise BatchError(f"response_format is {form!r:.60}; types: text, json_object, json_schema")
    if tools and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise BatchError("tools is not a list of declarations")
    return {
        "thinking": thinks,
        "effort": efforts[0] if efforts else None,
        "tools": tools,
        "tool_choice": choice,
        "response_format": form or None,
    }


def _whole(body: Mapping[str, Any], name: str, least: int, most: float = math.inf) -> int:
    value = body[name]
    if type(value) is not int or not least <= value <= most:
        limit = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise BatchError(f"{name} is {value!r:.40}, expected a whole number {limit}")
    return value


def _number(body: Mapping[str, Any], name: str, above: float = -1e-9, most: float = 1e9) -> float:
    value = body[name]
    if type(value) not in (int, float) or not above < value <= most:
        wanted = "a number of at least 0" if above < 0 else f"a number above {above:g}, at most {most:g}"
        raise BatchError(f"{name} is {value!r:.40}, expected {wanted}")
    return float(value)


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        raise BatchError("is empty; generation needs at least one token to continue")
    if outside := [token for token in ids if not 0 <= token < vocab_size]:
        raise BatchError(f"holds token id {outside[0]}, outside the vocabulary 0..{vocab_size - 1}")
