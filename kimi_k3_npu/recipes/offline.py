"""Answers to a file of prompts, one line of JSON each, written as they come: a run that is killed goes on where it was.

The results file is the only record. A line that was cut while it was written is dropped and its prompt asked again; an
answer that is there is never asked for again. The settings of the first run stay beside the results, so that a later
run cannot mix answers of two models into one file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

from kimi_k3_npu.errors import KimiK3Error
from kimi_k3_npu.tokenizer import Tokenizer

KINDS = ("prompt", "token_ids", "messages")


class BatchError(KimiK3Error):
    """The input, the results file, or what was asked of a batch is wrong."""


@dataclass(frozen=True)
class Request:
    """One prompt. `line` is its line in the input, from 1; `chat` says that the answer is to be read as a message."""

    line: int
    id: str | int
    token_ids: tuple[int, ...]
    chat: bool

    @property
    def digest(self) -> str:
        """Tells this prompt from any other."""
        return hashlib.sha256(json.dumps([self.id, *self.token_ids]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Generated:
    """New token ids, the one that ended the answer included; `finish_reason` is "stop" or "length"."""

    token_ids: tuple[int, ...]
    finish_reason: str


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


class OfflineEngine(Protocol):
    """Something that generates for many prompts."""

    def generate(self, requests: Sequence[Request], settings: BatchSettings) -> Iterator[tuple[Request, Generated]]:
        """Each request once, in any order, as soon as it is finished."""
        ...

    def close(self) -> None:
        """Give back what the engine holds."""
        ...


@dataclass(frozen=True)
class BadLine:
    """A line of the input that is no prompt, and why."""

    line: int
    reason: str


def read_requests(
    path: Path, tokenizer: Tokenizer | None, vocab_size: int, *, as_json: bool, thinking: bool
) -> tuple[list[Request], list[BadLine]]:
    """The prompts of a file: a line of text each, or a JSON object each with one of prompt, token_ids and messages.

    Empty lines are skipped. An object may have an `id`; other keys are the user's own. Lines that cannot be used are
    returned beside the requests.

    Raises:
        BatchError: There is no such file, or it is not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON may hold other line ends as they are
    except (OSError, UnicodeDecodeError) as error:
        raise BatchError(f"{path}: {error}") from None
    found: dict[str | int, Request] = {}
    bad = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _read_line(line, number, tokenizer, as_json=as_json, thinking=thinking)
            _check_ids(request.token_ids, vocab_size)
            if request.id in found:
                raise BatchError(f"id {request.id!r} is already that of line {found[request.id].line}")
        except KimiK3Error as error:
            bad.append(BadLine(number, str(error)))
        else:
            found[request.id] = request
    return list(found.values()), bad


def _read_line(line: str, number: int, tokenizer: Tokenizer | None, *, as_json: bool, thinking: bool) -> Request:
    if not as_json:
        text = line.removesuffix("\r")
        return Request(number, number, tuple(_encoder(tokenizer).encode_segment(text, special=True)), chat=False)
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise BatchError(f"not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise BatchError(f"a JSON {type(raw).__name__}, expected an object")
    given = [kind for kind in KINDS if kind in raw]
    if len(given) != 1:
        raise BatchError(f"has {' and '.join(given) or 'no prompt'}, expected one of {', '.join(KINDS)}")
    identity = raw.get("id", number)
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise BatchError(f"id is {identity!r}, expected text or a whole number")
    value = raw[given[0]]
    if given[0] == "token_ids":
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise BatchError("token_ids is not a list of whole numbers")
        ids = value
    elif given[0] == "prompt":
        if not isinstance(value, str):
            raise BatchError(f"prompt is {value!r:.40}, expected text")
        ids = _encoder(tokenizer).encode_segment(value, special=True)
    else:
        ids = _chat(value, _encoder(tokenizer), thinking)
    return Request(number, identity, tuple(ids), chat=given[0] == "messages")


def _chat(messages: Any, tokenizer: Tokenizer, thinking: bool) -> list[int]:
    from kimi_k3_npu.chat.prompt import chat_prompt

    if not isinstance(messages, list) or not messages:
        raise BatchError("messages is not a list of messages")
    return chat_prompt(tokenizer, messages, thinking=thinking).token_ids


def _encoder(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise BatchError("is text, and the folder has no tokenizer; give token_ids")
    return tokenizer


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        raise BatchError("is empty; generation needs at least one token to continue")
    if outside := [token for token in ids if not 0 <= token < vocab_size]:
        raise BatchError(f"holds token id {outside[0]}, outside the vocabulary 0..{vocab_size - 1}")


class Results:
    """The results file, open for this run alone; a context manager.

    Raises:
        BatchError: Another run has it open, it holds what is no result, or its settings are others.
    """

    def __init__(self, path: Path, settings: BatchSettings) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("a+b")
        try:
            self._lock()
            self._check_settings(settings)
            self.done = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def missing(self, requests: Iterable[Request]) -> list[Request]:
        """The requests that have no answer yet. Raises BatchError if an answer there is to another prompt."""
        left = []
        for request in requests:
            digest = self.done.get(request.line)
            if digest is None:
                left.append(request)
            elif digest != request.digest:
                raise BatchError(
                    f"{self.path} answers another prompt for line {request.line}: the input has changed; use a new file"
                )
        return left

    def add(self, request: Request, answer: dict[str, Any]) -> None:
        """Write one line, whole, to the end."""
        record = {"id": request.id, "line": request.line, "prompt": request.digest, **answer}
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.done[request.line] = request.digest

    def sync(self) -> None:
        """Let what is written outlive the machine."""
        os.fsync(self._file.fileno())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchError(f"{self.path}: another batch is writing to it") from None

    def _check_settings(self, settings: BatchSettings) -> None:
        file = self.path.with_name(self.path.name + ".settings.json")
        now = asdict(settings)
        empty = not self._file.seek(0, os.SEEK_END)
        if empty or not file.is_file():
            if not empty:
                raise BatchError(f"{self.path}: has results, but {file.name} is gone; use a new file")
            part = file.with_name(file.name + ".part")
            part.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
            part.replace(file)
            return
        before = json.loads(file.read_text(encoding="utf-8"))
        if other := [name for name in now if before.get(name) != now[name]]:
            was = ", ".join(f"{name} {before.get(name)} (now {now[name]})" for name in other)
            raise BatchError(f"{self.path}: its answers were made with {was}; use a new file, or the same settings")

    def _read(self) -> dict[int, str]:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):  # the run was killed while it wrote
            self._file.truncate(whole)
        done: dict[int, str] = {}
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                record = json.loads(line)
                done[record["line"]] = record["prompt"]
            except (ValueError, KeyError, TypeError):
                raise BatchError(f"{self.path}: line {number} is no result of a batch; use a new file") from None
        return done


def run_batch(
    engine: OfflineEngine,
    requests: Sequence[Request],
    results: Results,
    settings: BatchSettings,
    tokenizer: Tokenizer | None,
    *,
    window: int,
    advance: Callable[[], None] = lambda: None,
) -> int:
    """Answer what is missing, `window` prompts at a time; returns how many were. `advance` is called after each."""
    left = results.missing(requests)
    for start in range(0, len(left), window):
        for request, generated in engine.generate(left[start : start + window], settings):
            results.add(request, _as_record(request, generated, settings, tokenizer))
            advance()
        results.sync()
    return len(left)


def _as_record(
    request: Request, generated: Generated, settings: BatchSettings, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    record: dict[str, Any] = {}
    if request.chat and tokenizer is not None:
        from kimi_k3_npu.chat.parse import parse_answer

        record["message"] = parse_answer(tokenizer.pieces(generated.token_ids), thinking=settings.thinking).as_message()
    elif tokenizer is not None:
        record["text"] = tokenizer.decode(generated.token_ids, skip_special=True)
    return record | {
        "token_ids": list(generated.token_ids),
        "finish_reason": generated.finish_reason,
        "prompt_tokens": len(request.token_ids),
    }
